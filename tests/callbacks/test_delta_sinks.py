"""Sinks that hang, disks that are full, several sinks at once: an error with its cause on all ranks, or whole cuts."""

from __future__ import annotations

import threading
import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.callbacks import EmbeddingDeltas
from lightning_overlap.deltas import PartName

from ..support.cases import Batches, Case, Model, TableSpec, make_plan
from ..support.fits import make_trainer
from ..support.ranks import Ranks
from .delta_fits import Files, Windows, apply_in_order, differences, shards_of

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
    sinks: dict[str | None, Any], num_steps: int = 6, callbacks: tuple[Callback, ...] = (), **kwargs: Any
) -> Windows:
    """Train with a sink for each name; return the tables in the end."""
    ckpt_path, every = kwargs.pop("ckpt_path", None), kwargs.pop("every", 2)
    options = {name: kwargs.pop(name) for name in ("sink_timeout_s",) if name in kwargs}
    model = Model(CASE)
    strategy = OverlapEmbeddingStrategy(sharding=make_plan(CASE, model, torch.distributed.get_world_size()))
    senders = [EmbeddingDeltas(sink, every, name=name, **options) for name, sink in sinks.items()]
    trainer = make_trainer(strategy, callbacks=[*senders, *callbacks], **kwargs)
    trainer.fit(model, datamodule=Batches(CASE, num_steps), ckpt_path=ckpt_path)
    return shards_of(model)


def fit_expecting(error: type[Exception], *args: Any, **kwargs: Any) -> tuple[str, float, list[str]]:
    """Train; return what was raised, after how long, and the threads that would keep the process."""
    begun = time.monotonic()
    with pytest.raises(error) as caught:
        fit(*args, **kwargs)
    threads = [one.name for one in threading.enumerate() if not one.daemon and one is not threading.main_thread()]
    return str(caught.value), time.monotonic() - begun, [name for name in threads if "deltas" in name or "rows" in name]


@pytest.mark.parametrize(
    ("call", "step", "said"),
    [
        ("names", 0, "its names has not returned for 1 s"),
        ("write", 0, "its write of g000001-s000000000000-r00001of00002-c00000of"),
        ("write", 2, "its write of g000001-s000000000002-r00001of00002-c00000of"),
        ("write", 6, "its write of g000001-s000000000006-r00001of00002-c00000of"),
        ("close", 0, "its close has not returned for 1 s"),
    ],
)
def test_a_sink_that_hangs_is_an_error_on_all_ranks(
    ranks: Ranks, tmp_path: Path, call: str, step: int, said: str
) -> None:
    """At the start, in the middle and at the end of a fit; and the next one, with a sink that works, trains."""
    sink = Hangs(str(tmp_path / "hangs"), call, step)
    for message, took_s, threads in ranks.run(fit_expecting, RuntimeError, {None: sink}, sink_timeout_s=1.0):
        assert "hangs: " + said in message
        assert took_s < 30  # of the process group's 60
        assert threads == []
    of_ranks = ranks.run(fit, {None: Files(str(tmp_path / "works"))})
    after = apply_in_order(tmp_path / "works")
    assert differences(after[max(after)], of_ranks) == []
