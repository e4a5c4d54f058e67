"""Law 13 through resumes: wherever a replica stopped, it ends as the tables, whatever the checkpoint was taken in."""

import contextlib
import itertools
from collections.abc import Callable
from dataclasses import replace
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan

from lightning_overlap import EmbeddingDeltas, OverlapEmbeddingStrategy
from lightning_overlap.deltas import Replica
from lightning_overlap.tables import kernel_shards

from ..support.cases import NUM_ROWS, ROWWISE_ADAGRAD, Batches, Case, Model, TableSpec, make_batch
from ..support.fits import make_trainer
from ..support.ranks import Ranks
from .delta_fits import At, Files, Windows, differences, fit_with_deltas, halve, shards_of, stragglers
from .histories import updated
from .random_kills import play

# few ids a batch: two batches of 8 leave most of the rows alone
SHARDINGS = ("table_wise", "row_wise", "data_parallel")
MIXED = Case("resumes", tuple(TableSpec(f"t{n}", (f"f{n}",), sharding=one) for n, one in enumerate(SHARDINGS)))


class Small(Batches):
    make = staticmethod(partial(make_batch, batch_size=4))


def save(trainer: Trainer, module: LightningModule, path: str) -> None:
    trainer.save_checkpoint(path)


def fail(trainer: Trainer, module: LightningModule) -> None:
    raise ZeroDivisionError


def fit(folder: str, *, steps: int, every: int = 2, before: Any = (), **options: Any) -> Windows:
    """Train; return the tables in the end, none after an error."""
    kwargs = {"num_steps": steps, "every_n_steps": every, "callbacks": before, "pipeline": "fused_sparse_dist"}
    tables: Windows = {}
    with contextlib.suppress(ZeroDivisionError):
        _, tables = fit_with_deltas(MIXED, folder=folder, data=Small, **{**kwargs, **options})
    return tables


def fits(folder: str, *of_fits: dict[str, Any]) -> Windows:
    return [fit(folder, **options) for options in of_fits][-1]


at_end = partial(At, "on_train_batch_end")

CRASHES: dict[str, Callable[[str, str], list[dict[str, Any]]]] = {
    "tables_that_the_user_wrote_before_the_save": lambda a, b: [
        {"steps": 12, "every": 3, "before": [at_end(7, halve), at_end(8, fail)], "after": [at_end(7, save, a)]},
        {"steps": 10, "ckpt_path": a},
    ],
    "a_save_after_an_exception": lambda a, b: [
        {"steps": 12, "every": 6, "before": [at_end(10, fail)], "after": [At("on_exception", 10, save, a)]},
        {"steps": 12, "ckpt_path": a},
    ],
    "a_save_in_the_middle_of_a_step": lambda a, b: [
        {"steps": 12, "pipeline": "base", "after": [At("on_train_batch_start", 6, save, a), at_end(10, fail)]},
        {"steps": 8, "pipeline": "base", "ckpt_path": a},
    ],
    "a_resume_that_crashes_before_it_has_read_of_its_first_cut": lambda a, b: [
        {"steps": 20, "every": 4, "after": [at_end(6, save, a), at_end(15, fail)]},
        {"steps": 20, "every": 8, "ckpt_path": a, "after": [at_end(7, save, b), at_end(8, fail)]},
        {"steps": 9, "ckpt_path": b},
    ],
    "a_base_that_was_not_known_to_be_whole": lambda a, b: [
        {"steps": 20, "every": 4, "after": [At("on_train_batch_start", 5, halve), at_end(8, save, a), at_end(9, fail)]},
        {"steps": 10, "ckpt_path": a},
    ],
    "tables_that_the_user_writes_after_they_were_loaded": lambda a, b: [
        {"steps": 12, "every": 3, "after": [at_end(7, save, a)]},
        {"steps": 9, "ckpt_path": a, "before": [At("on_train_start", 7, halve)]},
    ],
    "a_timeline_that_was_left": lambda a, b: [
        {"steps": 12, "pipeline": "semi_sync", "after": [at_end(4, save, a), at_end(8, save, b)]},
        {"steps": 6, "pipeline": "semi_sync", "ckpt_path": a},
        {"steps": 12, "pipeline": "semi_sync", "ckpt_path": b},
    ],
}


