"""Functions that ranks run: a fit with the strategy under test."""

import logging
import os
from collections.abc import Mapping
from dataclasses import fields
from typing import Any

import torch.distributed as dist
from lightning.pytorch import Trainer

from lightning_overlap import Mode, OverlapEmbeddingStrategy, Schedule
from lightning_overlap.tuning import Auto

from .cases import NUM_STEPS, Batches, Case, Model, make_plan
from .reference import Result, collect

_NO = "logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary", "use_distributed_sampler"
QUIET: dict[str, Any] = dict.fromkeys(_NO, False)


def make_trainer(strategy: OverlapEmbeddingStrategy, device_type: str = "cpu", **kwargs: Any) -> Trainer:
    for name in ("lightning.pytorch", "lightning.fabric", "torchrec"):
        logging.getLogger(name).setLevel(logging.ERROR)
    kwargs = {"accelerator": {"cpu": "cpu", "cuda": "gpu"}[device_type], "max_epochs": 1, **QUIET, **kwargs}
    ranks_per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    num_nodes = dist.get_world_size() // ranks_per_node
    return Trainer(devices=ranks_per_node, num_nodes=num_nodes, strategy=strategy, **kwargs)


def make_strategy(
    model: Model, pipeline: str | Schedule | Auto = "fused_sparse_dist", device_type: str = "cpu", **options: Any
) -> OverlapEmbeddingStrategy:
    plan = make_plan(model.case, model, dist.get_world_size(), device_type)
    pipeline, options = mode_and_options(pipeline, options)
    return OverlapEmbeddingStrategy(pipeline, sharding=plan, **options)


def mode_and_options(pipeline: Any, options: Mapping[str, Any]) -> tuple[Any, dict[str, Any]]:
    of_mode = {field.name: options[field.name] for field in fields(Mode) if field.name in options}
    others = {name: value for name, value in options.items() if name not in of_mode}
    return Mode(pipeline, **of_mode) if any(of_mode.values()) else pipeline, others


def fit(
    case: Case,
    pipeline: str | Schedule,
    *,
    stream: str = "data_dist",
    num_steps: int = NUM_STEPS,
    device_type: str = "cpu",
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> Result:
    model = Model(case)
    own = {"stream": stream, "quantized_comms": case.comms, **(options or {})}
    trainer = make_trainer(make_strategy(model, pipeline, device_type, **own), device_type, **kwargs)
    trainer.fit(model, datamodule=Batches(case, num_steps))
    return collect(model, trainer.optimizers[0], model.losses)
