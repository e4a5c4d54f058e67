"""What a fit says before its first step. Functions that ranks run."""

import logging
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import combined_optimizer

from ..support.cases import MIXED, Model
from .strategies import fit_model


class Scheduled(Model):
    """Its scheduler moves the dense rate, and those of the fused tables if told so."""

    def __init__(self, combined: bool) -> None:
        super().__init__(MIXED)
        self._combined = combined

    def configure_optimizers(self) -> Any:
        dense = torch.optim.Adam(p for _, p in in_backward_optimizer_filter(self.named_parameters()))
        optimizer = combined_optimizer(self, dense) if self._combined else dense
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


OURS = "lightning.pytorch.lightning_overlap"


@contextmanager
def logged(*names: str) -> Iterator[list[str]]:
    seen: list[str] = []
    keep = logging.Handler()
    keep.emit = lambda record: seen.append(record.getMessage())  # type: ignore[method-assign]
    loggers = [logging.getLogger(name) for name in names]
    before = [logger.level for logger in loggers]
    for logger in loggers:
        logger.addHandler(keep)
        logger.setLevel(logging.INFO)
    try:
        yield seen
    finally:
        for logger, level in zip(loggers, before, strict=True):
            logger.removeHandler(keep)
            logger.setLevel(level)


def first_words(combined: bool = False, **options: Any) -> list[str]:
    """Return what a fit with `MIXED` tables logs and warns of, of the known texts and our own."""
    model, sharding = Scheduled(combined), {table.name: table.sharding for table in MIXED.tables}
    with (
        logged(OURS, "torchrec.distributed.planner.types", "torch.fx", "") as seen,
        warnings.catch_warnings(record=True, action="always") as caught,
    ):
        fit_model(model, sharding=sharding, **options)
    return [*seen, *(str(w.message) for w in caught)]
