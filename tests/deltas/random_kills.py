"""Trainings whose ranks are killed at random steps and resumed: `python -m tests.deltas.random_kills 20`.

A run has two or three fits on one or two ranks. All but the last are killed by SIGKILL, one rank of them at a random
step, and the next one resumes from any checkpoint. A replica follows now and then, another one begins in the end; a run
is held where both are the tables, bit for bit.
"""

import random
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
from .delta_fits import At, differences, fit_with_deltas, kill

CASE = Case(
    "kills",
    tuple(
        TableSpec(f"t{number}", (f"f{number}",), sharding, dim=16 if sharding == "column_wise" else 8)
        for number, sharding in enumerate(("table_wise", "column_wise", "row_wise", "data_parallel"))
    ),
)


def mark_and_kill(trainer: Trainer, module: LightningModule, mark: Path) -> None:
    mark.touch()
    kill()


def play(folder: Path, seed: int) -> dict[str, object]:
    choose = random.Random(seed)
    pipeline, every = choose.choice(list(MODES)), choose.randint(1, 3)
    live = Replica(None, folder / "sent")
    kwargs: dict[str, Any] = {"every_n_steps": every, "options": {"checkpoint_format": "sharded"}, "num_steps": 16}
    at_step = 4
    for fit in range(choose.randint(1, 2)):
        world_size, kill_at = choose.randint(1, 2), choose.randint(at_step + 1, 14)
        mark = folder / f"killed {fit}"
        kills = At("on_train_batch_end", kill_at, mark_and_kill, mark, rank=choose.randrange(world_size))
        own = {"saves_in": str(folder / str(fit)), "sink": {"delay_s": choose.choice([0, 0.02])}}
        try:
            with closing(Ranks(world_size)) as ranks:
                ranks.run(fit_with_deltas, CASE, pipeline, str(folder / "sent"), callbacks=(kills,), **own, **kwargs)
            return {"nobody was killed": kill_at}
        except RankError:
            if not mark.exists():
                raise
        if choose.random() < 0.7:
            live.update()
        path = choose.choice(sorted(folder.glob("*/step=*.ckpt")))
        at_step, kwargs["ckpt_path"] = int(path.stem.partition("=")[2]), str(path)
        pipeline = choose.choice(list(MODES))
    live.update()
    with closing(Ranks(choose.randint(1, 2))) as ranks:
        of_ranks = ranks.run(fit_with_deltas, CASE, pipeline, str(folder / "sent"), **kwargs)
    begins = Replica(None, folder / "sent")
    found: dict[str, object] = {}
    for name, replica in (("live", live), ("begins", begins)):
        replica.update()
        found[name] = differences(dict(replica.state_dict()), [last for _, last in of_ranks])
    return {name: wrong for name, wrong in found.items() if wrong}


def main(num_runs: int, first_seed: int = 1) -> None:
    num_held = 0
    for seed in range(first_seed, first_seed + num_runs):
        with tempfile.TemporaryDirectory() as folder:
            wrong = play(Path(folder), seed)
        num_held += not wrong
        print(f"seed {seed}: {wrong or 'held'}", flush=True)
    print(f"{num_held} of {num_runs} runs held")


if __name__ == "__main__":
    main(*map(int, sys.argv[1:]))
