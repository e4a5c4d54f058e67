"""What a fit that has failed keeps alive: collectives under way, but not its module and its trainer."""

import gc
import weakref
from collections.abc import Callable
from contextlib import suppress
from typing import Any

import pytest
import torch

from ..laws.faults import InjectedError
from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks


class _Fails(Model):
    def training_step(self, batch: Any, batch_idx: int) -> torch.Tensor:
        if batch_idx == 3:
            raise InjectedError
        return super().training_step(batch, batch_idx)


def kept_by_a_failed_fit(pipeline: str) -> list[str]:
    """Return what is alive after a fit that has failed."""
    model = _Fails(TABLE_WISE)
    trainer = make_trainer(make_strategy(model, pipeline))
    with suppress(InjectedError):
        trainer.fit(model, datamodule=Batches(TABLE_WISE, 6))
    held = {"module": weakref.ref(model), "dense layer": weakref.ref(model.top), "trainer": weakref.ref(trainer)}
    del model, trainer
    gc.collect()
    return [name for name, reference in held.items() if reference() is not None]


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist", "semi_sync"])
def test_a_failed_fit_lets_its_module_go(get_ranks: Callable[..., Ranks], pipeline: str) -> None:
    assert get_ranks(1).run(kept_by_a_failed_fit, pipeline) == [[]]
