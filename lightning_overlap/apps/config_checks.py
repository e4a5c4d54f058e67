"""Check what a config chooses by name (modes, stream, arms), and its arguments by the signatures of the callees."""

from __future__ import annotations

import fnmatch
import inspect
import types
import typing
from collections.abc import Callable, Collection, Mapping
from dataclasses import fields, replace
from pathlib import Path
from typing import Any, Literal, Union

from ..schedules import MODES, STREAMS, Mode, Schedule, Stage
from ..text import SCALES_LOSS, unknown_name_message

Config = Mapping[str, Any]
"""The composed config as plain dicts and lists; OmegaConf's containers stay in the command."""

AUTO = "auto"
"""Used as a mode's name: the strategy chooses a mode while it trains, and begins with `fused_sparse_dist`."""

SWITCHES = ("start_batch", "end_batch", "stash_gradients")
"""Options of a `Mode` that leave its schedule as it is."""
MODE_OPTIONS = tuple(field.name for field in fields(Mode) if field.name != "name")
"""Options of `pipeline`: those of a `Mode`; `overlap-train --help` says what each does."""
METRICS = ("val", "test")
"""Prefixes of the metrics that a run reports."""


def mode_of(config: Config) -> Mode:
    """Return the mode that the config asks for, with its options; that of "auto" begins as `fused_sparse_dist`."""
    pipeline = config["pipeline"]
    for name in pipeline:
        check_known("option of pipeline", name, ("name", "schedule", *MODE_OPTIONS))
    own = pipeline.get("schedule")
    options = {name: value for name in MODE_OPTIONS if (value := pipeline.get(name)) is not None}
    if pipeline.get("name") == AUTO and not own:
        if options:
            raise ValueError(
                f"pipeline=auto takes no pipeline.{next(iter(options))}, an option of a mode: it tries modes of the "
                "same losses, bit for bit. Name the mode: pipeline=..."
            )
        return Mode(replace(MODES["fused_sparse_dist"], name=AUTO))
    return Mode(Schedule.parse(own) if own else pipeline["name"], **options)


def modes(config: Config) -> list[Mode]:
    """Return the modes to train, the one asked for last; those of `compare` share its switches, if they are stale."""
    wanted, others = mode_of(config), [Mode(name).schedule for name in config["compare"]]
    return [*(with_switches(config, other) for other in others if other != wanted.schedule), wanted]


def with_switches(config: Config, schedule: Schedule) -> Mode:
    """Return the mode of a schedule; a mode with a staleness has the config's switches."""
    pipeline = config["pipeline"] if schedule.staleness else {}
    return Mode(schedule, **{name: value for name in SWITCHES if (value := pipeline.get(name)) is not None})


def check(config: Config) -> None:
    """Check the choices of a config; `build.check` checks the arguments of what they name.

    Raises:
        ValueError: A choice is unknown, or does not go together with another one.
        TypeError: A choice has a wrong type.
        FileNotFoundError: There is no checkpoint at `ckpt_path`.
    """
    if not isinstance(config["compare"], list):
        raise ValueError(f"compare is a list of modes: compare=[{config['compare']}], got {config['compare']!r}.")
    metric = str(config.get("metric", ""))
    if metric and not metric.startswith(METRICS):
        raise ValueError(
            "metric is what the model logs in its validation or test, under a name that begins with val or test, got "
            f"{metric!r}. Did you mean 'test_{metric}' or 'val_{metric}'?"
        )
    _check_numbers(config, ("seed", 0), ("threads_per_rank", 1))
    deltas = config["callbacks"].get("deltas")
    if deltas is not None and deltas.get("sink") is None:
        raise ValueError(
            "callbacks=deltas needs a place for what it sends: deltas.path=... (a folder, an fsspec address, "
            "redis://host:6379/0?key=name)."
        )
    task, path = config.get("task", "train"), config.get("ckpt_path")
    check_known("task", task, ("train", "test", "validate"))
    if task != "train" and path is None:
        raise ValueError(f"task={task} needs a checkpoint: ckpt_path=outputs/.../checkpoints/last.ckpt")
    if path is not None and not Path(path).exists():
        raise FileNotFoundError(f"ckpt_path: {str(path)!r} does not exist, looked up in {Path.cwd()}.")
    modes(config)
    if str(config["trainer"].get("precision")) in ("16-mixed", "16"):
        raise ValueError(f"trainer.precision=16-mixed {SCALES_LOSS.format(instead='trainer.precision=bf16-mixed')}.")
    if "arms" in config:
        _check_bench(config)


def _check_bench(config: Config) -> None:
    arms(config)
    _check_numbers(config, ("rounds", 1), ("steps", 2), ("warm_up", 1), ("measured_steps", 0), ("num_batches", 1))
    for name, value in (config["latency"] or {}).items():
        check_known("latency", name, ("all_to_all_ms", "forward_ms", "backward_ms", "step_ms"))
        if not isinstance(value, int | float) or value < 0:
            raise ValueError(f"latency.{name} is in milliseconds, got {value!r}.")


def _check_numbers(config: Config, *lowest_of: tuple[str, int]) -> None:
    for name, lowest in lowest_of:
        value = config[name]
        if value is None and name in ("seed", "threads_per_rank"):
            continue
        if not isinstance(value, int) or value < lowest:
            raise ValueError(f"{name} is a number from {lowest} on, got {value!r}.")


def looks_up_early(schedule: Schedule) -> bool:
    """Whether a mode looks up batches ahead, so that the stream of these lookups matters."""
    lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
    return lookup is not None and lookup.offset > 0


