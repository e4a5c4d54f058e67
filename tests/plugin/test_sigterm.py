"""SIGTERM while a data loader hangs, and what ranks say when they end."""

import ctypes
import os
import re
import resource
import signal
import socket
import subprocess
import sys
import time
from collections.abc import Iterator
from multiprocessing import get_context
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch import Callback
from torch.utils.data import DataLoader, Dataset, IterableDataset

from lightning_overlap.plugin import first_words
from lightning_overlap.plugin.loops import sigterm
from lightning_overlap.plugin.loops.signals import Signals

from ..support.cases import TABLE_WISE, Batch, Batches, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks, free_port, torchrun_variables


def _hang(how: str, folder: Path) -> None:
    """Never return: asleep in Python, or in C code that no signal interrupts, perhaps with the interpreter's lock."""
    (folder / "hangs").write_text(str(os.getpid()))
    if "in C" not in how:
        time.sleep(1000)
    library = (ctypes.PyDLL if "holds the GIL" in how else ctypes.CDLL)(None)
    mutex = ctypes.create_string_buffer(64)  # zeros are an unlocked mutex
    for _ in range(2):
        library.pthread_mutex_lock(mutex)


class _Hangs(Dataset):
    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.folder = how, folder

    def __len__(self) -> int:
        return 8

    def __getitem__(self, index: int) -> Batch:
        if index == 4:
            _hang(self.how, self.folder)
        return make_batch(TABLE_WISE, index, 0)


class _HangsAtOnce(IterableDataset):
    def __init__(self, how: str, folder: Path) -> None:
        self.how, self.folder = how, folder

    def __iter__(self) -> Iterator[Batch]:
        _hang(self.how, self.folder)
        return iter([])


class _HangingBatches(Batches):
    def __init__(self, how: str, folder: Path) -> None:
        super().__init__(TABLE_WISE)
        self.how, self.folder = how, folder

    def train_dataloader(self) -> DataLoader:
        if "at once" in self.how:
            return DataLoader(_HangsAtOnce(self.how, self.folder), batch_size=None)
        num_workers = 2 * ("workers" in self.how)
        options = {"multiprocessing_context": "fork", "persistent_workers": True} if num_workers else {}
        return DataLoader(_Hangs(self.how, self.folder), batch_size=None, num_workers=num_workers, **options)


class _HangingValidation(_HangingBatches):
    val_dataloader = _HangingBatches.train_dataloader
    train_dataloader = Batches.train_dataloader


def hang(how: str, folder: Path, port: int) -> None:
    """Fit with a loader that hangs, at its fifth batch or at once; write what the fit raises or the process prints."""
    os.environ.update(torchrun_variables(0, 1, 1, port))
    os.dup2(os.open(folder / "printed", os.O_WRONLY | os.O_CREAT), 2)
    dist.init_process_group("gloo")
    model = Model(TABLE_WISE)
    strategy = make_strategy(model)

    def finish_save(error: BaseException | None = None) -> None:
        time.sleep(1.0)
        (folder / "saved").touch()

    strategy.finish_save = finish_save  # type: ignore[method-assign]
    with mock.patch.object(sigterm, "LOADER_S", 1.0), mock.patch.object(sigterm, "RETURN_S", 1.0):
        try:
            data = (_HangingValidation if "validation" in how else _HangingBatches)(how, folder)
            make_trainer(strategy).fit(model, datamodule=data)
        except RuntimeError as err:
            (folder / "raised").write_text(str(err))


def _is_alive(pid: int) -> bool:
    state = subprocess.run(["ps", "-o", "stat=", "-p", str(pid)], capture_output=True, text=True, check=False).stdout
    return bool(state.strip()) and not state.startswith("Z")


def _wait(until: Any) -> bool:
    deadline = time.monotonic() + 30
    while not until() and time.monotonic() < deadline:
        time.sleep(0.02)
    return bool(until())


def _end(target: Any, how: str, folder: Path) -> int | None:
    """Run `target` in a process, send it SIGTERM while it hangs, and return its exit code."""
    context = get_context("forkserver")
    context.set_forkserver_preload(["tests.support.preloaded"])
    process = context.Process(target=target, args=(how, folder, free_port()))
    process.start()
    pid = process.pid
    assert pid is not None
    hanging = pid
    try:
        assert _wait((folder / "hangs").exists)
        time.sleep(0.2)
        hanging = int((folder / "hangs").read_text())
        assert (hanging == pid) == ("workers" not in how)
        os.kill(pid, signal.SIGTERM)
        process.join(20)
        assert not _is_alive(hanging)
        return process.exitcode
    finally:
        for one in {pid, hanging}:
            if _is_alive(one):
                os.kill(one, signal.SIGKILL)
        process.join(10)


@pytest.mark.parametrize(
    "how", ["sleeps", "sleeps at once", "sleeps at once in the validation", "in C in workers, holds the GIL"]
)
def test_a_loader_that_hangs_does_not_outlive_sigterm(tmp_path: Path, how: str) -> None:
    assert _end(hang, how, tmp_path) == 0
    said = (tmp_path / "raised").read_text()
    assert said.startswith("rank 0 was told to end (SIGTERM), and then waited 1 s for its data loader, which hangs.")


@pytest.mark.parametrize("how", ["in C", "in C, at once"])
def test_nor_does_one_that_never_returns_to_python(tmp_path: Path, how: str) -> None:
    """The process prints where it hangs, and waits for the thread of an asynchronous save."""
    assert _end(hang, how, tmp_path) == 1
    printed = (tmp_path / "printed").read_text()
    assert "rank 0 was told to end (SIGTERM), and then waited 2 s for its data loader, which hangs in code" in printed
    assert re.search(r"test_sigterm\.py\", line \d+ in _hang", printed)
    assert (tmp_path / "saved").exists()
    assert not (tmp_path / "raised").exists()


