"""Law 13 on CUDA: what was gathered on the lookup stream and taken to pinned memory is what the tables were."""

from pathlib import Path

import pytest
import torch
from torch import Tensor

from lightning_overlap import MODES, STREAMS
from lightning_overlap.deltas import Replica
from lightning_overlap.deltas.serving import served_tables

from ..deltas.delta_fits import fit_with_deltas
from ..deltas.histories import MemorySink, Training, assert_equal, empty_tables
from ..deltas.test_deltas import ALL, OTHERS, wrong
from ..support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


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


def test_what_a_replica_has_applied_is_written(monkeypatch: pytest.MonkeyPatch) -> None:
    """Readers have streams of their own: nothing is under way on the default stream once they may read."""
    training, write_rows = Training(MemorySink()), served_tables.write_rows
    training.train(2)
    training.cut()
    tables = {name: value.cuda() for name, value in empty_tables().items()}

    def writes_late(table: Tensor, *rows: object) -> None:
        write_rows(table, *rows)  # type: ignore[arg-type]
        torch.cuda._sleep(1 << 28)

    monkeypatch.setattr(served_tables, "write_rows", writes_late)
    Replica(tables, training.sink).update()
    assert torch.cuda.default_stream().query()
    assert_equal({name: value.cpu() for name, value in tables.items()}, training.tables)
