"""Check the names in a config (modes, stream, arms), and its arguments against the signatures that take them."""

import fnmatch
import inspect
import re
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, Union

from ..schedules import MODES, STREAMS, Mode, Schedule, Stage, mode_printed_as, unknown_mode_message
from ..text import SCALES_LOSS, check_known

Config = Mapping[str, Any]  # the composed config as plain dicts and lists, without OmegaConf's containers

AUTO = "auto"  # as a mode's name: the strategy starts with `fused_sparse_dist` and chooses a mode during training
SWITCHES = ("start_batch", "end_batch")  # options of a `Mode` that keep its schedule
MODE_OPTIONS = tuple(field.name for field in fields(Mode) if field.name != "name")
METRICS = ("val", "test")  # prefixes of reported metrics


def mode_of(config: Config) -> Mode:
    """Return the config's mode with its options; for "auto", `fused_sparse_dist` under the name "auto"."""
    pipeline = config["pipeline"]
    for name in pipeline:
        check_known("option of pipeline", name, ("name", "schedule", *MODE_OPTIONS))
    own, options = pipeline.get("schedule"), _given(pipeline, MODE_OPTIONS)
    if pipeline.get("name") == AUTO and not own:
        if given := [name for name, value in options.items() if value]:
            raise ValueError(
                f"pipeline=auto takes no options of modes, got pipeline.{given[0]}: it tries only modes with identical "
                "losses. Name the mode that you want: pipeline=..."
            )
        return Mode(replace(MODES["fused_sparse_dist"], name=AUTO))
    return Mode(Schedule.parse(own) if own else pipeline["name"], **options)


def modes(config: Config) -> list[Mode]:
    """Return the modes to train: those of `compare`, then the config's."""
    for name in config["compare"]:
        if name not in MODES and mode_printed_as(str(name)) is None:
            raise ValueError(unknown_mode_message("mode of compare", str(name), MODES))
    wanted, others = mode_of(config), [Mode(name).schedule for name in config["compare"]]
    return [*(with_switches(config, other) for other in others if other != wanted.schedule), wanted]


def with_switches(config: Config, schedule: Schedule) -> Mode:
    """Return the mode of a schedule; if it is stale, with the config's `SWITCHES`."""
    return Mode(schedule, **_given(config["pipeline"], SWITCHES if schedule.staleness else ()))


def _given(pipeline: Config, names: Collection[str]) -> dict[str, Any]:
    return {name: value for name in names if (value := pipeline.get(name)) is not None}


def check(config: Config) -> None:
    """Raise if the names and numbers in a config are wrong; `build.check` checks the arguments of classes."""
    if not isinstance(config["compare"], list):
        raise ValueError(f"compare must be a list of modes, got {config['compare']!r}. Write compare=[base].")
    metric = str(config.get("metric", ""))
    if metric and not metric.startswith(METRICS):
        raise ValueError(
            f"metric must name a logged metric that begins with val or test, got {metric!r}. "
            f"Did you mean 'test_{metric}' or 'val_{metric}'?"
        )
    _check_integers(config, seed=0, threads_per_rank=1)
    deltas = config["callbacks"].get("deltas")
    if deltas is not None and deltas.get("sink") is None:
        raise ValueError(
            "callbacks=deltas needs a destination: deltas.path=... (a folder, an fsspec URL, or "
            "redis://host:6379/0?key=name)."
        )
    task, path = config.get("task", "train"), config.get("ckpt_path")
    check_known("task", task, ("train", "test", "validate"))
    if task != "train" and path is None:
        raise ValueError(f"task={task} needs a checkpoint: ckpt_path=outputs/.../checkpoints/last.ckpt")
    if path is not None and not Path(path).exists():
        raise FileNotFoundError(f"ckpt_path: {str(path)!r} does not exist in {Path.cwd()}.")
    modes(config)
    if str(config["trainer"].get("precision")) in ("16-mixed", "16"):
        raise ValueError(f"trainer.precision=16-mixed {SCALES_LOSS.format(instead='trainer.precision=bf16-mixed')}.")
    if "arms" not in config:
        return
    arms(config)
    _check_integers(config, rounds=1, steps=2, warm_up=1, measured_steps=0, num_batches=1)
    if not isinstance(config["deterministic"], bool):
        raise ValueError(f"deterministic must be true or false, got {config['deterministic']!r}.")
    for name, value in (config["latency"] or {}).items():
        check_known("latency", name, ("all_to_all_ms", "forward_ms", "backward_ms", "step_ms"))
        if not isinstance(value, int | float) or value < 0:
            raise ValueError(f"latency.{name} must be milliseconds >= 0, got {value!r}.")


def _check_integers(config: Config, **lowest_of: int) -> None:
    for name, lowest in lowest_of.items():
        value = config[name]
        if value is None and name in ("seed", "threads_per_rank"):
            continue
        if not isinstance(value, int) or value < lowest:
            raise ValueError(f"{name} must be an integer >= {lowest}, got {value!r}.")


