"""Trainings that meet drawn faults, restarted by torchrun's own agent: `python -m tests.cluster.chaos --num 300`.

A trial is a training of two ranks under an elastic agent. One to three faults hit it, one after the other, each at a
drawn place of a drawn rank. The agent restarts the ranks, which resume from the last checkpoint. Whatever was trained,
in whichever life, has to have the losses of a training without faults, bit for bit, and so have the last weights.

Agents and ranks are forked from a process that has imported everything, so that a life takes about a second.
"""

import argparse
import contextlib
import json
import multiprocessing
import os
import random
import shutil
import signal
import sys
import tempfile
import time
import traceback
import warnings
from collections import deque
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, Std
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from lightning_overlap import OverlapEmbeddingStrategy

from ..checkpoint.resumes import Stateful
from ..support.cases import ROWWISE_ADAGRAD, Batch, Case, Model, make_batch
from ..support.fits import QUIET
from ..support.ranks import ROOT
from ..support.reference import collect

CASE = ROWWISE_ADAGRAD
NUM_RANKS, NUM_BATCHES, EPOCHS = 2, 4, 3
PLACES = ("loader", "copy", "forward", "backward", "optimizer", "save", "validation", "epoch_end")
MOST = {"epoch_end": EPOCHS, "save": 40}  # times that a life comes to a place, at most; else one for each batch
KINDS = ("raise", "kill", "term", "exit")
TIMEOUT_S = 40  # of the ranks: a fork and a first batch on a busy machine are in it
TRIAL_S = 300  # a trial takes a few seconds; on a busy machine many


@dataclass(frozen=True)
class Fault:
    place: str
    nth: int  # time that a life comes there
    rank: int
    kind: str


@dataclass(frozen=True)
class Trial:
    seed: int
    faults: tuple[Fault, ...]
    pipeline: str
    format: str
    asynchronous: bool
    every: int  # steps between checkpoints
    most_increments: int  # 0: whole again after each increment


def of_seed(seed: int) -> Trial:
    choose = random.Random(seed)

    def draw() -> Fault:
        place = choose.choice(PLACES)
        # Most of them early: a later life may not come as far again.
        nth = min(choose.randint(1, MOST.get(place, NUM_BATCHES * EPOCHS)) for _ in range(2))
        return Fault(place, nth, choose.randrange(NUM_RANKS), choose.choice(KINDS))

    return Trial(
        seed=seed,
        faults=tuple(draw() for _ in range(choose.randint(1, 3))),
        pipeline=choose.choice(["fused_sparse_dist", "split_backward", "base", "sparse_dist"]),
        format=(saved_as := choose.choice(["sharded", "full", "incremental"])),
        asynchronous=saved_as != "full" and choose.random() < 0.5,
        every=choose.randint(1, 3),
        most_increments=choose.choice([0, 5]),
    )


# -- what a rank does --------------------------------------------------------------------------------------------------


class Faults:
    """The faults of a trial; the first one that has not happened yet in any life happens next."""

    def __init__(self, faults: Sequence[Fault], folder: Path, rank: int) -> None:
        self._faults, self._folder, self._rank, self._num = faults, folder, rank, 0
        happened = len(list(folder.glob("fault_*")))
        self._next = faults[happened] if happened < len(faults) else None
        self._mark = folder / f"fault_{happened}"

    def at(self, place: str) -> None:
        """Come to a place: the fault happens if it is due there."""
        fault = self._next
        if fault is None or (fault.place, fault.rank) != (place, self._rank):
            return
        self._num += 1
        if self._num != fault.nth:
            return
        self._next = None
        self._mark.touch()
        print(f"fault: {fault}", file=sys.stderr, flush=True)
        if fault.kind == "raise":
            raise InjectedError(str(fault))
        if fault.kind == "exit":
            os._exit(17)
        os.kill(os.getpid(), {"kill": signal.SIGKILL, "term": signal.SIGTERM}[fault.kind])


class InjectedError(Exception):
    """Nobody else raises this one."""


class _Loader(Stateful):
    def __init__(self, faults: Faults, case: Case, num: int, rank: int) -> None:
        super().__init__(case, num, rank)
        self.faults = faults

    def __iter__(self) -> Iterator[Any]:
        for batch in super().__iter__():
            self.faults.at("loader")
            yield batch

    def __len__(self) -> int:
        return self.num


class _Data(LightningDataModule):
    def __init__(self, faults: Faults) -> None:
        super().__init__()
        self.faults = faults

    def train_dataloader(self) -> Any:
        return _Loader(self.faults, CASE, NUM_BATCHES, self.trainer.global_rank)

    def val_dataloader(self) -> Any:
        batches = [make_batch(CASE, 1000, self.trainer.global_rank)]
        return torch.utils.data.DataLoader(batches, batch_size=None)


