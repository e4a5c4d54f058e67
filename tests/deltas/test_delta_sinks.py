"""Sinks that hang, disks that are full, several sinks at once: an error with its cause on all ranks, or whole cuts."""

from __future__ import annotations

import os
import resource
import signal
import threading
import time
from collections.abc import Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException

from lightning_overlap import EmbeddingDeltas
from lightning_overlap.deltas import FolderSink, PartName, Replica

from ..support.cases import Batches, Case, Model, TableSpec
from ..support.fits import QUIET, make_strategy, make_trainer
from ..support.ranks import Ranks
from .delta_fits import At, Files, TablesByStep, Windows, apply_in_order, differences, shards_of

CASE = Case("sinks", (TableSpec("t0", ("f0",)), TableSpec("t1", ("f1",), "row_wise")))


class Hangs(Files):
    """A call of it on the last rank, or of `names` on the first, never returns.

    Args:
        folder: Where parts go.
        call: Which: `names`, `close`, or `write`.
        step: Of the part whose write hangs.
    """

    def __init__(self, folder: str, call: str, step: int = 0) -> None:
        super().__init__(folder)
        self.call, self.step = call, step

    def _hang(self, call: str) -> None:
        if call == self.call and (call == "names" or torch.distributed.get_rank() == 1):
            threading.Event().wait()

    def names(self) -> Iterable[str]:
        self._hang("names")
        return super().names()

    def write(self, name: str, part: bytes) -> None:
        found = PartName.parse(name)
        if found is not None and found.step >= self.step:
            self._hang("write")
        super().write(name, part)

    def close(self) -> None:
        self._hang("close")


def fit(
    sinks: dict[str | None, Any],
    num_steps: int = 6,
    callbacks: tuple[Callback, ...] = (),
    every: int = 2,
    ckpt_path: str | None = None,
    sink_timeout_s: float = 300,
    model: type[Model] = Model,
    **kwargs: Any,
) -> tuple[dict[int, Windows], Windows]:
    """Train with a sink for each name; return this rank's tables by step, and in the end."""
    module = model(CASE)
    strategy = make_strategy(module)
    senders = [EmbeddingDeltas(sink, every, name=name, sink_timeout_s=sink_timeout_s) for name, sink in sinks.items()]
    seen = TablesByStep()
    trainer = make_trainer(strategy, callbacks=[*callbacks, *senders, seen], **kwargs)
    with suppress(SIGTERMException):
        trainer.fit(module, datamodule=Batches(CASE, num_steps), ckpt_path=ckpt_path)
    return seen.tables, shards_of(module)


def fit_expecting(error: type[Exception], *args: Any, **kwargs: Any) -> tuple[str, float, list[str]]:
    """Train; return what was raised, after how long, and the threads that would keep the process."""
    begun = time.monotonic()
    with pytest.raises(error) as caught:
        fit(*args, **kwargs)
    threads = [one.name for one in threading.enumerate() if not one.daemon]
    return str(caught.value), time.monotonic() - begun, [name for name in threads if "deltas" in name or "rows" in name]


def assert_equal(folder: Path, of_ranks: list[tuple[dict[int, Windows], Windows]]) -> None:
    """Every cut that a replica can apply is what the tables were."""
    replica = Replica(None, folder)
    replica.update()
    assert replica.step is not None
    after = apply_in_order(folder)
    generation = max(after)[0]
    for cut, tables in after.items():
        if cut[0] == generation and cut[1] in of_ranks[0][0]:
            assert differences(tables, [seen[cut[1]] for seen, _ in of_ranks]) == [], cut
    assert differences(replica.state_dict(), [seen[replica.step] for seen, _ in of_ranks]) == []


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
    """At the start, in the middle and at the end of a fit; and the next one, with a sink that works, trains."""
    sink = Hangs(str(tmp_path / "hangs"), call, step)
    for message, took_s, threads in two_ranks.run(fit_expecting, RuntimeError, {None: sink}, sink_timeout_s=1.0):
        assert "hangs: " + said in message
        assert took_s < 30  # of the process group's 60
        assert threads == []
    of_ranks = two_ranks.run(fit, {None: Files(str(tmp_path / "works"))})
    assert_equal(tmp_path / "works", of_ranks)


