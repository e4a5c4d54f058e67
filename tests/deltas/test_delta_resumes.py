"""Law 13 through resumes: wherever a replica stopped, it ends as the tables, whatever the checkpoint was taken in."""

import contextlib
import dataclasses
import itertools
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor
from torchrec.distributed.sharding_plan import (
    column_wise,
    construct_module_sharding_plan,
    grid_shard,
    table_row_wise,
    table_wise,
)

from lightning_overlap import EmbeddingDeltas, OverlapEmbeddingStrategy
from lightning_overlap.deltas import Replica
from lightning_overlap.tables import kernel_shards

from ..support.cases import NUM_ROWS, ROWWISE_ADAGRAD, Batches, Case, Model, TableSpec, make_batch, make_plan
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks
from .delta_fits import At, Files, Windows, differences, fit_with_deltas, halve, shards_of, stragglers
from .random_kills import play


def _case(*shardings: str) -> Case:
    """Few ids a batch: two batches of 8 leave most of the rows alone."""
    return Case("resumes", tuple(TableSpec(f"t{n}", (f"f{n}",), sharding=one) for n, one in enumerate(shardings)))


MIXED = _case("table_wise", "row_wise", "data_parallel")


class Small(Batches):
    def train_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        return DataLoader([make_batch(self.case, i, rank, 4) for i in range(self.num_batches)], batch_size=None)


def save(trainer: Trainer, module: LightningModule, path: str) -> None:
    trainer.save_checkpoint(path)


def fail(trainer: Trainer, module: LightningModule) -> None:
    raise ZeroDivisionError


def interrupt(trainer: Trainer, module: LightningModule) -> None:
    raise KeyboardInterrupt


def halve_by_numpy(trainer: Trainer, module: LightningModule) -> None:
    for name, weight in module.named_parameters():
        if "embedding" in name:
            weight.detach().numpy()[:] *= 0.5
    trainer.strategy.tables_changed()


class Retrained(Model):
    """Its dense optimizer begins anew, as it must where other tables are its own."""

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint["optimizer_states"] = []


def fits(folder: str, *of_fits: dict[str, Any]) -> Windows:
    """Train several times; return the tables in the end."""
    for options in of_fits:
        case = options.get("case", MIXED)
        model = Retrained(case)
        strategy = make_strategy(model, options.get("pipeline", "fused_sparse_dist"))
        sender = EmbeddingDeltas(Files(folder), options.get("every", 2))
        callbacks = [*options.get("before", ()), sender, *options.get("after", ())]
        trainer = make_trainer(strategy, callbacks=callbacks)
        with contextlib.suppress(ZeroDivisionError, SystemExit, KeyboardInterrupt):
            trainer.fit(model, datamodule=Small(case, options["steps"]), ckpt_path=options.get("ckpt_path"))
    return shards_of(model)


at_end = partial(At, "on_train_batch_end")


def saves_after(stops: Callable[..., None]) -> Callable[[str, str], list[dict[str, Any]]]:
    """A fit that is stopped at step 10 and saved then, and one that goes on."""
    return lambda a, b: [
        {"steps": 12, "every": 6, "before": [at_end(10, stops)], "after": [At("on_exception", 10, save, a)]},
        {"steps": 12, "ckpt_path": a},
    ]