BY_HAND: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "loop_dmp": ("", {}),
    "torchrec/base": ("TrainPipelineBase", {}),
    "torchrec/sparse_dist": ("TrainPipelineSparseDist", {}),
    "torchrec/sparse_dist_lite": ("TrainPipelineSparseDistLite", {}),
    "torchrec/fused_sparse_dist": ("TrainPipelineFusedSparseDist", {}),  # lookup on the data-dist stream
    "torchrec/fused_sparse_dist/new": ("TrainPipelineFusedSparseDist", {"emb_lookup_stream": "new"}),
    "torchrec/fused_sparse_dist/current": ("TrainPipelineFusedSparseDist", {"emb_lookup_stream": "current"}),
    "torchrec/semi_sync": ("TrainPipelineSemiSync", {"start_batch": 0}),
    "torchrec/prefetch": ("PrefetchTrainPipelineSparseDist", {}),
}
"""Arm in a hand-written loop -> class and options of TorchRec's own train pipeline; without one it is plain
DistributedModelParallel."""

PEER_ARMS = ("lightning_dmp", *BY_HAND)
"""Arms of the benchmark other than our modes; the first is DistributedModelParallel in a Trainer."""


def per_step(config: Config) -> int:
    """Return how many batches an optimizer step has."""
    return int(config["trainer"].get("accumulate_grad_batches") or 1)


def our_arms(config: Config) -> dict[str, tuple[Schedule, str]]:
    """Return every mode, as `mode` on the stream that the config names and as `mode/stream` on each other one.

    Where gradients are accumulated, there is `fused_sparse_dist_frozen_window`, too.
    """
    own: dict[str, tuple[Schedule, str]] = {}
    windows = [Mode("fused_sparse_dist", frozen_window=True).schedule] if per_step(config) > 1 else []
    for schedule in (*MODES.values(), *windows):
        own[schedule.name] = (schedule, config["stream"]["name"])
        if looks_up_early(schedule):
            others = (stream for stream in STREAMS if stream != config["stream"]["name"])
            own |= {f"{schedule.name}/{stream}": (schedule, stream) for stream in others}
    return own


def options_of(arm: str) -> tuple[str | None, bool]:
    """Return the options of an arm by its name.

    Returns:
        The precision of communication (None: that of the config), and whether it replicates tables, which TorchRec's
        own arms cannot.
    """
    options = arm.split("+")[1:]
    return "+".join(option for option in options if option != "replicated") or None, "replicated" in options


def arms(config: Config) -> list[str]:
    """Return the names of the arms to benchmark: `arms` of the config, where `*` stands for anything.

    Options follow after a `+`: `mode+fp16`, `mode+replicated`, `mode+fp16+replicated`. `build.check` checks precisions.

    Raises:
        ValueError: A name fits no arm; the message lists the nearest ones.
    """
    known = [*our_arms(config), *PEER_ARMS]
    chosen = {"base": None}  # what all others are compared with
    for pattern in config["arms"]:
        plain, plus, options = pattern.partition("+")
        names = set(known) - set(PEER_ARMS if options_of(pattern)[1] else ())
        fits = [name + plus + options for name in known if name in names and fnmatch.fnmatch(name, plain)]
        if not fits:
            raise ValueError(unknown_name_message("arm", pattern, known))
        chosen |= dict.fromkeys(fits)
    return [*(name for name in known if name in chosen), *(name for name in chosen if "+" in name)]


def check_known(kind: str, name: str, known: Collection[str]) -> None:
    """Check that a name is known.

    Raises:
        ValueError: It is not; the message lists the nearest names.
    """
    if name not in known:
        raise ValueError(unknown_name_message(kind, str(name), known))


# -- names and types of arguments -------------------------------------------------------------------------------


def check_arguments(where: str, node: Config, target: Callable[..., Any]) -> None:
    """Check the names and types of a config group by the signature of the callee.

    Args:
        where: The group's name, for messages.
        node: The group.
        target: The class or function that takes it.

    Raises:
        ValueError: The callee has no such argument.
        TypeError: A value is of another plain type than the argument's annotation.
    """
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in node:
        if not takes_any and not (name.startswith("_") and name.endswith("_")):
            check_known(f"option of {where}", name, parameters)
    try:
        hints = typing.get_type_hints(vars(target).get("__init__", target) if isinstance(target, type) else target)
    except Exception:  # a name that is imported for type checkers alone
        return
    for name, value in node.items():
        hint = hints.get(name, Any)
        choices = typing.get_args(hint) if typing.get_origin(hint) in (Union, types.UnionType) else (hint,)
        if not any(_fits(value, choice) for choice in choices):
            raise TypeError(f"{where}.{name} is {' or '.join(map(_words, choices))}, got {value!r}.")


_PLAIN = {bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): "null"}


def _words(choice: Any) -> str:
    if typing.get_origin(choice) is Literal:
        return " or ".join(map(repr, typing.get_args(choice)))
    return _PLAIN.get(choice) or str(getattr(choice, "__name__", choice))


def _fits(value: Any, choice: Any) -> bool:
    """Whether a value fits an annotation; an annotation that is no plain type fits any value."""
    if typing.get_origin(choice) is Literal:
        return value in typing.get_args(choice)
    kind = typing.get_origin(choice) or choice
    if not isinstance(kind, type) or kind in (Any, object):
        return True
    if isinstance(value, bool):
        return kind is bool
    if isinstance(value, int | float) or value is None:  # not where a list, a mapping or an object goes
        return isinstance(value, (int, float) if kind is float else kind)
    return kind not in _PLAIN or isinstance(value, kind)
