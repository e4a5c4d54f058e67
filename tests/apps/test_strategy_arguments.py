"""Every argument of the strategy and of `Mode`, in every form of the pages, through LightningCLI and Hydra."""

import functools
import inspect
import sys
from collections.abc import Iterator, Mapping, Sequence
from dataclasses import MISSING, dataclass, fields
from datetime import timedelta
from enum import Enum
from pathlib import Path
from typing import Any

import pytest
import torch
import yaml
from hydra.utils import instantiate
from lightning.pytorch.cli import LightningCLI
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.plugins.io import AsyncCheckpointIO
from omegaconf import OmegaConf
from torch.distributed.algorithms.ddp_comm_hooks.default_hooks import fp16_compress_hook
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardingPlan

from lightning_overlap import Balance, Mode, OverlapEmbeddingStrategy, Schedule
from lightning_overlap.apps import build, config_checks
from lightning_overlap.tables import check_fused_optimizer
from lightning_overlap.tuning import Auto

from .test_conf import composed

STRATEGY = "lightning_overlap.OverlapEmbeddingStrategy"
MINE = "mine: copy_batch_to_device+1/memcpy dense_forward+0/compute backward+0/compute optimizer_step+0/compute"
SGD, FP16 = (torch.optim.SGD, {"lr": 0.1}), CommType.FP16
STEPS = ", ".join(
    f"{{stage: {step.stage.name}, offset: {step.offset}, stream: {step.stream.name}}}" for step in Schedule.parse(MINE)
)
COMM_TYPE = "{_target_: torchrec.distributed.fbgemm_qcomm_codec.CommType, value: fp16}"
TOPOLOGY = "{class_path: torchrec.distributed.planner.Topology, init_args: {world_size: 2, compute_device: cpu}}"
COST, SPLIT, JOIN = (
    f"{{_target_: hydra.utils.get_method, path: {__name__}.{name}}}" for name in ("cost", "split", "join")
)
HOOK = "torch.distributed.algorithms.ddp_comm_hooks.default_hooks.fp16_compress_hook"


@dataclass
class Form:
    """One form of an argument: its value in Python, and as text."""

    value: Any
    text: str  # YAML, for LightningCLI: in its file and on its command line
    hydra: str | None = None  # YAML for `hydra.utils.instantiate`; None: the same
    train: tuple[str, ...] | None = None  # for `overlap-train`; None: `strategy.NAME=`, (): it has no such form
    line: str | None = None  # on LightningCLI's command line; None: `text`


def planner() -> EmbeddingShardingPlanner:
    return EmbeddingShardingPlanner(topology=Topology(world_size=2, compute_device="cpu"))


def observe(kind: str, stage: Any, batch: int) -> None: ...


def cost(batch: Any) -> Any: ...


def split(batch: Any) -> list[Any]:
    return [batch]


def join(samples: list[Any]) -> Any:
    return samples[0]


def mode_form(name: str, value: Any, of_mode: str) -> Form:
    given = {"name": of_mode, name: value}
    text = yaml.safe_dump(given, default_flow_style=True).strip()
    overrides = (f"pipeline={of_mode}", *([] if name == "name" else [f"pipeline.{name}={yaml.safe_dump(value)[:-5]}"]))
    return Form(
        Mode(**given),
        f"{{class_path: lightning_overlap.Mode, init_args: {text}}}",
        f"{{_target_: lightning_overlap.Mode, {text[1:]}",
        tuple(override.strip() for override in overrides),
    )


OF_MODE: dict[str, Form] = {
    "name": mode_form("name", "semi_sync", "semi_sync"),
    "staleness": mode_form("staleness", 3, "async_lookup"),
    "defer_update": mode_form("defer_update", True, "semi_sync"),
    "start_batch": mode_form("start_batch", 100, "semi_sync"),
    "end_batch": mode_form("end_batch", 900, "semi_sync"),
}

