"""Law 9 on CUDA: what makes the host wait for the device in steady steps, as PyTorch's sync debug mode sees it."""

import re
import warnings
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Callback

from lightning_overlap import MODES, STREAMS, OverlapEmbeddingStrategy

from ..support.cases import TABLE_WISE, Batches, Model, make_plan
from ..support.fits import make_trainer
from ..support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

FIRST, NUM = 7, 3
EARLY = [name for name, mode in MODES.items() if mode.has_sparse_stages]


class _Watch(Callback):
    def on_train_batch_start(self, trainer: Any, module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == FIRST:
            torch.cuda.set_sync_debug_mode("warn")
        if batch_idx == FIRST + NUM:
            torch.cuda.set_sync_debug_mode("default")


def syncs_of_steps(pipeline: str, stream: str, nonfinite: Any = None) -> list[str]:
    model = Model(TABLE_WISE)
    plan = make_plan(TABLE_WISE, model, dist.get_world_size(), "cuda")
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, stream=stream, sharding=plan, nonfinite=nonfinite)
    with warnings.catch_warnings(record=True, action="always") as caught:
        make_trainer(strategy, "cuda", callbacks=[_Watch()]).fit(model, datamodule=Batches(TABLE_WISE, FIRST + NUM + 4))
    return [f"{w.filename}:{w.lineno}" for w in caught if re.search("synchronizing CUDA operation", str(w.message))]


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("pipeline", EARLY)
def test_ours_is_the_read_of_sizes(gpus: Ranks, pipeline: str, stream: str) -> None:
    for files in gpus.run(syncs_of_steps, pipeline, stream):
        assert not [file for file in files if "/lightning/" in file or "/torchrec/" in file]
        ours = [file for file in files if "/lightning_overlap/" in file]
        assert len(ours) == (syncs_per_step := int(gpus.world_size > 1)) * NUM, (syncs_per_step, files)
        assert all("/input_sizes.py:" in file for file in ours)


def test_the_flag_of_a_loss_is_read_without_an_operator_that_waits(gpus: Ranks) -> None:
    """It is copied to the host in the background; after the backward was issued the host waits for an event."""
    plain, guarded = (gpus.run(syncs_of_steps, "fused_sparse_dist", "data_dist", choice) for choice in (None, "skip"))
    assert guarded == plain
