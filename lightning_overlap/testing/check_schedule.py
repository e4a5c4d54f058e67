"""`check_laws`: checks the laws of a schedule with a small model."""

import warnings
from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from ..schedules import STREAMS, Schedule
from .check_module import check_module

_SHARDING = {"a": "table_wise", "b": "column_wise", "c": "data_parallel"}
_NUM_ROWS, _BATCH_SIZE = 50, 8


class _Ranker(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        tables = [EmbeddingBagConfig(_NUM_ROWS, 4, name=name, feature_names=[name]) for name in _SHARDING]
        self.ebc = EmbeddingBagCollection(tables=tables)
        self.top = nn.Linear(4 * len(tables), 1)

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        logits = self.top(self.ebc(batch["ids"]).values()).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["labels"])

    validation_step = training_step  # so that the schedule's evaluation is checked too

    def configure_optimizers(self) -> torch.optim.Optimizer:
        data_parallel = [p for name, p in self.named_parameters() if name.startswith("top.") or ".c." in name]
        return torch.optim.SGD(data_parallel, lr=1.0)


def _make_batch(seed: int) -> dict[str, Any]:
    generator = torch.Generator().manual_seed(seed)
    num_ids = len(_SHARDING) * _BATCH_SIZE
    ids = torch.randint(_NUM_ROWS, (num_ids,), generator=generator)
    kjt = KeyedJaggedTensor(list(_SHARDING), ids, lengths=torch.ones(num_ids, dtype=torch.int64))
    return {"ids": kjt, "labels": torch.randint(2, (_BATCH_SIZE,), generator=generator).float()}


def check_laws(schedule: Schedule) -> None:
    """Check the laws of your schedule on one CPU rank: `check_module` with a small model and each `stream` option.

    Raises an AssertionError that names the broken law; for a race it names the missing call.
    """
    batches = [_make_batch(index) for index in range(2 * schedule.depth + 1)]
    options: dict[str, Any] = {"sharding": _SHARDING, "fused_optimizer": (torch.optim.SGD, {"lr": 1.0})}
    for stream in STREAMS:
        with warnings.catch_warnings(action="ignore"):  # the data-parallel table gets no fused optimizer, as intended
            check_module(_Ranker, batches, schedule, num_steps=len(batches), stream=stream, **options)