def looks_up_early(schedule: Schedule) -> bool:
    """Return whether a mode looks up batches ahead; if not, `stream` has no effect."""
    lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
    return lookup is not None and lookup.offset > 0


# Arm in a hand-written loop -> class and options of TorchRec's pipeline; "" is plain DistributedModelParallel.
BY_HAND: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "loop_dmp": ("", {}),
    "torchrec/base": ("TrainPipelineBase", {}),
    "torchrec/sparse_dist": ("TrainPipelineSparseDist", {}),
    "torchrec/sparse_dist/receives_first": ("TrainPipelineSparseDist", {}),  # on this package's process group
    "torchrec/sparse_dist_lite": ("TrainPipelineSparseDistLite", {}),
    "torchrec/fused_sparse_dist": ("TrainPipelineFusedSparseDist", {}),  # lookup on the data-dist stream
    "torchrec/fused_sparse_dist/new": ("TrainPipelineFusedSparseDist", {"emb_lookup_stream": "new"}),
    "torchrec/fused_sparse_dist/current": ("TrainPipelineFusedSparseDist", {"emb_lookup_stream": "current"}),
    "torchrec/semi_sync": ("TrainPipelineSemiSync", {"start_batch": 0}),
    "torchrec/prefetch": ("PrefetchTrainPipelineSparseDist", {}),
}
PEER_ARMS = ("lightning_dmp", *BY_HAND)  # not our modes; `lightning_dmp` is DistributedModelParallel in a Trainer


def per_step(config: Config) -> int:
    """Return the number of batches per optimizer step."""
    return int(config["trainer"].get("accumulate_grad_batches") or 1)


def our_arms(config: Config) -> dict[str, tuple[Schedule, str]]:
    """Return every mode: `mode` uses the config's stream, `mode/stream` another stream."""
    own: dict[str, tuple[Schedule, str]] = {}
    named = (mode_printed_as(re.split("[+/]", arm)[0]) for arm in config.get("arms", ()))  # "async_lookup_3"
    for schedule in (*MODES.values(), *(mode.schedule for mode in named if mode is not None)):
        own[schedule.name] = (schedule, config["stream"]["name"])
        if looks_up_early(schedule):
            others = (stream for stream in STREAMS if stream != config["stream"]["name"])
            own |= {f"{schedule.name}/{stream}": (schedule, stream) for stream in others}
    return own


def split_arm(arm: str) -> tuple[str, str | None, bool]:
    """Split `mode+fp16+replicated`: the arm, its precision (None: the config's), and whether it replicates tables."""
    plain, *options = arm.split("+")
    return plain, "+".join(option for option in options if option != "replicated") or None, "replicated" in options


def arms(config: Config) -> list[str]:
    """Return the arms to benchmark: those that match the config's `arms` (`*` matches anything), and `base`."""
    known = [*our_arms(config), *PEER_ARMS]
    chosen = {"base": None}  # the reference
    for pattern in config["arms"]:
        plain, _, replicated = split_arm(pattern)
        names = our_arms(config) if replicated else known  # TorchRec's arms cannot replicate tables
        fits = [name + pattern.removeprefix(plain) for name in fnmatch.filter(names, plain)]
        if not fits:
            raise ValueError(unknown_mode_message("arm", pattern, known))
        chosen |= dict.fromkeys(fits)
    return [*(name for name in known if name in chosen), *(name for name in chosen if "+" in name)]


def check_arguments(where: str, node: Config, target: Callable[..., Any]) -> None:
    """Raise if names or types in the config group `where` do not fit the signature of `target`."""
    try:
        parameters = inspect.signature(target).parameters
    except ValueError:  # of a builtin
        return
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in node:
        if not takes_any and not (name.startswith("_") and name.endswith("_")):
            check_known(f"option of {where}", name, parameters)
    try:
        hints = typing.get_type_hints(vars(target).get("__init__", target) if isinstance(target, type) else target)
    except Exception:  # an annotation names something that only type checkers import
        return
    for name, value in node.items():
        hint = hints.get(name, Any)
        choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
        if not any(_fits(value, choice) for choice in choices):
            raise TypeError(f"{where}.{name} must be {' or '.join(map(_words, choices))}, got {value!r}.")


_PLAIN = {bool: "true or false", int: "an integer", float: "a number", str: "a string", type(None): "null"}


def _words(choice: Any) -> str:
    if typing.get_origin(choice) is Literal:
        return " or ".join(map(repr, typing.get_args(choice)))
    return _PLAIN.get(choice) or str(getattr(choice, "__name__", choice))


def _fits(value: Any, choice: Any) -> bool:
    """Return whether a value fits an annotation; any value fits an annotation that is not a plain type."""
    if typing.get_origin(choice) is Literal:
        return value in typing.get_args(choice)
    kind = typing.get_origin(choice) or choice
    if not isinstance(kind, type) or kind in (Any, object):
        return True
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int | float) or value is None:  # never fits a list, a mapping or an object
        return isinstance(value, (int, float) if kind is float else kind)
    return kind not in _PLAIN or isinstance(value, kind)