class _Slow(Callback):
    """Takes far longer than a data loader may, after the signal: for a step, a save, and the end of the run."""

    def on_train_batch_end(self, trainer: Any, *_: Any) -> None:
        if sigterm.received(trainer):
            time.sleep(0.6)

    on_exception = on_train_batch_end


def end_slowly() -> tuple[int, str]:
    """Send SIGTERM to this rank in its third step; return the number of steps, and what it says at the end."""
    model, said = Model(TABLE_WISE), []
    loader = Batches(TABLE_WISE, 200)

    def training_step(batch: Batch, batch_idx: int) -> Any:
        if batch_idx == 2:
            os.kill(os.getpid(), signal.SIGTERM)
        return Model.training_step(model, batch, batch_idx)

    model.training_step = training_step  # type: ignore[method-assign]
    times = {"LOADER_S": 0.2, "RETURN_S": 0.1}
    tell = mock.patch.object(first_words, "tell", said.append)
    with mock.patch.multiple(sigterm, **times), tell, pytest.raises(SystemExit):
        make_trainer(make_strategy(model), callbacks=[_Slow()]).fit(model, datamodule=loader)
    return len(model.losses), said[-1]


def test_a_run_that_ends_takes_its_time(get_ranks: Any) -> None:
    [[steps, said]] = get_ranks(1).run(end_slowly)
    assert said == f"lightning_overlap: rank 0 ends its run after step {steps}: this rank was told to (SIGTERM)"


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
        whose = "this rank" if own == rank else f"rank {rank}"
        assert said == f"lightning_overlap: rank {own} ends its run after step {steps}: {whose} was told to (SIGTERM)"


def test_one_rank_says_it_too(get_ranks: Any) -> None:
    [[steps, said]] = get_ranks(1).run(terminate, 0)
    assert said == f"lightning_overlap: rank 0 ends its run after step {steps}: this rank was told to (SIGTERM)"


def fail_to_end() -> tuple[int, int]:
    """Run a fit whose teardown fails and send SIGTERM after it; return how often a launcher and a handler got it."""
    heard: list[int] = []
    before = signal.signal(signal.SIGTERM, lambda signum, frame: heard.append(signum))
    model = Model(TABLE_WISE)
    trainer = make_trainer(make_strategy(model))
    failing = mock.patch.object(trainer.fit_loop, "teardown", mock.Mock(side_effect=RuntimeError("teardown")))
    try:
        with failing, pytest.raises(RuntimeError, match="teardown"):
            trainer.fit(model, datamodule=Batches(TABLE_WISE, 2))
        with mock.patch.object(type(trainer.strategy), "launcher", mock.Mock()) as launcher:
            os.kill(os.getpid(), signal.SIGTERM)
        return launcher.kill.call_count, len(heard)
    finally:
        signal.signal(signal.SIGTERM, before)


def test_a_run_that_is_over_leaves_the_signal_to_others(get_ranks: Any) -> None:
    """Lightning does not put handlers back if its teardown fails."""
    assert get_ranks(1).run(fail_to_end) == [(0, 1)]


def test_signals_are_heard_with_many_files_open() -> None:
    soft, hard = resource.getrlimit(resource.RLIMIT_NOFILE)
    if hard != resource.RLIM_INFINITY and hard < 2000:
        pytest.skip("no process may have so many files open")
    resource.setrlimit(resource.RLIMIT_NOFILE, (2000, hard))
    own = signal.signal(signal.SIGUSR1, lambda *_: None)
    files = [os.open(os.devnull, os.O_RDONLY) for _ in range(1100)]
    signals = Signals()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signal.SIGUSR1 in signals.wait(1.0)
    finally:
        signals.close()
        for file in files:
            os.close(file)
        signal.signal(signal.SIGUSR1, own)
        resource.setrlimit(resource.RLIMIT_NOFILE, (soft, hard))


def test_signals_are_heard_in_another_thread() -> None:
    """Those of this process alone, though another process has the socket; who has heard them before still does."""
    before, taken = socket.socketpair()
    taken.setblocking(False)
    own = signal.signal(signal.SIGUSR1, lambda *_: None), signal.set_wakeup_fd(taken.fileno())
    # A DataLoader's workers leave a handler for the ends of children, which would be heard too.
    children = signal.signal(signal.SIGCHLD, signal.SIG_DFL)
    signals = Signals()
    try:
        held = signal.set_wakeup_fd(-1)
        signal.set_wakeup_fd(held)
        assert signals.wait(0.0) == set()
        write = f"import os; os.write({held}, bytes([{int(signal.SIGUSR1)}]))"
        subprocess.run([sys.executable, "-ISc", write], pass_fds=[held], check=True)
        assert signals.wait(1.0) == set()
        os.kill(os.getpid(), signal.SIGUSR1)
        assert signals.wait(1.0) == {signal.SIGUSR1}
        assert before.recv(10) == bytes([signal.SIGUSR1])
        signals.wake()
        assert signals.wait(60.0) == set()
    finally:
        signals.close()
        assert signal.set_wakeup_fd(-1) == taken.fileno()
        signal.set_wakeup_fd(own[1])
        signal.signal(signal.SIGUSR1, own[0])
        signal.signal(signal.SIGCHLD, children)
        before.close()
        taken.close()