CRASHES: dict[str, Callable[[str, str], list[dict[str, Any]]]] = {
    "tables_that_the_user_wrote_before_the_save": lambda a, b: [
        {"steps": 12, "every": 3, "before": [at_end(7, halve), at_end(8, fail)], "after": [at_end(7, save, a)]},
        {"steps": 10, "ckpt_path": a},
    ],
    "a_save_after_an_exception": saves_after(fail),
    "a_save_after_an_interrupt": saves_after(interrupt),
    "a_save_in_the_middle_of_a_step": lambda a, b: [
        {"steps": 12, "pipeline": "base", "after": [At("on_train_batch_start", 6, save, a), at_end(10, fail)]},
        {"steps": 8, "pipeline": "base", "ckpt_path": a},
    ],
    "a_resume_that_crashes_before_it_has_heard_of_its_first_cut": lambda a, b: [
        {"steps": 20, "every": 4, "after": [at_end(6, save, a), at_end(15, fail)]},
        {"steps": 20, "every": 8, "ckpt_path": a, "after": [at_end(7, save, b), at_end(8, fail)]},
        {"steps": 9, "ckpt_path": b},
    ],
    "a_base_that_was_not_known_to_be_whole": lambda a, b: [
        {"steps": 20, "every": 4, "after": [At("on_train_batch_start", 5, halve), at_end(8, save, a), at_end(9, fail)]},
        {"steps": 10, "ckpt_path": a},
    ],
    "a_table_that_the_dense_optimizer_had": lambda a, b: [
        {"steps": 20, "every": 6, "pipeline": "base", "after": [at_end(10, save, a), at_end(11, fail)]},
        {"steps": 11, "pipeline": "base", "ckpt_path": a, "case": _case("table_wise", "row_wise", "row_wise")},
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
    "no_crash_but_a_write_that_no_tensor_counts": lambda a, b: [
        {"steps": 12, "pipeline": "base", "every": 3, "before": [at_end(7, halve_by_numpy)]}
    ],
}


@pytest.mark.parametrize("name", CRASHES)
def test_replicas_end_equal_wherever_they_stopped(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    sent = tmp_path / "sent"
    of_ranks = two_ranks.run(fits, str(sent), *CRASHES[name](str(tmp_path / "a.ckpt"), str(tmp_path / "b.ckpt")))
    assert stragglers(sent, of_ranks, tmp_path / "replicas") == {}


def test_a_sink_that_was_wiped_goes_on_from_an_old_checkpoint(two_ranks: Ranks, tmp_path: Path) -> None:
    """A replica has applied the same steps of a generation that the checkpoint does not know of."""
    sent, old = tmp_path / "sent", str(tmp_path / "old.ckpt")
    two_ranks.run(fits, str(sent), {"steps": 8, "after": [at_end(4, save, old)]})
    two_ranks.run(fits, str(sent), {"steps": 12, "ckpt_path": old, "before": [at_end(6, halve)]})
    live = Replica(None, sent)
    live.update()
    assert live.position is not None
    assert live.position.cut == (2, 12)
    for path in sent.iterdir():
        path.unlink()
    of_ranks = two_ranks.run(fits, str(sent), {"steps": 12, "ckpt_path": old})
    assert differences(dict(live.state_dict()), of_ranks)
    live.update()
    assert live.position.generation > 2  # a number that no earlier fit had, and a base
    assert differences(dict(live.state_dict()), of_ranks) == []


def fit_with_states(folder: str, sharding: str, steps: int, **options: Any) -> tuple[Windows, Windows]:
    """Train with row-wise state; return the tables and their states in the end, these for each column."""
    table = TableSpec("t0", ("f0",), "table_wise" if sharding in PLANS else sharding, dim=16)
    case = Case("states", (table, TableSpec("t1", ("f1",))), optimizer=ROWWISE_ADAGRAD.optimizer)
    model = Model(case)
    plan = make_plan(case, model, torch.distributed.get_world_size())
    if sharding in PLANS:
        generators = {"t0": PLANS[sharding](), "t1": table_wise(rank=0, compute_kernel="fused")}
        plan.plan["ebc"] = construct_module_sharding_plan(
            model.ebc, generators, local_size=2, world_size=2, device_type="cpu"
        )
    trainer = make_trainer(
        OverlapEmbeddingStrategy(sharding=plan),
        callbacks=[EmbeddingDeltas(Files(folder), 2, optimizer_state=True), *options.get("after", ())],
    )
    trainer.fit(model, datamodule=Small(case, steps), ckpt_path=options.get("ckpt_path"))
    states: Windows = {}
    for kernel in kernel_shards(model):
        for shard, of_shard in zip(kernel.shards, kernel.states(), strict=True):
            for values in of_shard.values():
                wide = values.reshape(len(values), -1).expand(-1, shard.weight.shape[1])
                states[shard.name, shard.first_row, shard.first_column] = wide.clone()
    return shards_of(model), states


def table_column_wise() -> Any:
    """Return column-wise shards with another name, as TorchRec has no function for it."""
    generate = column_wise(ranks=[0, 1])
    return lambda *args: dataclasses.replace(generate(*args), sharding_type="table_column_wise")


PLANS: dict[str, Callable[[], Any]] = {
    "table_column_wise": table_column_wise,
    "table_row_wise": lambda: table_row_wise(host_index=0),
    "grid_shard": lambda: grid_shard(host_indexes=[0]),
}


def states_of(replica: Replica) -> dict[str, torch.Tensor]:
    tables = replica.state_dict()
    return {
        name: values.expand(tables[name].shape)
        for name, fields in replica.optimizer_state.items()
        for values in fields.values()
    }


IN_ORDER = ("table_wise", "column_wise", "row_wise", "table_row_wise", "table_column_wise", "grid_shard")


@pytest.mark.parametrize(("before", "then"), list(itertools.pairwise(IN_ORDER)))
def test_states_have_their_names_under_every_plan(two_ranks: Ranks, tmp_path: Path, before: str, then: str) -> None:
    sent, saved = tmp_path / "sent", str(tmp_path / "saved.ckpt")
    first = two_ranks.run(fit_with_states, str(sent), before, 7, after=[at_end(4, save, saved)])
    live = Replica(None, sent, optimizer_state=True)
    live.update()
    second = two_ranks.run(fit_with_states, str(sent), then, 9, ckpt_path=saved)
    late = Replica(None, sent, optimizer_state=True)
    for replica, of_ranks in ((live, first), (live, second), (late, second)):
        if of_ranks is second:
            replica.update()
        assert {field for fields in replica.optimizer_state.values() for field in fields} == {"momentum1"}
        assert differences(dict(replica.state_dict()), [tables for tables, _ in of_ranks]) == []
        assert differences(states_of(replica), [states for _, states in of_ranks]) == []


@pytest.mark.slow
def test_kills_at_random_steps(tmp_path: Path) -> None:
    """More of them: `python -m tests.deltas.random_kills 20`."""
    assert play(tmp_path, seed=1) == {}


class Recycled(Batches):
    """Fills the memory of one batch anew each time; every third batch is empty."""

    def train_dataloader(self) -> Any:
        generator, bags = torch.Generator().manual_seed(3), torch.full((4,), 2)
        kjt = KeyedJaggedTensor(["f0"], torch.zeros(8, dtype=torch.int64), lengths=bags)
        for index in range(self.num_batches):
            batch = make_batch(self.case, index, 0, 0 if index % 3 == 1 else 4)
            if index % 3 != 1:
                kjt.values().copy_(torch.randint(0, NUM_ROWS, (8,), generator=generator))
                batch.inputs["sparse"] = (kjt, index)
            yield batch


def test_batches_without_bags_and_memory_that_is_filled_anew(get_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    args, kwargs = (_case("table_wise"), "base", str(tmp_path / "sent")), {"every_n_steps": 3, "num_steps": 10}
    of_ranks = get_ranks(1).run(fit_with_deltas, *args, data=Recycled, **kwargs)
    assert stragglers(tmp_path / "sent", [last for _, last in of_ranks], tmp_path / "replicas") == {}
