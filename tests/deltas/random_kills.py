"""Trainings whose ranks are killed at random steps and resumed: `python -m tests.deltas.random_kills 20`.

A run has two or three fits on one to three ranks. All but the last are ended by SIGKILL of one rank at a random step,
and the next one resumes from any checkpoint, perhaps in another mode on another number of ranks. A replica follows now
and then, another one begins in the end: both have to be the tables, bit for bit.
"""

import os
import random
import signal
import sys
import tempfile
from contextlib import closing
from pathlib import Path
from typing import Any

from lightning.pytorch import LightningModule, Trainer

from lightning_overlap import MODES
from lightning_overlap.deltas import Replica

from ..support.cases import Case, TableSpec
from ..support.ranks import RankError, Ranks
from .delta_fits import At, differences, fit_with_deltas

SHARDINGS = ("table_wise", "column_wise", "row_wise", "data_parallel")
CASE = Case(
    "kills",
    tuple(
        TableSpec(f"t{number}", (f"f{number}",), sharding, dim=16 if sharding == "column_wise" else 8)
        for number, sharding in enumerate(SHARDINGS)
    ),
)
NUM_STEPS = 16
START_S = 180.0  # processes may take longer to start than to train


def mark_and_kill(trainer: Trainer, module: LightningModule, mark: Path) -> None:
    mark.touch()
    os.kill(os.getpid(), signal.SIGKILL)


def play(folder: Path, seed: int) -> dict[str, list[str]]:
    """Play one training with its kills; return what is not equal in the replica that followed and in a new one."""
    choose = random.Random(seed)
    sent = folder / "sent"
    kwargs: dict[str, Any] = {
        "every_n_steps": choose.randint(1, 3),
        "options": {"checkpoint_format": "sharded"},
        "num_steps": NUM_STEPS,
    }
    followed = Replica(None, sent)
    at_step = 4  # the first checkpoint
    for fit in range(choose.randint(1, 2)):
        world_size, kill_at = choose.randint(1, 3), choose.randint(at_step + 1, NUM_STEPS - 2)
        mark = folder / f"killed {fit}"
        kills = At("on_train_batch_end", kill_at, mark_and_kill, mark, rank=choose.randrange(world_size))
        own = {"saves_in": str(folder / str(fit)), "sink": {"delay_s": choose.choice([0, 0.02])}}
        pipeline = choose.choice(list(MODES))
        with closing(Ranks(world_size)) as ranks:
            ranks.run(os.getpid, timeout_s=START_S)
            try:
                ranks.run(fit_with_deltas, CASE, pipeline, str(sent), callbacks=(kills,), **own, **kwargs)
            except RankError:
                if not mark.exists():
                    raise
        assert mark.exists(), "nobody was killed"
        if choose.random() < 0.7:
            followed.update()
        path = choose.choice(sorted(folder.glob("*/step=*.ckpt")))
        at_step, kwargs["ckpt_path"] = int(path.stem.partition("=")[2]), str(path)
    with closing(Ranks(choose.randint(1, 3))) as ranks:
        ranks.run(os.getpid, timeout_s=START_S)
        of_ranks = ranks.run(fit_with_deltas, CASE, choose.choice(list(MODES)), str(sent), **kwargs)
    wrong: dict[str, list[str]] = {}
    for name, replica in (("followed", followed), ("new", Replica(None, sent))):
        replica.update()
        wrong[name] = differences(replica.state_dict(), [last for _, last in of_ranks])
    return {name: tables for name, tables in wrong.items() if tables}


def main(num_runs: int, first_seed: int = 1) -> int:
    num_wrong = 0
    for seed in range(first_seed, first_seed + num_runs):
        with tempfile.TemporaryDirectory() as folder:
            wrong = play(Path(folder), seed)
        num_wrong += bool(wrong)
        print(f"seed {seed}: {wrong or 'held'}", flush=True)
    print(f"{num_runs - num_wrong} of {num_runs} held")
    return num_wrong


if __name__ == "__main__":
    sys.exit(main(*map(int, sys.argv[1:])))
