"""SIGTERM while a data loader hangs, and what ranks say when they end."""

import os
import signal
import subprocess
import time
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from torch.utils.data import DataLoader, Dataset

from lightning_overlap.plugin import first_words
from lightning_overlap.plugin.loops import sigterm

from ..support.cases import TABLE_WISE, Batch, Batches, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks, free_port, torchrun_variables


class _Hangs(Dataset):
    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.folder = how, folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Batch:
        if index == 4:
            (self.folder / "hangs").write_text(str(os.getpid()))
            time.sleep(1000)
        return make_batch(TABLE_WISE, index, 0)


class _HangingBatches(Batches):
    def __init__(self, how: str, folder: Path) -> None:
        super().__init__(TABLE_WISE)
        self.how, self.folder = how, folder

    def train_dataloader(self) -> DataLoader:
        num_workers = 2 * ("workers" in self.how)
        options = {"multiprocessing_context": "fork", "persistent_workers": True} if num_workers else {}
        return DataLoader(_Hangs(self.how, self.folder), batch_size=None, num_workers=num_workers, **options)


def hang(how: str, folder: Path, port: int) -> None:
    """Fit with a loader that hangs at its fifth batch; write what the fit raises."""
    os.environ.update(torchrun_variables(0, 1, 1, port))
    dist.init_process_group("gloo")
    model = Model(TABLE_WISE)
    with mock.patch.object(sigterm, "LOADER_S", 1.0):
        try:
            make_trainer(make_strategy(model)).fit(model, datamodule=_HangingBatches(how, folder))
        except RuntimeError as err:
            (folder / "raised").write_text(str(err))


def _is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def _wait(until: Any) -> bool:
    deadline = time.monotonic() + 60
    while not until() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(until())


@pytest.mark.parametrize("how", ["sleeps", "sleeps in workers"])
def test_a_loader_that_hangs_does_not_outlive_sigterm(tmp_path: Path, how: str) -> None:
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    process = context.Process(target=hang, args=(how, tmp_path, free_port()))
    process.start()
    pid = process.pid
    assert pid is not None
    assert _wait((tmp_path / "hangs").exists)
    time.sleep(0.2)
    hanging = int((tmp_path / "hangs").read_text())
    assert (hanging == pid) == ("workers" not in how)
    began = time.monotonic()
    os.kill(pid, signal.SIGTERM)
    process.join(60)
    assert time.monotonic() - began < 30
    assert process.exitcode == 0
    assert not _is_alive(hanging)
    said = (tmp_path / "raised").read_text()
    assert said.startswith("rank 0 was told to end (SIGTERM), and then waited 1 s for its data loader, which hangs.")


def terminate(rank: int) -> list[str]:
    """Send a signal to a rank; return after how many batches this rank ends, and what it says then."""
    model, said = Model(TABLE_WISE), []
    forked = get_context("fork").Process(target=time.sleep, args=(1000,), daemon=True)

    def training_step(batch: Batch, batch_idx: int) -> Any:
        if batch_idx == 2:
            forked.start()
        if batch_idx == 5 and model.global_rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)
        return Model.training_step(model, batch, batch_idx)

    model.training_step = training_step  # type: ignore[method-assign]
    with mock.patch.object(first_words, "tell", said.append), pytest.raises(SystemExit):
        make_trainer(make_strategy(model)).fit(model, datamodule=Batches(TABLE_WISE, 200))
    # It has the handler of this rank, and ends all the same: Python waits for it at the rank's exit.
    forked.terminate()
    forked.join(30)
    assert forked.exitcode == -signal.SIGTERM
    return [str(len(model.losses)), said[-1]]


@pytest.mark.parametrize("rank", [0, 1])
def test_every_rank_says_that_and_where_it_ends(two_ranks: Ranks, rank: int) -> None:
    for own, (steps, said) in enumerate(two_ranks.run(terminate, rank)):
        whose = "this rank" if own == rank else "another rank"
        assert said == f"lightning_overlap: rank {own} ends its run after step {steps}: {whose} was told to (SIGTERM)"


def test_one_rank_says_it_too(get_ranks: Any) -> None:
    [[steps, said]] = get_ranks(1).run(terminate, 0)
    assert said == f"lightning_overlap: rank 0 ends its run after step {steps}: this rank was told to (SIGTERM)"
