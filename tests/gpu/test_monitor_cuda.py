"""`OverlapMonitor` on CUDA: timing events on the stages' streams, and no sync of its own."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_overlap import MODES, STREAMS, OverlapEmbeddingStrategy, OverlapMonitor
from lightning_overlap.profiling.spans import Category

from ..support.cases import TABLE_WISE, Batches, Model, make_plan
from ..support.fits import make_trainer
from ..support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

NUM_STEPS = 24
EARLY = [name for name, mode in MODES.items() if mode.has_sparse_stages]


class _CountsSyncs(Callback):
    """Has PyTorch warn of every sync of the steady steps; the audit, which reads stacks and not the device, is over."""

    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 8:
            torch.cuda.set_sync_debug_mode("warn")
        if batch_idx == NUM_STEPS - 4:
            torch.cuda.set_sync_debug_mode("default")


def run(pipeline: str, stream: str, watched: bool) -> dict[str, Any]:
    model = Model(TABLE_WISE)
    plan = make_plan(TABLE_WISE, model, dist.get_world_size(), "cuda")
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, stream=stream, sharding=plan)
    monitor = OverlapMonitor(every_n_steps=4, table=False)
    callbacks = [*([monitor] if watched else []), _CountsSyncs()]
    with warnings.catch_warnings(record=True, action="always") as caught:
        # More batches than `async_lookup` looks up ahead: the last steps of a fit look up nothing.
        data = Batches(TABLE_WISE, NUM_STEPS + 2)
        make_trainer(strategy, "cuda", callbacks=callbacks).fit(model, datamodule=data)
    return {
        "losses": torch.stack(model.losses).tolist(),
        "syncs": sum(bool(re.search("synchronizing CUDA operation", str(one.message))) for one in caught),
        "accounts": monitor.accounts,
        "audited": [(sync.stage, sync.device) for sync in monitor.syncs or ()],
    }


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("pipeline", ["base", *EARLY])
def test_watching_adds_no_sync_and_changes_nothing(gpus: Ranks, pipeline: str, stream: str) -> None:
    plain, watched = gpus.run(run, pipeline, stream, False), gpus.run(run, pipeline, stream, True)
    for alone, seen in zip(plain, watched, strict=True):
        assert seen["losses"] == alone["losses"]
        assert seen["syncs"] == alone["syncs"]
        assert len(seen["accounts"]) >= 3
        for one in seen["accounts"]:
            assert one.step_ms > 0
            assert 0 < one.categories[Category.DENSE].busy_ms <= one.step_ms * 1.001
            assert one.categories[Category.LOOKUP].busy_ms > 0
            assert all(times.hidden_ms <= times.busy_ms + 1e-6 for times in one.categories.values())
        assert all(device == "cuda" for _, device in seen["audited"])