def fill_disk(*_: object) -> None:
    """From now on a file of this process gets 900 bytes, and then an error in the middle of a write."""
    resource.setrlimit(resource.RLIMIT_FSIZE, (900, resource.getrlimit(resource.RLIMIT_FSIZE)[1]))


def fit_with_full_disk(folder: str) -> tuple[dict[int, Windows], str]:
    """Train until a rank's disk is full; return the tables by step, and what was raised."""
    seen = TablesByStep()
    try:
        with pytest.raises(RuntimeError) as caught:
            fit({None: FolderSink(folder)}, 20, (At("on_train_batch_end", 5, fill_disk, rank=1), seen))
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (resource.RLIM_INFINITY, resource.RLIM_INFINITY))
    return seen.tables, str(caught.value)


def test_a_full_disk_is_an_error_on_all_ranks_and_half_a_part_is_none(two_ranks: Ranks, tmp_path: Path) -> None:
    found = two_ranks.run(fit_with_full_disk, str(tmp_path))
    for tables, said in found:
        assert len(tables) < 20
        assert f"cannot write to the folder of embedding deltas {str(tmp_path)!r}: File too large" in said
    assert all(PartName.parse(path.name) for path in tmp_path.iterdir())  # what is half written is gone
    assert_equal(tmp_path, [(tables, {}) for tables, _ in found])


def test_two_sinks(two_ranks: Ranks, tmp_path: Path) -> None:
    """Each with a name; and the checkpoint has both."""
    sinks = {name: Files(str(tmp_path / name)) for name in ("near", "far")}
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    kwargs = {"callbacks": (saves,), "enable_checkpointing": True}
    of_ranks = two_ranks.run(fit, sinks, 7, **kwargs)
    for name in sinks:
        assert_equal(tmp_path / name, of_ranks)
    of_ranks = two_ranks.run(fit, sinks, 9, ckpt_path=str(tmp_path / "step=4.ckpt"), **kwargs)
    for name in sinks:
        assert max(apply_in_order(tmp_path / name)) == (2, 9)
        assert_equal(tmp_path / name, of_ranks)


def test_two_sinks_without_names_are_refused(tmp_path: Path) -> None:
    senders = [EmbeddingDeltas(Files(str(tmp_path))), EmbeddingDeltas(Files(str(tmp_path)), name="b")]
    Trainer(accelerator="cpu", callbacks=senders, **QUIET)
    senders[1] = EmbeddingDeltas(Files(str(tmp_path)))
    with pytest.raises(RuntimeError, match=r"(?s)more than one stateful callback of type `EmbeddingDeltas`.*state_key"):
        Trainer(accelerator="cpu", callbacks=senders, **QUIET)


def terminate(*_: object) -> None:
    os.kill(os.getpid(), signal.SIGTERM)


def test_a_training_that_is_terminated_leaves_whole_cuts_and_resumes(two_ranks: Ranks, tmp_path: Path) -> None:
    sent = {None: Files(str(tmp_path / "sent"))}
    saves = ModelCheckpoint(tmp_path, "{step}", every_n_train_steps=4, save_top_k=-1)
    kwargs = {"enable_checkpointing": True}
    terminates = At("on_train_batch_end", 6, terminate, rank=1)
    of_ranks = two_ranks.run(fit, sent, 400, (saves, terminates), **kwargs)
    assert 6 <= len(of_ranks[0][0]) < 400
    assert_equal(tmp_path / "sent", of_ranks)
    live = Replica(None, tmp_path / "sent")
    live.update()
    of_ranks = two_ranks.run(fit, sent, 10, ckpt_path=str(tmp_path / "step=4.ckpt"), **kwargs)
    assert_equal(tmp_path / "sent", of_ranks)
    live.update()
    assert differences(live.state_dict(), [last for _, last in of_ranks]) == []


class WithLBFGS(Model):
    """Its optimizer runs the closure several times a step, which updates the tables as often."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        [group] = super().configure_optimizers().param_groups
        return torch.optim.LBFGS(group["params"], max_iter=3)


def test_an_optimizer_that_asks_for_its_gradients_several_times(two_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = two_ranks.run(fit, {None: Files(str(tmp_path))}, 8, every=1, model=WithLBFGS)
    assert_equal(tmp_path, of_ranks)
    assert len(apply_in_order(tmp_path)) > 2
