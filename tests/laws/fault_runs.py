"""Runs of two rank processes that meet a fault and end as processes of a user's do: exit codes, logs, checkpoints."""

import json
import os
import signal
import subprocess
import sys
import time
from datetime import timedelta
from pathlib import Path
from typing import Any, NamedTuple

import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint, OnExceptionCheckpoint

from lightning_overlap import OverlapEmbeddingStrategy

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


CALLBACKS = {
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


def run_all(folder: Path, *runs: dict[str, Any], program: str = __name__) -> list[list[Ended]]:
    """Do runs one after the other; return how each rank of each ended. Rank r of run n writes to folder/n/log_r."""
    return [_run_ranks(program, folder / str(num), arguments) for num, arguments in enumerate(runs)]


def _run_ranks(program: str, place: Path, arguments: dict[str, Any]) -> list[Ended]:
    """Run two ranks; their exit codes may be negative: the signal. One that hangs is killed by SIGALRM."""
    place.mkdir()
    port, ranks = free_port(), []
    command = [sys.executable, "-m", program, json.dumps({"folder": str(place), **arguments})]
    for rank in range(2):
        with (place / f"log_{rank}").open("wb") as log:
            environment = os.environ | torchrun_variables(rank, 2, 1, port)
            options = {"cwd": ROOT, "env": environment, "stdout": log, "stderr": log}
            ranks.append(subprocess.Popen(command, **options))
    deadline = time.monotonic() + START_S + 7 * TIMEOUT_S
    while any(rank.poll() is None for rank in ranks):
        if time.monotonic() > deadline:
            for rank in ranks:
                rank.send_signal(signal.SIGALRM)
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
    deadline = time.monotonic() + START_S
    while len(list(folder.glob("started_*"))) < 2 and time.monotonic() < deadline:
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
