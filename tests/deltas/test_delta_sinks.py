"""Sinks that hang, disks that are full, several sinks at once: an error with its cause on all ranks, or whole cuts."""

import resource
import signal
import threading
import time
from collections.abc import Iterable, Sequence
from functools import partial
from pathlib import Path

import pytest
import torch

from lightning_overlap.deltas import DiskStore, FileName, Replica
from lightning_overlap.storage import Piece

from ..support.cases import Case, TableSpec
from ..support.ranks import Ranks
from .delta_fits import At, Files, Fit, Windows, apply_in_order, differences, fit_expecting, fit_with_deltas
from .test_deltas import wrong

CASE = Case("sinks", (TableSpec("t0", ("f0",)), TableSpec("t1", ("f1",), "row_wise")))


class Hangs(Files):
    """Never returns from `call` on the last rank, or from `names` on any; from `put`, "write", from a step on."""

    def __init__(self, folder: str, call: str, step: int = 0) -> None:
        super().__init__(folder)
        self.call, self.step = call, step

    def _hang(self, call: str) -> None:
        if call == self.call and (call == "names" or torch.distributed.get_rank() == 1):
            threading.Event().wait()

    def names(self) -> Iterable[str]:
        self._hang("names")
        return super().names()

    def put(self, name: str, pieces: Sequence[Piece]) -> None:
        found = FileName.parse(name)
        if found is not None and found.step >= self.step:
            self._hang("write")
        super().put(name, pieces)

    def close(self) -> None:
        self._hang("close")


HOW = {"every_n_steps": 2, "num_steps": 6}
fit = partial(fit_with_deltas, CASE, "fused_sparse_dist", **HOW)
fit_raising = partial(fit_expecting, RuntimeError, CASE, "fused_sparse_dist", **HOW)


def threads() -> list[str]:
    """Return the threads that would keep the process."""
    names = [one.name for one in threading.enumerate() if not one.daemon]
    return [name for name in names if "deltas" in name or "rows" in name]


def assert_equal(folder: Path, of_ranks: list[Fit]) -> None:
    generation, step = max(apply_in_order(folder))
    assert wrong(folder, [(seen, seen[step]) for seen, _ in of_ranks], generation) == {}


@pytest.mark.parametrize(
    ("call", "step", "said"),
    [
        ("names", 0, "check has not returned for 1 s"),
        ("write", 0, "write of g000001-s000000000000-r00001of00002-c00000of"),
        ("write", 2, "write of g000001-s000000000002-r00001of00002-c00000of"),
        ("write", 6, "write of g000001-s000000000006-r00001of00002-c00000of"),
        ("close", 0, "close has not returned for 1 s"),
    ],
)
def test_a_sink_that_hangs_is_an_error_on_all_ranks(
    two_ranks: Ranks, tmp_path: Path, call: str, step: int, said: str
) -> None:
    begun, sinks = time.monotonic(), {None: Hangs(str(tmp_path / "hangs"), call, step)}
    found = two_ranks.run(fit_raising, sinks=sinks, deltas={"sink_timeout_s": 1.0})
    assert time.monotonic() - begun < 30  # of the process group's 60
    assert all("hangs: " + said in message for message, _ in found)
    assert two_ranks.run(threads) == [[], []]
    assert_equal(tmp_path / "works", two_ranks.run(fit, folder=str(tmp_path / "works")))


def fill_disk(*_: object) -> None:
    """Let files of this process get 900 bytes, and then an error in the middle of a write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fit_with_full_disk(folder: str) -> tuple[str, dict[int, Windows]]:
    fills = At("on_train_batch_end", 5, fill_disk, rank=1)
    try:
        return fit_raising(sinks={None: DiskStore(folder)}, num_steps=200, callbacks=(fills,))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))


def test_a_full_disk_is_an_error_on_all_ranks_and_half_a_part_is_none(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(fit_with_full_disk, str(tmp_path))
    for said, tables in found:
        assert len(tables) < 200
        assert f"cannot write to {str(tmp_path)!r}: File too large" in said
    assert all(FileName.parse(path.name) for path in tmp_path.iterdir())  # what is half written is gone
    assert_equal(tmp_path, [(tables, {}) for _, tables in found])


def test_two_sinks(two_ranks: Ranks, tmp_path: Path) -> None:
    sinks = {name: Files(str(tmp_path / name)) for name in ("near", "far")}
    for last, kwargs in (((1, 7), {"saves_in": str(tmp_path)}), ((2, 9), {"ckpt_path": str(tmp_path / "step=4.ckpt")})):
        of_ranks = two_ranks.run(fit, sinks=sinks, **{"num_steps": last[1], **kwargs})
        for name in sinks:
            assert max(apply_in_order(tmp_path / name)) == last
            assert_equal(tmp_path / name, of_ranks)


def terminate(*_: object) -> None:
    signal.raise_signal(signal.SIGTERM)


def test_a_training_that_is_terminated_leaves_whole_cuts_and_resumes(two_ranks: Ranks, tmp_path: Path) -> None:
    terminates = At("on_train_batch_end", 6, terminate, rank=1)
    kwargs = {"folder": str(tmp_path / "sent"), "saves_in": str(tmp_path)}
    of_ranks = two_ranks.run(fit, num_steps=400, callbacks=(terminates,), **kwargs)
    assert 6 <= len(of_ranks[0][0]) < 400
    assert_equal(tmp_path / "sent", of_ranks)
    live = Replica(None, tmp_path / "sent")
    live.update()
    of_ranks = two_ranks.run(fit, num_steps=10, ckpt_path=str(tmp_path / "step=4.ckpt"), **kwargs)
    assert_equal(tmp_path / "sent", of_ranks)
    live.update()
    assert differences(live.state_dict(), [last for _, last in of_ranks]) == []
