"""Runs of two rank processes that meet a fault and end as processes of a user's do: exit codes, logs, checkpoints."""

from __future__ import annotations

import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.distributed.shared_calls import LEAVE_S

from ..checkpoint.resumes import StatefulBatches
from ..support.cases import ROWWISE_ADAGRAD
from ..support.fits import QUIET
from ..support.ranks import free_port, torchrun_variables
from ..support.reference import collect
from .faults import Fault, Faulty, FaultyCallback, InjectedError

NUM_BATCHES = 8
TIMEOUT_S = 8
START_S = 120  # an interpreter takes a few seconds for its imports, on a busy machine many
ROOT = Path(__file__).resolve().parents[2]


class HangsOnException(Callback):
    """Longer than the others may wait."""

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, InjectedError):
            time.sleep(2 * TIMEOUT_S)


class WaitsForTheLink(Callback):
    """Goes on with batch 5 once the link between the ranks is down."""

    def __init__(self, folder: str) -> None:
        self.folder = Path(folder)

    def on_train_batch_start(self, trainer: Trainer, pl_module: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 5:
            (self.folder / f"waits_{trainer.global_rank}").touch()
            wait_for_files(self.folder, "down", 1)


class LingersAtTheEnd(Callback):
    """Rank 1 works on for so long that rank 0, which keeps the store, does not wait for it."""

    def on_fit_end(self, trainer: Trainer, pl_module: Any) -> None:
        if trainer.global_rank == 1:
            time.sleep(2 * LEAVE_S)


CALLBACKS = {
    "waits_for_the_link": WaitsForTheLink,
    "lingers": lambda folder: LingersAtTheEnd(),
    "hangs": lambda folder: HangsOnException(),
    "on_exception": lambda folder: OnExceptionCheckpoint(folder, "failed"),
    "save_on_exception": lambda folder: ModelCheckpoint(folder, filename="saved", save_on_exception=True),
}


def run(
    folder: str,
    pipeline: str = "fused_sparse_dist",
    resume: str | None = None,
    callback: str | None = None,
    timeout_s: float = TIMEOUT_S,
    **where: Any,
) -> None:
    """Train this rank, saving every second step, and leave what there is at the end in `folder`."""
    torch.set_num_threads(1)
    fault = Fault(**{"place": "nowhere", "batch": 5, "ranks": [1], **where})
    timeout = timedelta(seconds=timeout_s)
    model = Faulty(ROWWISE_ADAGRAD, fault)
    strategy = OverlapEmbeddingStrategy(pipeline, sharding="table_wise", observer=fault.observe, timeout=timeout)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    callbacks = [FaultyCallback(fault), saver, *([CALLBACKS[callback](folder)] if callback else [])]
    quiet = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=callbacks, **quiet)
    trainer.fit(model, datamodule=StatefulBatches("own-sized", NUM_BATCHES), ckpt_path=resume)
    torch.save(collect(model, trainer.optimizers[0], model.losses), f"{folder}/result_{trainer.global_rank}.pt")


class Ended(NamedTuple):
    code: int
    log: str


class Hosts(NamedTuple):
    """Two network namespaces and a link between them, in the place of two hosts; rank 0 has the address."""

    names: tuple[str, str]
    address: str

    def cut(self) -> None:
        """Take the link down for good."""
        _ip(f"-n {self.names[1]} link set {self.names[1]} down")


def _ip(command: str) -> None:
    subprocess.run(["ip", *command.split()], check=True, capture_output=True)


@contextmanager
def two_hosts() -> Iterator[Hosts]:
    """Make two hosts, for root on Linux with iproute2; raises an OSError or a CalledProcessError otherwise."""
    a, b = names = f"lo{os.getpid()}a", f"lo{os.getpid()}b"
    with ExitStack() as undo:
        for name in names:
            _ip(f"netns add {name}")
            undo.callback(_ip, f"netns del {name}")
        _ip(f"link add {a} netns {a} type veth peer name {b} netns {b}")
        for name, address in zip(names, ("10.213.7.1", "10.213.7.2"), strict=True):
            _ip(f"-n {name} address add {address}/24 dev {name}")
            for device in (name, "lo"):
                _ip(f"-n {name} link set {device} up")
        yield Hosts(names, "10.213.7.1")


def run_on_two_hosts(folder: Path, **arguments: Any) -> list[Ended]:
    """Run a rank on each of two hosts; the link between them is cut for good before batch 5."""
    with two_hosts() as hosts:
        return _run_ranks(__name__, folder / "0", {"callback": "waits_for_the_link", **arguments}, hosts)


def run_all(folder: Path, *runs: dict[str, Any], program: str = __name__) -> list[list[Ended]]:
    """Do runs one after the other; return how each rank of each ended. Rank r of run n writes to folder/n/log_r."""
    return [_run_ranks(program, folder / str(num), arguments) for num, arguments in enumerate(runs)]


def _run_ranks(program: str, place: Path, arguments: dict[str, Any], hosts: Hosts | None = None) -> list[Ended]:
    """Run two ranks; their exit codes may be negative: the signal. One that hangs is killed by SIGALRM.

    A rank 0 that was stopped is killed once rank 1 has ended.
    """
    place.mkdir()
    port, ranks = free_port(), []
    command = [sys.executable, "-m", program, json.dumps({"folder": str(place), **arguments})]
    for rank in range(2):
        with (place / f"log_{rank}").open("wb") as log:
            environment = os.environ | torchrun_variables(rank, 2, 1, port)
            prefix = []
            if hosts is not None:
                prefix = ["ip", "netns", "exec", hosts.names[rank]]
                environment |= {"MASTER_ADDR": hosts.address, "GLOO_SOCKET_IFNAME": hosts.names[rank]}
            options = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": log}
            ranks.append(subprocess.Popen(prefix + command, **options))
    deadline = time.monotonic() + START_S + 7 * TIMEOUT_S
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.send_signal(signal.SIGALRM)
        if arguments.get("signum") == signal.SIGSTOP and ranks[1].poll() is not None:
            ranks[0].kill()
        if hosts is not None and not (place / "down").exists() and len(list(place.glob("waits_*"))) == 2:
            hosts.cut()
            (place / "down").touch()
        time.sleep(0.02)
    return [Ended(process.wait(), (place / f"log_{rank}").read_text()) for rank, process in enumerate(ranks)]


def start_script(folder: Path, **arguments: Any) -> subprocess.Popen[bytes]:
    """Start a run as a user does, `python script`: Lightning starts the second rank. Both write to FOLDER/log."""
    patient = {"folder": str(folder), "timeout_s": 150, **arguments}  # the ranks start one after the other
    command = [sys.executable, "-m", __name__, json.dumps({**patient, "by_lightning": True})]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def wait_for_all(folder: Path, rank: str) -> None:
    """Wait until both ranks have imported what they need: their timeout is shorter than some imports."""
    (folder / f"started_{rank}").touch()
    wait_for_files(folder, "started_*", 2)


def wait_for_files(folder: Path, pattern: str, number: int) -> None:
    deadline = time.monotonic() + START_S
    while len(list(folder.glob(pattern))) < number and time.monotonic() < deadline:
        time.sleep(0.02)


if __name__ == "__main__":
    # As in a terminal: a shell's background job ignores Ctrl-C, and all that it starts does, the tests' ranks too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    given = json.loads(sys.argv[1])
    if given.pop("by_lightning", False):  # for the fault; a rank that Lightning starts inherits rank 0's RANK
        os.environ["RANK"] = os.environ.get("LOCAL_RANK", "0")
    else:
        wait_for_all(Path(given["folder"]), os.environ["RANK"])
    run(**given)
