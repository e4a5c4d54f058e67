"""Sinks of deltas: a replica follows through every kind of store, and through one of the user's own."""

import runpy
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap import OverlapEmbeddingStrategy, row_log
from lightning_overlap.deltas import DiskStore, Replica, as_store, prune
from lightning_overlap.deltas.files import form
from lightning_overlap.storage import check_store

from .histories import MemorySink, assert_equal, begun, empty_tables, updated


def test_a_replica_follows_through_every_sink(store: Any) -> None:
    training = begun(store)
    replica = updated(tables := empty_tables(), store)
    for number in range(3):
        training.cut(bases=[number % 2], steps=2)
        assert replica.update() == 1
        assert_equal(tables, training.tables)
    assert Replica(None, store).wait(timeout=5).step == training.step
    training.cut(bases=[0, 1], steps=1)
    assert len(prune(store)) > 5
    replica.update()
    assert_equal(tables, training.tables)


def test_a_sink_of_ones_own() -> None:
    sink = MemorySink()
    assert as_store(sink) is sink
    check_store(sink)
    lacks = r"a sink must be a path, .*\n  got: 3, which lacks put, read, names, remove"
    with pytest.raises(TypeError, match=lacks):
        as_store(3)


def test_pyarrow_that_is_not_installed_is_told(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setitem(sys.modules, "pyarrow", None)
    monkeypatch.delitem(sys.modules, "lightning_overlap.row_log.arrow_stream")
    monkeypatch.delattr(row_log, "arrow_stream")
    said = r"incremental checkpoints need pyarrow, which cannot be imported \(.*\): pip install pyarrow"
    with pytest.raises(ImportError, match=said):
        runpy.run_path(form.__file__, run_name="lightning_overlap.deltas.files.form")
    with pytest.raises(ImportError, match=said):
        OverlapEmbeddingStrategy(checkpoint_format="incremental")


def test_unfinished_files_are_no_cuts(tmp_path: Path) -> None:
    training = begun(DiskStore(tmp_path))  # type: ignore[arg-type]
    for path in list(tmp_path.iterdir()):
        Path(tmp_path, f".{path.name}.0.unfinished").write_text("x")
    training.cut(bases=[0, 1], steps=1)
    assert Replica(None, tmp_path).wait(timeout=5).step == training.step