class _Chaotic(Model):
    def __init__(self, faults: Faults, losses: Path) -> None:
        super().__init__(CASE)
        self.faults, self.trained = faults, losses.open("a", encoding="utf-8")

    def on_after_batch_transfer(self, batch: Batch, dataloader_idx: int) -> Batch:
        if self.trainer.training:
            self.faults.at("copy")
        return batch

    def training_step(self, batch: Batch, batch_idx: int) -> torch.Tensor:
        self.faults.at("forward")
        loss = super().training_step(batch, batch_idx)
        step = [self.trainer.global_step, self.current_epoch, batch_idx, batch.inputs["sparse"][1], loss.item().hex()]
        self.trained.write(json.dumps(step) + "\n")
        self.trained.flush()
        loss.register_hook(lambda gradient: self.faults.at("backward"))
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if not self.trainer.sanity_checking:
            self.faults.at("validation")
        super().validation_step(batch, batch_idx)

    def on_train_epoch_end(self) -> None:
        self.faults.at("epoch_end")

    def configure_optimizers(self) -> Any:
        optimizer: Any = super().configure_optimizers()
        optimizer.register_step_post_hook(lambda *_: self.faults.at("optimizer"))
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.9)]


class _EpochEnds(Callback):
    """Counts the ends of epochs: each has one, in whichever life, or the same one again after a fault in it."""

    def __init__(self, path: Path) -> None:
        self.path = path

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        with self.path.open("a", encoding="utf-8") as file:
            file.write(f"{trainer.current_epoch} {trainer.optimizers[0].param_groups[0]['lr']!r}\n")


def train(trial: Trial, folder: str) -> None:
    """Be a rank in one of its lives; leave a result at the end of the training."""
    rank, place = int(os.environ["RANK"]), Path(folder)
    signal.signal(signal.SIGTERM, signal.SIG_DFL)  # from the agent, whose fork this is
    signal.signal(signal.SIGINT, signal.default_int_handler)
    torch.set_num_threads(1)
    torch.manual_seed(3)
    faults = Faults(trial.faults, place, rank)
    checkpoints = place / "checkpoints"

    def watch(event: str, args: tuple[Any, ...]) -> None:
        if event in ("os.rename", "os.remove", "os.mkdir", "open") and str(checkpoints) in str(args[0]):
            faults.at("save")

    sys.addaudithook(watch)
    model = _Chaotic(faults, place / f"losses_{rank}")
    options: dict[str, Any] = {
        "checkpoint_format": trial.format,
        "async_checkpoint": trial.asynchronous,
        "most_increments": trial.most_increments,
    }
    strategy = OverlapEmbeddingStrategy(trial.pipeline, sharding="table_wise", timeout=TIMEOUT_S, **options)
    saver = ModelCheckpoint(checkpoints, save_last=True, every_n_train_steps=trial.every)
    trainer = Trainer(
        accelerator="cpu",
        devices=NUM_RANKS,
        strategy=strategy,
        max_epochs=EPOCHS,
        callbacks=[_EpochEnds(place / f"epochs_{rank}"), saver],
        val_check_interval=2,
        num_sanity_val_steps=0,
        **{**QUIET, "enable_checkpointing": True, "default_root_dir": folder},
    )
    try:
        with warnings.catch_warnings(action="ignore"):
            trainer.fit(model, datamodule=_Data(faults), ckpt_path="last")
    except SIGTERMException:  # all ranks leave in order; an agent waits forever for a function that exits by it
        return
    torch.save(collect(model, trainer.optimizers[0], [torch.zeros(())]), place / f"result_{rank}.pt")


# -- agents ------------------------------------------------------------------------------------------------------------


def be_agent(trial: Trial, folder: str) -> None:
    """Train under an elastic agent; start another one, as a cluster does, if SIGTERM has ended all ranks in order."""
    os.setsid()  # whatever is left at the end can be killed
    os.environ["TORCH_DISABLE_SHARE_RDZV_TCP_STORE"] = "1"  # a restart may read the dead ranks' addresses otherwise
    os.chdir(ROOT)
    with (Path(folder) / "agent.log").open("wb") as log:
        for stream in (1, 2):
            os.dup2(log.fileno(), stream)
    try:
        for start in range(len(trial.faults) + 1):
            config = LaunchConfig(
                min_nodes=1,
                max_nodes=1,
                nproc_per_node=NUM_RANKS,
                run_id=f"{trial.seed}_{start}",
                rdzv_backend="c10d",
                rdzv_endpoint="127.0.0.1:0",
                local_addr="127.0.0.1",
                max_restarts=len(trial.faults),
                monitor_interval=0.05,
                start_method="fork",
                logs_specs=DefaultLogsSpecs(log_dir=f"{folder}/logs_{start}", redirects=Std.ALL),
            )
            elastic_launch(config, train)(trial, folder)
            if len(list(Path(folder).glob("result_*.pt"))) == NUM_RANKS:
                break
    except BaseException:
        traceback.print_exc()
        os._exit(1)
    os._exit(0)


