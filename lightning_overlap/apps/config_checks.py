"""What a config chooses by name: modes, stream, precision, arms."""

from __future__ import annotations

import fnmatch
from collections.abc import Collection, Mapping
from dataclasses import replace
from pathlib import Path
from typing import Any

from ..schedules import MODES, STREAMS, Schedule, Stage, resolve_schedule
from ..text import SCALES_LOSS, unknown_name_message

Config = Mapping[str, Any]
"""The composed config as plain containers; nothing that the command calls sees OmegaConf's."""

AUTO = "auto"
"""In the place of a mode's name: the strategy chooses one while it trains, and begins with `fused_sparse_dist`."""

SWITCHES = ("start_batch", "end_batch", "num_lookup_threads", "stash_gradients")
"""What `pipeline` may set besides the schedule; `overlap-train --help` says what each does."""
PIPELINE_OPTIONS = ("name", "schedule", "staleness", "defer_update", "frozen_window", *SWITCHES)
LATENCIES = ("all_to_all_ms", "forward_ms", "backward_ms", "step_ms")
TASKS = ("train", "test", "validate")
METRICS = ("val", "test")
"""How the names of metrics begin that a run reports."""


def modes(config: Config) -> list[Schedule]:
    """Return the schedules to train, the one asked for last.

    Raises:
        ValueError: An unknown mode, or a schedule that cannot run.
    """
    pipeline = config["pipeline"]
    for name in pipeline:
        _check_known("option of pipeline", name, PIPELINE_OPTIONS)
    own = pipeline.get("schedule")
    if pipeline.get("name") == AUTO and not own:
        given = [name for name, value in pipeline.items() if value and name != "name"]
        if given:
            raise ValueError(
                f"pipeline.{given[0]}={pipeline[given[0]]} belongs to a mode, and pipeline=auto chooses one."
            )
        return [*map(resolve_schedule, config["compare"]), replace(MODES["fused_sparse_dist"], name=AUTO)]
    wanted = resolve_schedule(
        Schedule.parse(own) if own else pipeline["name"],
        pipeline.get("staleness"),
        bool(pipeline.get("defer_update")),
        bool(pipeline.get("frozen_window")),
    )
    others = [resolve_schedule(name) for name in config["compare"]]
    return [other for other in others if other != wanted] + [wanted]


def switches(config: Config, schedule: Schedule) -> dict[str, Any]:
    """Return what the config says besides the schedule: for the mode asked for, and any other with a staleness."""
    if not schedule.staleness and schedule != modes(config)[-1]:
        return {}
    return {name: value for name in SWITCHES if (value := config["pipeline"].get(name)) is not None}


def check(config: Config) -> None:
    """Check the choices; `build.check` does so with what the strategy and the trainer take.

    Raises:
        ValueError: An unknown mode, a schedule that cannot run, a metric that no run reports, or a precision
            that scales the loss.
        OSError: A checkpoint that does not exist.
    """
    if not isinstance(config["compare"], list):
        raise ValueError(f"compare is a list of modes: compare=[{config['compare']}], got {config['compare']!r}.")
    metric = str(config.get("metric", ""))
    if metric and not metric.startswith(METRICS):
        names = " or ".join(repr(f"{prefix}_{metric}") for prefix in reversed(METRICS))
        raise ValueError(
            f"metric is what the model logs in its validation or test, under a name that begins with "
            f"{' or '.join(METRICS)}, got {metric!r}. Did you mean {names}?"
        )
    task, path = config.get("task", "train"), config.get("ckpt_path")
    _check_known("task", task, TASKS)
    if task != "train" and path is None:
        raise ValueError(f"task={task} needs a checkpoint: ckpt_path=outputs/.../checkpoints/last.ckpt")
    if path is not None and not Path(path).exists():
        raise FileNotFoundError(f"ckpt_path: {str(path)!r} does not exist, looked up in {Path.cwd()}.")
    modes(config)
    if str(config["trainer"].get("precision")) in ("16-mixed", "16"):
        raise ValueError(f"trainer.precision=16-mixed {SCALES_LOSS.format(instead='trainer.precision=bf16-mixed')}.")


TORCHREC_ARMS: Mapping[str, tuple[str, Mapping[str, Any]]] = {
    "torchrec/base": ("TrainPipelineBase", {}),
    "torchrec/sparse_dist": ("TrainPipelineSparseDist", {}),
    "torchrec/sparse_dist_lite": ("TrainPipelineSparseDistLite", {}),
    "torchrec/fused_sparse_dist": ("TrainPipelineFusedSparseDist", {}),  # lookup on the data-dist stream
    "torchrec/fused_sparse_dist/new": ("TrainPipelineFusedSparseDist", {"emb_lookup_stream": "new"}),
    "torchrec/fused_sparse_dist/current": ("TrainPipelineFusedSparseDist", {"emb_lookup_stream": "current"}),
    "torchrec/semi_sync": ("TrainPipelineSemiSync", {"start_batch": 0}),
    "torchrec/prefetch": ("PrefetchTrainPipelineSparseDist", {}),
}
"""TorchRec's own train pipelines: name of the arm -> class and options."""

