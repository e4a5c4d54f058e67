"""The reference of a stale mode: plain training whose lookups read old tables."""

from collections.abc import Mapping
from typing import Any

from lightning.pytorch import LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ..sparse import Arguments, CalledModule
from ..tables import sharded_modules
from .watched_fit import Watched, fused_weights

Delays = Mapping[int, tuple[int, frozenset[str]]]
"""Batch -> number of updates that its lookups see, and the modules concerned; other modules see every update."""


class DelayedLookups(Watched):
    """Watches a plain fit, and makes its lookups read old fused tables, as `delays` says."""

    reads_tables = True

    def __init__(self, delays: Delays) -> None:
        super().__init__()
        self._delays = delays
        self._weights: dict[int, dict[str, list[Tensor]]] = {}  # number of updates -> module -> its fused tables
        self._present: dict[str, list[Tensor]] = {}  # module -> its fused tables, while its call reads old ones

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self._keep(pl_module)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_after_backward(trainer, pl_module)
        self._keep(pl_module)

    def _keep(self, module: LightningModule) -> None:
        wanted = {num for batch, (num, _) in self._delays.items() if batch >= self.batch}
        self._weights = {num: weights for num, weights in self._weights.items() if num in wanted}
        if (num := len(self.updates)) in wanted:
            self._weights[num] = {name: _copies(sharded) for name, sharded in sharded_modules(module).items()}

    @override
    def before_call(self, step: str, forward: CalledModule, arguments: Arguments) -> None:
        num, names = self._delays.get(self.batch, (0, frozenset[str]()))
        if step == "training_step" and forward.name in names:
            self._present[forward.name] = _copies(forward.module)
            _write(forward.module, self._weights[num][forward.name])

    @override
    def after_call(self, step: str, forward: CalledModule, answer: Any) -> None:
        super().after_call(step, forward, answer)
        if forward.name in self._present:
            _write(forward.module, self._present.pop(forward.name))


def _copies(module: Any) -> list[Tensor]:
    return [weight.detach().clone() for weight in fused_weights(module)]


def _write(module: Any, values: list[Tensor]) -> None:
    for weight, value in zip(fused_weights(module), values, strict=True):
        weight.data.copy_(value)  # `.data`: autograd must not see that the backward writes other values than were read