@pytest.mark.parametrize("name", CRASHES)
def test_replicas_end_equal_wherever_they_stopped(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    sent = tmp_path / "sent"
    of_ranks = two_ranks.run(fits, str(sent), *CRASHES[name](str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")))
    assert stragglers(sent, of_ranks) == {}


def test_a_sink_that_was_wiped_goes_on_from_an_old_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    """A replica has applied the same steps of a generation that the checkpoint does not know of."""
    sent, old = tmp_path / "sent", str(tmp_path / "old.ckpt")
    first = {"steps": 8, "after": [at_end(4, save, old)]}
    two_ranks.run(fits, str(sent), first, {"steps": 12, "ckpt_path": old, "before": [at_end(6, halve)]})
    live = updated(None, sent)
    assert live.position is not None
    assert live.position.cut == (2, 12)
    for path in sent.iterdir():
        path.unlink()
    of_ranks = two_ranks.run(fits, str(sent), {"steps": 12, "ckpt_path": old})
    assert differences(live.state_dict(), of_ranks)
    live.update()
    assert live.position.generation > 2  # a number that no earlier fit had, and a base
    assert differences(live.state_dict(), of_ranks) == []


@pytest.mark.slow
@pytest.mark.parametrize("seed", [1, 2])
def test_kills_at_random_steps(tmp_path: Path, seed: int) -> None:
    """More of them: `python -m tests.deltas.random_kills 20`."""
    assert play(tmp_path, seed) == {}


PLANS: dict[str, Any] = {
    "table_wise": sharding_plan.table_wise(rank=0, compute_kernel="fused"),
    "column_wise": sharding_plan.column_wise(ranks=[0, 1]),
    "row_wise": sharding_plan.row_wise(compute_kernel="fused"),
    "table_row_wise": sharding_plan.table_row_wise(host_index=0),
    # TorchRec has no function for it
    "table_column_wise": lambda *args: replace(PLANS["column_wise"](*args), sharding_type="table_column_wise"),
    "grid_shard": sharding_plan.grid_shard(host_indexes=[0]),
}
STATES = Case(
    "states", (TableSpec("t0", ("f0",), dim=16), TableSpec("t1", ("f1",))), optimizer=ROWWISE_ADAGRAD.optimizer
)


def fit_with_states(
    folder: str, plan: str, steps: int, after: tuple[At, ...] = (), **kwargs: Any
) -> tuple[Windows, Windows]:
    """Train with row-wise state; return the tables and their states in the end, these for each column."""
    model, sizes = Model(STATES), {"local_size": 2, "world_size": 2, "device_type": "cpu"}
    plans = {"t0": PLANS[plan], "t1": PLANS["table_wise"]}
    of_ebc = sharding_plan.construct_module_sharding_plan(model.ebc, plans, **sizes)
    callbacks = [EmbeddingDeltas(Files(folder), 2, optimizer_state=True), *after]
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding=ShardingPlan({"ebc": of_ebc})), callbacks=callbacks)
    trainer.fit(model, datamodule=Small(STATES, steps), **kwargs)
    states: Windows = {}
    for kernel in kernel_shards(model):
        for shard, of_shard in zip(kernel.shards, kernel.states(), strict=True):
            for values in of_shard.values():
                wide = values.reshape(len(values), -1).expand(-1, shard.weight.shape[1])
                states[shard.name, shard.first_row, shard.first_column] = wide.clone()
    return shards_of(model), states


def halve_states(trainer: Trainer, module: Any) -> None:
    """Write the optimizer states of all rows, and no weight."""
    for kernel in kernel_shards(module):
        for of_shard in kernel.states():
            for values in of_shard.values():
                values.mul_(0.5)


def states_of(replica: Replica) -> dict[str, torch.Tensor]:
    tables = replica.state_dict()
    return {
        name: values.expand(tables[name].shape)
        for name, fields in replica.optimizer_state.items()
        for values in fields.values()
    }


@pytest.mark.parametrize(("before", "then"), list(itertools.pairwise(PLANS)))
def test_states_have_their_names_under_every_plan(two_ranks: Ranks, tmp_path: Path, before: str, then: str) -> None:
    sent, saved = tmp_path / "sent", str(tmp_path / "saved.ckpt")
    writes = At("on_train_epoch_end", 7, halve_states)
    first = two_ranks.run(fit_with_states, str(sent), before, 7, (at_end(4, save, saved), writes))
    live = updated(None, sent, optimizer_state=True)
    second = two_ranks.run(fit_with_states, str(sent), then, 9, ckpt_path=saved)
    late = Replica(None, sent, optimizer_state=True)
    for replica, of_ranks in ((live, first), (live, second), (late, second)):
        if of_ranks is second:
            replica.update()
        assert {field for fields in replica.optimizer_state.values() for field in fields} == {"momentum1"}
        assert differences(replica.state_dict(), [tables for tables, _ in of_ranks]) == []
        assert differences(states_of(replica), [states for _, states in of_ranks]) == []


class Recycled(Batches):
    """Fills the memory of one batch anew each time; every third batch is empty."""

    def train_dataloader(self) -> Any:
        batch, empty = (make_batch(self.case, 0, 0, batch_size) for batch_size in (4, 0))
        for index in range(self.num_batches):
            batch.inputs["sparse"][0].values().random_(NUM_ROWS)
            yield empty if index % 3 == 1 else batch


def test_batches_without_bags_and_memory_that_is_filled_anew(get_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    args, kwargs = (MIXED, "base", str(tmp_path / "sent")), {"every_n_steps": 3, "num_steps": 10}
    of_ranks = get_ranks(1).run(fit_with_deltas, *args, data=Recycled, **kwargs)
    assert stragglers(tmp_path / "sent", [last for _, last in of_ranks]) == {}