FORMS: dict[str, list[Form]] = {
    "pipeline": [
        *(Form(name, name, train=(f"pipeline={name}",)) for name in ("semi_sync_deferred", "auto")),
        Form(Mode("async_lookup", staleness=3), "async_lookup_3", train=("pipeline.name=async_lookup_3",)),
        Form(Schedule.parse(MINE), f"'{MINE}'", train=(f"pipeline.schedule='{MINE}'",), line=MINE.replace(": ", ":")),
        Form(
            Schedule.parse(MINE),
            f"{{class_path: lightning_overlap.Schedule, init_args: {{name: mine, steps: [{STEPS}]}}}}",
            f"{{_target_: lightning_overlap.Schedule.parse, text: '{MINE}'}}",
            (),
        ),
        Form(
            Auto(block=8, rounds=2),
            "{class_path: lightning_overlap.tuning.Auto, init_args: {block: 8, rounds: 2}}",
            "{_target_: lightning_overlap.tuning.Auto, block: 8, rounds: 2}",
            (),
        ),
    ],
    "stream": [Form(name, name, train=(f"stream={name}",)) for name in ("current", "data_dist", "dedicated")],
    "sharding": [
        Form(None, "null", train=("sharding=planner",)),
        Form("column_wise", "column_wise", train=("sharding=column_wise",)),
        Form({"cat_0": "row_wise"}, "{cat_0: row_wise}", train=("sharding=planner", "sharding.tables.cat_0=row_wise")),
        Form(
            planner(),
            "{class_path: torchrec.distributed.planner.EmbeddingShardingPlanner, "
            f"init_args: {{topology: {TOPOLOGY}}}}}",
            f"{{_target_: {__name__}.planner}}",
            (),
        ),
        Form(
            ShardingPlan({}),
            "{class_path: torchrec.distributed.types.ShardingPlan, init_args: {plan: {}}}",
            "{_target_: torchrec.distributed.types.ShardingPlan, plan: {}}",
            (),
        ),
    ],
    "fused_optimizer": [
        Form(SGD, "[torch.optim.SGD, {lr: 0.1}]"),
        Form(functools.partial(torch.optim.SGD, lr=0.1), "{class_path: torch.optim.SGD, init_args: {lr: 0.1}}"),
        Form(SGD, "[torch.optim.SGD, {lr: 0.1}]", "{_target_: torch.optim.SGD, _partial_: true, lr: 0.1}"),
        Form(None, "null"),
    ],
    "quantized_comms": [
        Form("fp16", "fp16", train=("comms=fp16",)),
        Form(("fp16", "bf16"), "[fp16, bf16]", train=("comms=fp16_bf16",)),
        Form(None, "null", train=("comms=none",)),
        Form(
            QCommsConfig(FP16, FP16, backward_loss_scale=1024.0),
            "{class_path: torchrec.distributed.fbgemm_qcomm_codec.QCommsConfig, "
            "init_args: {forward_precision: FP16, backward_precision: FP16, backward_loss_scale: 1024.0}}",
            "{_target_: torchrec.distributed.fbgemm_qcomm_codec.QCommsConfig, "
            f"forward_precision: {COMM_TYPE}, backward_precision: {COMM_TYPE}, backward_loss_scale: 1024.0}}",
            ("comms=fp16", "comms.backward_loss_scale=1024.0"),
        ),
    ],
    "replicate_tables": [
        Form(None, "null"),
        Form(False, "false"),
        Form(10_000, "10000"),
        Form(0, "0"),
        Form(1, "1"),
        Form(["item_table"], "[item_table]"),
    ],
    "rate_per_table": [Form(True, "true"), Form(False, "false")],
    "release_features": [Form(True, "true"), Form(False, "false")],
    "copy_in_place": [Form(True, "true"), Form(False, "false")],
    "max_queued_steps": [Form(3, "3"), Form(1, "1"), Form(None, "null")],
    "out_of_range_ids": [Form(name, name) for name in ("error", "warning", "fbgemm")],
    "nonfinite": [Form("skip", "skip"), Form("error", "error"), Form(None, "null")],
    "balance": [
        Form(None, "null"),
        Form(
            Balance(cost),
            f"{{class_path: lightning_overlap.Balance, init_args: {{cost: {__name__}.cost}}}}",
            f"{{_target_: lightning_overlap.Balance, cost: {COST}}}",
        ),
        Form(
            Balance(cost, split=split, join=join, evaluation=True),
            f"{{class_path: lightning_overlap.Balance, init_args: {{cost: {__name__}.cost, split: {__name__}.split, "
            f"join: {__name__}.join, evaluation: true}}}}",
            f"{{_target_: lightning_overlap.Balance, cost: {COST}, split: {SPLIT}, join: {JOIN}, evaluation: true}}",
        ),
    ],
    "observer": [
        Form(None, "null"),
        Form(observe, f"{__name__}.observe", f"{{_target_: hydra.utils.get_method, path: {__name__}.observe}}"),
    ],
    "checkpoint_format": [*(Form(name, name) for name in ("full", "sharded", "incremental")), Form(None, "null")],
    "most_increments": [Form(0.25, "0.25"), Form(0, "0")],
    "async_checkpoint": [Form(True, "true"), Form(False, "false")],
    "calm_libraries": [Form(True, "true"), Form(False, "false")],
    "timeout": [
        Form(timedelta(seconds=30), "30"),
        Form(30.5, "30.5"),
        Form(timedelta(seconds=90), "'0:01:30'", "{_target_: datetime.timedelta, seconds: 90}", line="0:01:30"),
        Form(None, "null"),
    ],
    # of `DDPStrategy` and of DistributedDataParallel
    "start_method": [Form("spawn", "spawn")],
    "process_group_backend": [Form("gloo", "gloo")],
    "find_unused_parameters": [Form(True, "true")],
    "bucket_cap_mb": [Form(10, "10")],
    "ddp_comm_hook": [Form(fp16_compress_hook, HOOK, f"{{_target_: hydra.utils.get_method, path: {HOOK}}}")],
    "checkpoint_io": [
        Form(
            AsyncCheckpointIO(),
            "{class_path: lightning.pytorch.plugins.io.AsyncCheckpointIO}",
            "{_target_: lightning.pytorch.plugins.io.AsyncCheckpointIO}",
        )
    ],
}
FORMS["pipeline"] += [form for name, form in OF_MODE.items() if name in inspect.signature(Mode).parameters]