PEER_ARMS = ("lightning_dmp", "loop_dmp", *TORCHREC_ARMS)
"""What the benchmark trains in addition to our modes; the first two are DistributedModelParallel in a Trainer and in a
hand-written loop."""

REFERENCE = "base"
"""The arm that the others are compared with; always trained."""


def per_step(config: Config) -> int:
    """Return how many batches an optimizer step has."""
    return int(config["trainer"].get("accumulate_grad_batches") or 1)


def our_arms(config: Config) -> dict[str, tuple[Schedule, str]]:
    """Return every mode, as `mode` on the stream that the config names and as `mode/stream` on each other one.

    Where gradients are accumulated, there is `fused_sparse_dist_frozen_window`, too. Those that `arms` of the config
    asks for with an option are there by that name, too: `mode+fp16`, `mode+replicated`, `mode+fp16+replicated`.
    """
    own: dict[str, tuple[Schedule, str]] = {}
    windows = [resolve_schedule("fused_sparse_dist", frozen=True)] if per_step(config) > 1 else []
    for name, schedule in {**MODES, **{window.name: window for window in windows}}.items():
        own[name] = (schedule, config["stream"]["name"])
        lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
        if lookup is not None and lookup.offset > 0:
            others = (stream for stream in STREAMS if stream != config["stream"]["name"])
            own |= {f"{name}/{stream}": (schedule, stream) for stream in others}
    return own | {name: own[name.partition("+")[0]] for name in _with_options(config, own)}


def peer_arms(config: Config) -> list[str]:
    """Return what is trained in addition to our modes; with a precision, too, where it is asked for."""
    return [*PEER_ARMS, *(name for name in _with_options(config, PEER_ARMS) if not is_replicated(name))]


REPLICATED = "replicated"
"""Behind the `+` of an arm of ours: tables with fewer rows than a batch are replicated. TorchRec has no such tables."""


def is_replicated(arm: str) -> bool:
    """Whether an arm replicates small tables."""
    return REPLICATED in arm.split("+")[1:]


def precision_of(arm: str) -> str | None:
    """Return what an arm sends embeddings and gradients in; None: as the config has it."""
    return "+".join(option for option in arm.split("+")[1:] if option != REPLICATED) or None


def _with_options(config: Config, known: Collection[str]) -> list[str]:
    """Return the arms that `arms` of a config asks for as `pattern+option`, of some that are known."""
    asked = [pattern.partition("+")[::2] for pattern in config["arms"] if "+" in pattern]
    return [f"{name}+{options}" for pattern, options in asked for name in fnmatch.filter(known, pattern)]


def arms(config: Config) -> list[str]:
    """Return the names of the arms to benchmark: `arms` of the config, where `*` stands for anything.

    A precision after a `+` is checked by `build.check`.

    Raises:
        ValueError: A name or pattern that fits no arm.
    """
    known = [*our_arms(config), *peer_arms(config)]
    chosen = {REFERENCE}
    for pattern in config["arms"]:
        fits = [name for name in fnmatch.filter(known, pattern) if name.count("+") == pattern.count("+")]
        if not fits:
            raise ValueError(unknown_name_message("arm", pattern, known))
        chosen.update(fits)
    return [name for name in known if name in chosen]


def check_bench(config: Config) -> None:
    """Check the choices of a benchmark.

    Raises:
        ValueError: What `check` refuses, an unknown arm, too few rounds or steps, or a latency that is none.
    """
    check(config)
    arms(config)
    for name, lowest in (("rounds", 1), ("steps", 2), ("warm_up", 1), ("measured_steps", 0), ("num_batches", 1)):
        value = config[name]
        if not isinstance(value, int) or value < lowest:
            raise ValueError(f"{name} is a number from {lowest} on, got {value!r}.")
    for name, value in (config["latency"] or {}).items():
        _check_known("latency", name, LATENCIES)
        if not isinstance(value, int | float) or value < 0:
            raise ValueError(f"latency.{name} is in milliseconds, got {value!r}.")


def _check_known(kind: str, name: str, known: Collection[str]) -> None:
    if name not in known:
        raise ValueError(unknown_name_message(kind, str(name), known))
