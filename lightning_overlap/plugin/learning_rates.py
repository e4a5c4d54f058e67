"""The learning rates of a fit, which ranks compare: they must be alike for weights that several ranks train."""

import math
from collections.abc import Callable, Sequence
from typing import Any
from zlib import crc32

from lightning.pytorch import Trainer
from torch import Tensor
from torch.optim import Optimizer

from ..runtime import Rates
from ..text import some


class LearningRates:
    """Compares this rank's learning rates with the other ranks', without a collective while they are alike.

    ReduceLROnPlateau on a metric that was not reduced decides on each rank by itself. Then rates part, and with them
    the replicas of a table and the dense part. So a digest of the rates travels with each batch's sizes or with the
    polls about it, and if digests differ, all ranks compare the rates.
    """

    def __init__(self, trainer: Trainer, gather: Callable[[Any], list[Any]]) -> None:
        self._trainer, self._gather = trainer, gather
        self._known: list[float] | None = None
        self._rates = Rates()

    def now(self) -> Rates:
        """Return a digest of the present rates; cheap if they are those of the last call."""
        rates = _rates(self._trainer.optimizers)
        if rates != self._known:
            self._known, self._rates = rates, Rates(crc32(repr(rates).encode()) >> 1, self.compare)
        return self._rates

    def compare(self) -> None:
        """Raise a RuntimeError if the rates differ between ranks by more than rounding; all ranks call this."""
        everyone: list[list[float]] = self._gather(_rates(self._trainer.optimizers))
        differs = (rank for rank, rates in enumerate(everyone) if not _alike(rates, everyone[0]))
        if (rank := next(differs, None)) is None:
            return
        monitors = [config.monitor for config in self._trainer.lr_scheduler_configs if config.reduce_on_plateau]
        way = "Set rates by what all ranks know: reduce what they depend on, for example by self.all_gather"
        if monitors:
            way = (
                f"ReduceLROnPlateau monitors {some(map(repr, monitors))}, which each rank has computed from its own "
                f"data: write self.log({monitors[0]!r}, ..., sync_dist=True), so that all ranks see the mean"
            )
        raise RuntimeError(
            f"the learning rates differ between ranks: rank 0 has {_shown(everyone[0])}, rank {rank} has "
            f"{_shown(everyone[rank])}. Replicas of a table and the dense part would no longer be alike, and shards of "
            f"a table would train at different rates. {way}."
        )


def _rates(optimizers: Sequence[Optimizer]) -> list[float]:
    found = []
    for optimizer in optimizers:
        for group in optimizer.param_groups:
            rate = group["lr"]
            if isinstance(rate, Tensor):  # on CUDA the host would wait for it
                rate = rate.item() if rate.device.type == "cpu" else 0.0
            found.append(rate)
    return found


def _alike(mine: Sequence[float], theirs: Sequence[float]) -> bool:
    # Hosts with other processors may round a cosine otherwise.
    return all(math.isclose(a, b, rel_tol=1e-6) or a is b for a, b in zip(mine, theirs, strict=True))


def _shown(rates: Sequence[float]) -> str:
    return f"[{some(f'{rate:g}' for rate in rates)}]"