def test_no_argument_is_missing_here() -> None:
    of_strategy = inspect.signature(OverlapEmbeddingStrategy).parameters.values()
    assert {one.name for one in of_strategy if one.kind is not one.VAR_KEYWORD} - FORMS.keys() == set()
    assert {option.name for option in fields(Mode)} - OF_MODE.keys() == set()


def comparable(value: Any) -> Any:
    """A value as containers of plain values; an object of another kind is its class."""
    if isinstance(value, Mapping):
        return {name: comparable(one) for name, one in value.items()}
    if isinstance(value, Sequence) and not isinstance(value, str):
        return [comparable(one) for one in value]
    plain = (str, int, float, type, type(None), timedelta, Enum, Mode, Auto, Schedule, QCommsConfig, Balance)
    return value if isinstance(value, plain) or inspect.isroutine(value) else type(value)


def state_of(strategy: OverlapEmbeddingStrategy) -> dict[str, Any]:
    """What the arguments have made of a strategy; LightningCLI passes the defaults of DistributedDataParallel too."""
    defaults = {name: one.default for name, one in inspect.signature(DistributedDataParallel).parameters.items()}
    state = vars(strategy) | {
        "fused_optimizer": check_fused_optimizer(strategy.fused_optimizer),
        "_tuner": None if strategy._tuner is None else strategy._tuner._auto,
        "_ddp_kwargs": {
            name: value for name, value in strategy._ddp_kwargs.items() if value != defaults.get(name, MISSING)
        },
    }
    of_trainer = ("_accelerator", "cluster_environment", "_launcher", "_parallel_devices", "_precision_plugin")
    return {name: comparable(value) for name, value in state.items() if name not in of_trainer}


