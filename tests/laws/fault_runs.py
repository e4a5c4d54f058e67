"""Runs of two rank processes that meet a fault and end as processes of a user's do: exit codes, logs, checkpoints.

`python -m tests.laws.fault_runs` is a process that has imported everything and forks both ranks of one run after the
other. It reads lines of JSON, `[folder, [run, ...]]` with the arguments of `run`, and answers each with the exit codes.
Rank r of run n writes to folder/n/log_r.
"""

from __future__ import annotations

import gc
import json
import os
import signal
import subprocess
import sys
import time
from dataclasses import dataclass
from datetime import timedelta
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint
from lightning.pytorch.strategies import DDPStrategy

from lightning_overlap import OverlapEmbeddingStrategy

from ..checkpoint.resumes import StatefulBatches
from ..support.cases import ROWWISE_ADAGRAD
from ..support.fits import QUIET
from ..support.ranks import _free_port
from ..support.reference import collect
from .faults import Fault, Faulty, FaultyCallback, InjectedError

NUM_BATCHES = 8
TIMEOUT_S = 8
ROOT = Path(__file__).resolve().parents[2]


class HangsOnException(Callback):
    """The rank that fails does not leave, for longer than the others may wait."""

    def on_exception(self, trainer: Trainer, pl_module: Any, exception: BaseException) -> None:
        if isinstance(exception, InjectedError):
            time.sleep(2 * TIMEOUT_S)


CALLBACKS = {
    "hangs": lambda folder: HangsOnException(),
    "on_exception": lambda folder: OnExceptionCheckpoint(folder, "failed"),
    "save_on_exception": lambda folder: ModelCheckpoint(folder, filename="saved", save_on_exception=True),
}


def run(
    folder: str,
    place: str = "nowhere",
    batch: int = 5,
    ranks: tuple[int, ...] = (1,),
    signum: int | None = None,
    group: bool = False,
    pipeline: str = "fused_sparse_dist",
    resume: str | None = None,
    callback: str | None = None,
    timeout_s: float = TIMEOUT_S,
) -> None:
    """Train this rank, saving every second step, and leave what there is at the end in `folder`."""
    torch.set_num_threads(1)
    fault = Fault(place, batch, tuple(ranks), signum, group)
    model = Faulty(ROWWISE_ADAGRAD, fault)
    timeout = timedelta(seconds=timeout_s)
    strategy = (
        DDPStrategy(timeout=timeout)
        if pipeline == "ddp"
        else OverlapEmbeddingStrategy(pipeline, sharding="table_wise", observer=fault.observe, timeout=timeout)
    )
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=2, save_top_k=-1)
    callbacks = [FaultyCallback(fault), saver, *([CALLBACKS[callback](folder)] if callback else [])]
    quiet = {**QUIET, "enable_checkpointing": True, "default_root_dir": folder}
    trainer = Trainer(accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, callbacks=callbacks, **quiet)
    trainer.fit(model, datamodule=StatefulBatches("own-sized", NUM_BATCHES), ckpt_path=resume)
    torch.save(collect(model, trainer.optimizers[0], model.losses), f"{folder}/result_{trainer.global_rank}.pt")


@dataclass
class Ended:
    """How one rank of a run ended."""

    code: int
    log: str


class Forker:
    """The process that forks ranks: started with the first runs, since its imports take seconds."""

    def __init__(self) -> None:
        self._process: subprocess.Popen[str] | None = None

    def run_all(self, folder: Path, *runs: dict[str, Any]) -> list[list[Ended]]:
        """Do the runs one after the other in processes of their own; return how each rank of each ended."""
        if self._process is None or self._process.poll() is not None:
            command = [sys.executable, "-m", __name__]
            self._process = subprocess.Popen(
                command, cwd=ROOT, stdin=subprocess.PIPE, stdout=subprocess.PIPE, text=True
            )
        assert self._process.stdin is not None
        assert self._process.stdout is not None
        print(json.dumps([str(folder), runs]), file=self._process.stdin, flush=True)
        ends = json.loads(self._process.stdout.readline())
        return [
            [Ended(code, (folder / str(num) / f"log_{rank}").read_text()) for rank, code in enumerate(run)]
            for num, run in enumerate(ends)
        ]

    def end(self) -> None:
        """End the process, and what it has forked that still runs."""
        if self._process is not None:
            with self._process:
                self._process.communicate(timeout=30)


def start_script(folder: Path, **arguments: Any) -> subprocess.Popen[bytes]:
    """Start a run as a user does, `python script`: Lightning starts the second rank. Both write to FOLDER/log."""
    patient = {"folder": str(folder), "timeout_s": 40, **arguments}  # the ranks start one after the other
    command = [sys.executable, "-m", __name__, "--script", json.dumps(patient)]
    with (folder / "log").open("wb") as log:
        return subprocess.Popen(command, cwd=ROOT, stdout=log, stderr=log, start_new_session=True)


def main() -> None:
    gc.collect()
    gc.freeze()  # an interpreter that ends would copy every page of what it shares with its parent
    while line := sys.stdin.readline():
        folder, runs = json.loads(line)
        ends = []
        for num, arguments in enumerate(runs):
            place = Path(folder) / str(num)
            place.mkdir()
            port = _free_port()
            pids = []
            for rank in range(2):
                if (pid := os.fork()) == 0:
                    _become(rank, port, place / f"log_{rank}")
                    run(**{"folder": str(place), **arguments})
                    return  # ends as a script does: the interpreter frees what it has
                pids.append(pid)
            ends.append(_wait(pids))
        print(json.dumps(ends), flush=True)


def _become(rank: int, port: int, log: Path) -> None:
    file = os.open(log, os.O_CREAT | os.O_WRONLY)
    os.dup2(file, 1)
    os.dup2(file, 2)
    os.environ.update(
        RANK=str(rank),
        LOCAL_RANK=str(rank),
        WORLD_SIZE="2",
        LOCAL_WORLD_SIZE="2",
        GROUP_RANK="0",
        MASTER_ADDR="127.0.0.1",
        MASTER_PORT=str(port),
        TORCHELASTIC_RUN_ID="tests",
    )


def _wait(pids: list[int]) -> list[int]:
    """Wait for the ranks; return exit codes (negative: the signal). One that hangs is killed by SIGALRM."""
    deadline = time.monotonic() + 7 * TIMEOUT_S
    codes: dict[int, int] = {}
    while len(codes) < len(pids):
        for pid in set(pids) - set(codes):
            ended, status = os.waitpid(pid, os.WNOHANG)
            if ended:
                codes[pid] = os.waitstatus_to_exitcode(status)
            elif time.monotonic() > deadline:
                os.kill(pid, signal.SIGALRM)
        time.sleep(0.02)
    return [codes[pid] for pid in pids]


if __name__ == "__main__":
    # As in a terminal: a shell's background job ignores Ctrl-C, and all that it starts does, the tests' ranks too.
    signal.signal(signal.SIGINT, signal.default_int_handler)
    if sys.argv[1:2] == ["--script"]:  # by itself, as a user's script; Lightning starts the second rank
        os.environ["RANK"] = os.environ.get("LOCAL_RANK", "0")  # for the fault
        run(**json.loads(sys.argv[2]))
    else:
        main()