class Agents:
    """Runs trials, some at a time, in agents that a process forks which has imported everything."""

    def __init__(self, folder: Path, num_at_once: int = 2) -> None:
        self._folder, self._num = folder, num_at_once
        self._context = multiprocessing.get_context("forkserver")
        self._context.set_forkserver_preload(["tests.support.preloaded"])

    def run(self, trials: Sequence[Trial]) -> Iterator[tuple[Trial, Path, int | None]]:
        """Run trials; yield each with its folder and the agent's exit code, None if it took too long."""
        to_do, running = deque(trials), {}
        while to_do or running:
            while to_do and len(running) < self._num:
                trial = to_do.popleft()
                folder = self._folder / str(trial.seed)
                folder.mkdir()
                process: Any = self._context.Process(target=be_agent, args=(trial, str(folder)))
                with contextlib.chdir(ROOT):
                    process.start()
                running[trial.seed] = (process, trial, folder, time.monotonic() + TRIAL_S)
            for seed, (process, trial, folder, deadline) in list(running.items()):
                process.join(0.02)
                if process.is_alive() and time.monotonic() < deadline:
                    continue
                code = process.exitcode
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)  # also ranks that an agent has left
                process.join()
                del running[seed]
                yield trial, folder, code


# -- what has to hold --------------------------------------------------------------------------------------------------


def wrong(folder: Path, code: int | None, reference: Path) -> list[str]:
    """Return what is not as in the reference's folder, a training without faults."""
    if code != 0:
        return [f"the agent ended with {code}: " + (folder / "agent.log").read_text(encoding="utf-8")[-1500:]]
    found = []
    for rank in range(NUM_RANKS):
        whole, steps = (_steps(one / f"losses_{rank}") for one in (reference, folder))
        expected = {step[0]: step for step in whole}
        found += [f"rank {rank}: {step} in the place of {expected.get(step[0])}" for step in steps if step not in whole]
        if missing := sorted(expected.keys() - {step[0] for step in steps}):
            found.append(f"rank {rank}: steps {missing} were never trained")
        ends = [(one / f"epochs_{rank}").read_text(encoding="utf-8").split("\n") for one in (reference, folder)]
        if list(dict.fromkeys(ends[1])) != ends[0]:
            found.append(f"rank {rank}: ends of epochs {ends[1]} in the place of {ends[0]}")
        mine, theirs = (
            torch.load(one / f"result_{rank}.pt", weights_only=False) if (one / f"result_{rank}.pt").exists() else None
            for one in (folder, reference)
        )
        found += ["no result"] if mine is None else mine.differences(theirs)
    return found


def _steps(path: Path) -> list[list[Any]]:
    # The last line of a killed rank may be cut off.
    lines = path.read_text(encoding="utf-8").splitlines() if path.exists() else []
    return [json.loads(line) for line in lines if line.endswith("]")]


def run(seeds: Sequence[int], folder: Path) -> Iterator[tuple[Trial, int, list[str]]]:
    """Run the trials of seeds; yield each with the number of its faults that happened and what is wrong."""
    agents = Agents(folder)
    # All modes of the trials are exact: one reference serves all of them.
    plain = Trial(-1, (), "base", "full", asynchronous=False, every=100, most_increments=5)
    [(_, reference, code)] = agents.run([plain])
    assert code == 0, (reference / "agent.log").read_text(encoding="utf-8")
    for trial, place, code in agents.run([of_seed(seed) for seed in seeds]):
        found = wrong(place, code, reference)
        yield trial, len(list(place.glob("fault_*"))), found
        if not found:
            shutil.rmtree(place)


def main(arguments: Sequence[str] | None = None) -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=30)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    given = parser.parse_args(arguments)
    folder = Path(tempfile.mkdtemp(prefix="chaos_"))
    num_wrong = num_faults = 0
    for trial, happened, found in run(range(given.first, given.first + given.num), folder):
        num_faults += happened
        num_wrong += bool(found)
        print(f"seed {trial.seed}: {happened} of {len(trial.faults)} faults, {found or 'held'}", flush=True)
        if found:
            print(f"  {trial}\n  logs in {folder / str(trial.seed)}", flush=True)
    print(f"{given.num - num_wrong} of {given.num} held, after {num_faults} faults")
    if not num_wrong:
        shutil.rmtree(folder)
    return num_wrong


if __name__ == "__main__":
    sys.exit(main())