def by_cli(*arguments: str, save: str) -> OverlapEmbeddingStrategy:
    """The strategy of a LightningCLI, which also saves its config as it does beside the logs."""
    options: dict[str, Any] = {"run": False, "save_config_callback": None, "seed_everything_default": False}
    cli = LightningCLI(BoringModel, args=[*arguments], **options)
    Path(save).write_text(cli.parser.dump(cli.config, skip_none=False), encoding="utf-8")
    assert isinstance(cli.trainer.strategy, OverlapEmbeddingStrategy)
    return cli.trainer.strategy


def made(name: str, form: Form) -> Iterator[tuple[str, OverlapEmbeddingStrategy]]:
    trainer = ["--trainer.accelerator=cpu", "--trainer.devices=2", "--trainer.logger=false"]
    config = Path("config.yaml")
    init_args = f"{{class_path: {STRATEGY}, init_args: {{{name}: {form.text}}}}}"
    config.write_text(f"trainer:\n  strategy: {init_args}\n", encoding="utf-8")
    yield "YAML", by_cli(f"--config={config}", *trainer, save="saved.yaml")
    line = f"--trainer.strategy.init_args.{name}={form.line or form.text}"
    yield "command line", by_cli(*trainer, f"--trainer.strategy={STRATEGY}", line, save="of_line.yaml")
    yield "saved config", by_cli("--config=saved.yaml", save="saved_again.yaml")
    hydra = form.text if form.hydra is None else form.hydra
    for convert in ("none", "all"):
        node = OmegaConf.create(f"{{_target_: {STRATEGY}, _convert_: {convert}, {name}: {hydra}}}")
        yield f"hydra.utils.instantiate, _convert_: {convert}", instantiate(node)
    overrides = (f"strategy.{name}={hydra}",) if form.train is None else form.train
    if overrides:
        composition = composed("sharding=planner", "data.num_tables=2", *overrides)
        mode = config_checks.modes(composition)[-1]
        model = build.build_model(composition, build.build_data(composition))
        yield f"overlap-train {' '.join(overrides)}", build.build_strategy(composition, mode, model)


@pytest.mark.slow
@pytest.mark.parametrize("name", FORMS)
def test_every_form_of_an_argument_arrives(name: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(sys, "argv", ["train.py"])
    monkeypatch.setenv("JSONARGPARSE_DEPRECATION_WARNINGS", "off")  # about LightningCLI's own calls
    default, arrived = state_of(OverlapEmbeddingStrategy()), False
    for form in FORMS[name]:
        expected = state_of(OverlapEmbeddingStrategy(**{name: form.value}))
        arrived |= expected != default
        for how, strategy in made(name, form):
            assert state_of(strategy) == expected, (how, form)
    assert arrived


@pytest.mark.parametrize(
    ("timeout", "error", "said"),
    [
        ("30", TypeError, "a number of seconds or a datetime.timedelta, got '30'"),
        (True, TypeError, "got True"),
        (0, ValueError, "from a millisecond to 100 years, got 0"),
        (-3.5, ValueError, "got -3.5"),
        (timedelta(days=-1), ValueError, "from a millisecond to 100 years"),
        (timedelta.max, ValueError, "from a millisecond to 100 years"),
        (float("nan"), ValueError, "got nan"),
        (float("inf"), ValueError, "got inf"),
        (1e300, ValueError, "got 1e[+]300"),
    ],
)
def test_a_timeout_that_is_none(timeout: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=f"^timeout .*{said}"):
        OverlapEmbeddingStrategy(timeout=timeout)
