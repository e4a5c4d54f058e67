"""Law 13 on CUDA: what was gathered on the lookup stream and taken to pinned memory is what the tables were."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path

import pytest
import torch

from lightning_overlap import MODES, STREAMS

from ..callbacks.delta_fits import fit_with_deltas
from ..callbacks.test_deltas import ALL, OTHERS, wrong
from ..support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


@pytest.fixture
def gpus(get_ranks: Callable[..., Ranks]) -> Ranks:
    """As many ranks as there are GPUs, two at most."""
    return get_ranks(min(2, torch.cuda.device_count()), "cuda")


@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("pipeline", MODES)
def test_a_replica_equals_the_tables_after_every_step(gpus: Ranks, tmp_path: Path, pipeline: str, stream: str) -> None:
    of_ranks = gpus.run(fit_with_deltas, ALL, pipeline, str(tmp_path), device_type="cuda", options={"stream": stream})
    assert wrong(tmp_path, of_ranks) == {}


@pytest.mark.parametrize("name", OTHERS)
def test_other_kinds_of_tables(gpus: Ranks, tmp_path: Path, name: str) -> None:
    of_ranks = gpus.run(
        fit_with_deltas, OTHERS[name], "fused_sparse_dist", str(tmp_path), device_type="cuda", every_n_steps=3
    )
    assert wrong(tmp_path, of_ranks) == {}
