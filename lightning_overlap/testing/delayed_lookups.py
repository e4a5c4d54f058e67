"""The reference of a stale mode: plain training whose lookups read old tables."""

from __future__ import annotations

import contextlib
from collections.abc import Iterator, Mapping
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ..tables import sharded_modules, tbes

Delays = Mapping[int, tuple[int, frozenset[str]]]
"""Batch -> number of updates that its lookups see, and the modules concerned; other modules see every update."""


class DelayedLookups(Callback):
    """Makes lookups of a plain fit read old fused tables, as `delays` says."""

    def __init__(self, delays: Delays) -> None:
        self._delays = delays
        self._weights: dict[int, dict[str, list[Tensor]]] = {}  # number of updates -> module -> its fused tables
        self._num_updates = self._batch = 0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._keep(pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch = batch_idx

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._num_updates += 1
        self._keep(pl_module)

    def _keep(self, module: LightningModule) -> None:
        wanted = {num for batch, (num, _) in self._delays.items() if batch >= self._batch}
        self._weights = {num: weights for num, weights in self._weights.items() if num in wanted}
        if self._num_updates in wanted:
            self._weights[self._num_updates] = {
                name: [weight.detach().clone() for weight in fused_weights(sharded)]
                for name, sharded in sharded_modules(module).items()
            }

    @contextlib.contextmanager
    def around(self, name: str, module: Any) -> Iterator[None]:
        """Wrap a module's lookup of the current batch."""
        num_updates, names = self._delays.get(self._batch, (0, frozenset()))
        if name not in names:
            yield
            return
        weights = fused_weights(module)
        now = [weight.detach().clone() for weight in weights]
        # `.data` hides from autograd that the backward writes other values than the lookup read.
        for weight, value in zip(weights, self._weights[num_updates][name], strict=True):
            weight.data.copy_(value)
        try:
            yield
        finally:
            for weight, value in zip(weights, now, strict=True):
                weight.data.copy_(value)


def fused_weights(module: Any) -> list[Tensor]:
    """Return views of the tables in a module's kernels, each `(rows, columns)`."""
    return [weight for kernel in tbes(module) for weight in kernel.split_embedding_weights()]
