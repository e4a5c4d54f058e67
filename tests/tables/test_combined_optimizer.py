"""`combined_optimizer`: one optimizer whose groups are the dense ones and the fused tables, for any scheduler."""

import io
import pickle
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch.callbacks import LearningRateMonitor, ModelCheckpoint
from lightning.pytorch.loggers import CSVLogger
from torch import Tensor
from torch.optim import lr_scheduler
from torch.optim.swa_utils import SWALR
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.tables import kernel_shards, tbes
from lightning_overlap.tables.combined_optimizer import DenseAndFused

from ..checkpoint.resumes import StatefulBatches
from ..sparse.update_rates import TWO_RATES, Scheduled, Unscheduled, collect_tables, factor
from ..support.cases import ROWWISE_ADAGRAD, TABLE_WISE, Batches, Case, Model, TableSpec, dense_optimizer, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks
from ..support.reference import Result, collect


def monitor(folder: str) -> dict[str, list[float]]:
    model = Scheduled(TWO_RATES)
    watch = LearningRateMonitor("step", log_momentum=True, log_weight_decay=True)
    trainer = make_trainer(make_strategy(model), logger=CSVLogger(folder), log_every_n_steps=1, callbacks=[watch])
    trainer.fit(model, datamodule=Batches(TWO_RATES, 5))
    return {name: values for name, values in watch.lrs.items() if not name.startswith("step")}


def fit_twice(sharding: str) -> list[dict[str, Any]]:
    """Return the state of the optimizer after each of two fits of a module."""
    model, states = Scheduled(ROWWISE_ADAGRAD), []
    for _ in range(2):
        trainer = make_trainer(OverlapEmbeddingStrategy(sharding=sharding))
        trainer.fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 3))
        states.append(trainer.optimizers[0].state_dict())
    return states


def hyperparameters(saved: dict[str, Any]) -> list[dict[str, Any]]:
    return [{key: value for key, value in group.items() if key != "params"} for group in saved["param_groups"]]


def train_from(pipeline: str, folder: str, resume: str | None) -> tuple[Result, list[float]]:
    """Train two epochs under a schedule, saving after step 4, or go on from there; return the kernels' rates too."""
    rates: list[float] = []
    model = notes_rates(Scheduled, rates)(ROWWISE_ADAGRAD)
    saver = ModelCheckpoint(folder, filename="{step}", every_n_train_steps=4, save_top_k=-1)
    trainer = make_trainer(make_strategy(model, pipeline), enable_checkpointing=True, callbacks=[saver], max_epochs=2)
    trainer.fit(model, datamodule=StatefulBatches("own-sized", 6), ckpt_path=resume)
    return collect(model, trainer.optimizers[0], model.losses), rates


def notes_rates(cls: type[Scheduled], rates: list[float]) -> type[Scheduled]:
    """Return a class of module that notes the rate of its first kernel after each backward."""

    class Notes(cls):  # type: ignore[valid-type,misc]
        def on_after_backward(self) -> None:
            rates.append(self.ebc.fused_optimizer.optimizers[0][1].param_groups[0]["lr"])

    return Notes


SCHEDULERS: dict[str, Any] = {
    "OneCycleLR": lambda o: lr_scheduler.OneCycleLR(o, [0.1, 4.0], total_steps=20),
    "CyclicLR": lambda o: lr_scheduler.CyclicLR(o, [0.1, 1.0], [0.2, 4.0], step_size_up=3),
    "CosineAnnealingWarmRestarts": lambda o: lr_scheduler.CosineAnnealingWarmRestarts(o, T_0=3),
    "SequentialLR": lambda o: lr_scheduler.SequentialLR(
        o, [lr_scheduler.ConstantLR(o, 0.1, 2), lr_scheduler.ExponentialLR(o, 0.5)], [2]
    ),
    "SWALR": lambda o: SWALR(o, swa_lr=[0.05, 1.0]),
}


def schedule_with(name: str, dense: str) -> tuple[list[float], list[float]]:
    """Return the fused rates that a scheduler gives in six steps, and those that the kernels had in their updates."""
    seen: list[float] = []

    def made(parameters: list[Tensor]) -> torch.optim.Optimizer:
        return torch.optim.SGD(parameters, 0.1, 0.9) if dense == "SGD" else torch.optim.AdamW(parameters, 0.1)

    class Own(Scheduled):
        def configure_optimizers(self) -> Any:
            optimizer = combined_optimizer(self, made([*self.bottom.parameters(), *self.top.parameters()]))
            return [optimizer], [{"scheduler": SCHEDULERS[name](optimizer), "interval": "step"}]

    model = notes_rates(Own, seen)(TABLE_WISE)
    trainer = make_trainer(make_strategy(model))
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 6))
    alone = DenseAndFused(made([torch.zeros(1)]), {2.0: []})
    scheduler, expected = SCHEDULERS[name](alone), []
    for _ in range(6):
        expected.append(float(alone.fused_groups[0]["lr"]))
        alone.step()
        scheduler.step()
    return seen, expected


class ZeroAtFirst(Scheduled):
    """Its schedule sets rates, whatever they began with."""

    def configure_optimizers(self) -> Any:
        optimizer = combined_optimizer(self, dense_optimizer(self))
        scheduler = lr_scheduler.OneCycleLR(optimizer, [0.2, 2.0], total_steps=10)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def frozen_beside_zero(kwargs: dict[str, float]) -> tuple[bool, bool]:
    """Whether a table with a rate of zero, and a frozen one, have moved after a schedule raised the rate."""
    model = ZeroAtFirst(ROWWISE_ADAGRAD, fused_optimizer=False)
    model.ebc.embedding_bags["t1"].weight.requires_grad_(False)
    before = {name: bag.weight.detach().clone() for name, bag in model.ebc.embedding_bags.items()}
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=(torch.optim.SGD, kwargs))
    make_trainer(strategy).fit(model, datamodule=Batches(ROWWISE_ADAGRAD, 4))
    moved = {name.split()[0]: not torch.equal(t, before[name.split()[0]]) for name, t in collect_tables(model).items()}
    return moved["t0"], moved["t1"]


def rate_without_one_given() -> tuple[list[float], list[float]]:
    """Return the fused rates of a table whose optimizer was given none: of the group, and of the kernels."""
    model = Unscheduled(TABLE_WISE, fused_optimizer=False)
    strategy = OverlapEmbeddingStrategy(sharding="table_wise", fused_optimizer=(torch.optim.SGD, {}))
    trainer = make_trainer(strategy)
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 2))
    kernels = [kernel.get_learning_rate() for kernel in tbes(model.ebc)]
    return [group["lr"] for group in trainer.optimizers[0].fused_groups], kernels


def refused(what: str) -> str:
    class Refused(Scheduled):
        def configure_optimizers(self) -> Any:
            dense = dense_optimizer(self)
            if what in ("torchrec", "keyed"):
                named = dict(in_backward_optimizer_filter(self.named_parameters()))
                keyed = KeyedOptimizerWrapper(named, lambda _: dense)
                both = [("ebc", self.ebc.fused_optimizer), ("", keyed)]
                return CombinedOptimizer(both) if what == "torchrec" else combined_optimizer(self, keyed)
            optimizer = combined_optimizer(self, dense)
            if what == "two":
                self.automatic_optimization = False
                return [optimizer, combined_optimizer(self, dense)]
            if what == "add":
                optimizer.add_param_group({"params": [torch.zeros(1)]})
            optimizer.load_state_dict(dense.state_dict())
            return optimizer

    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise"))
    with pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        trainer.fit(Refused(TABLE_WISE), datamodule=Batches(TABLE_WISE, 2))
    return f"{caught.type.__name__}: {caught.value}"


def test_learning_rate_monitor_shows_both(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(monitor, str(tmp_path))
    expected = {"pg1": 0.2, "fused_0.5": 0.5, "fused_2.0": 2.0}
    assert first == second
    assert first == {
        f"lr-DenseAndFused/{name}": [rate * factor(step) for step in range(5)] for name, rate in expected.items()
    }
    [log] = tmp_path.rglob("metrics.csv")
    columns = log.read_text().splitlines()[0].split(",")
    assert {f"lr-DenseAndFused/{name}" for name in expected} < set(columns)


def test_saved_hyperparameters_do_not_depend_on_ranks_or_plan(get_ranks: Callable[..., Ranks]) -> None:
    """A second fit begins with the first rates, though the kernels still have those of the last step."""
    states = [
        state
        for world_size, sharding in ((1, "table_wise"), (2, "table_wise"), (2, "column_wise"))
        for of_rank in get_ranks(world_size).run(fit_twice, sharding)
        for state in of_rank
    ]
    for state in states:
        dense, fused = hyperparameters(state)
        assert (dense["lr"], dense["initial_lr"], dense["momentum"]) == (0.2 * factor(3), 0.2, 0.5)
        assert (fused["lr"], fused["initial_lr"], fused["name"]) == (1.0 * factor(3), 1.0, "fused")
        tensors = [value for values in state["state"].values() for value in values.values()]
        assert {type(value) for value in tensors} == {torch.Tensor}
        assert hyperparameters(state) == hyperparameters(states[0])
    torch.save(states[0], saved := io.BytesIO())
    saved.seek(0)
    assert torch.load(saved, weights_only=True).keys() == states[0].keys()


@pytest.mark.parametrize("pipeline", ["sparse_dist", "fused_sparse_dist", "fused_sparse_dist_after_optimizer"])
def test_resume_in_the_middle_of_a_schedule(ranks: Ranks, pipeline: str, tmp_path: Path) -> None:
    whole = ranks.run(train_from, pipeline, str(tmp_path / "whole"), None)
    resumed = ranks.run(train_from, pipeline, str(tmp_path / "on"), str(tmp_path / "whole" / "step=4.ckpt"))
    for (expected, rates), (actual, rates_on) in zip(whole, resumed, strict=True):
        assert rates == pytest.approx([factor(step) for step in range(12)])
        assert rates_on == rates[4:]
        expected.losses = expected.losses[4:]
        assert actual.differences(expected) == []


CYCLE_MOMENTUM = ("OneCycleLR", "CyclicLR")  # which AdamW has elsewhere than SGD


@pytest.mark.parametrize(
    ("name", "dense"), [*((name, "SGD") for name in SCHEDULERS), *((name, "AdamW") for name in CYCLE_MOMENTUM)]
)
def test_schedulers(get_ranks: Callable[..., Ranks], name: str, dense: str) -> None:
    """The kernels have the scheduler's own numbers."""
    [(seen, expected)] = get_ranks(1).run(schedule_with, name, dense)
    assert seen == expected
    assert len(set(seen)) > 1


@pytest.mark.parametrize("kwargs", [{"lr": 0.0}, {"lr": 0.0, "weight_decay": 0.0, "momentum": 0.0}], ids=len)
def test_a_frozen_table_stays_beside_one_whose_rate_rises_from_zero(
    get_ranks: Callable[..., Ranks], kwargs: dict[str, float]
) -> None:
    assert get_ranks(1).run(frozen_beside_zero, kwargs) == [(True, False)]


def test_a_rate_that_was_not_given_is_that_of_the_class(get_ranks: Callable[..., Ranks]) -> None:
    """Of the group and of the kernel, whose own rate is 0.01."""
    [(groups, kernels)] = get_ranks(1).run(rate_without_one_given)
    [own] = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))]).param_groups
    assert groups == pytest.approx([own["lr"]])
    assert kernels == pytest.approx([own["lr"]])


def test_a_run_without_tables_is_named_as_the_reason() -> None:
    dense = torch.optim.SGD([torch.nn.Parameter(torch.zeros(1))], lr=0.1)
    saved = pickle.loads(pickle.dumps(DenseAndFused(dense, {0.3: []}))).state_dict()
    with pytest.raises(ValueError, match="This run has no fused tables, as under another strategy"):
        DenseAndFused(dense, {}).load_state_dict(saved)


@pytest.mark.parametrize(
    ("what", "parts"),
    [
        ("torchrec", ["ValueError", "TorchRec's CombinedOptimizer", "combined_optimizer(self, "]),
        ("keyed", ["TypeError", "got KeyedOptimizerWrapper"]),
        ("two", ["ValueError", "2 optimizers", "for one optimizer"]),
        ("add", ["RuntimeError", "Add the group to the dense optimizer before"]),
        ("load", ["ValueError", "has 1 parameter groups, this optimizer has 1 dense and 1 fused"]),
    ],
)
def test_refused_on_every_rank(two_ranks: Ranks, what: str, parts: list[str]) -> None:
    for message in two_ranks.run(refused, what):
        assert [part for part in parts if part not in message] == [], message


PER_TABLE = Case(
    "rate_per_table",
    (
        *(TableSpec(f"t{number}", (f"f{number}",), dim=8) for number in range(3)),
        TableSpec("u0", ("f1", "f2"), collection="second"),
        TableSpec("wide", ("w",), "column_wise", dim=16),
        TableSpec("rows", ("r",), "row_wise"),
    ),
    optimizer=(torch.optim.SGD, {"lr": 0.5}),
)
"""Tables of one rate, whose kernels are shared without `rate_per_table`."""

SPARSE = ("ebc.rows", "ebc.t0", "ebc.t1", "ebc.t2", "ebc.wide", "second.u0")  # in the order of the groups


class RateOfEachTable(Scheduled):
    """Each table trains in steps of its own, as under a schedule that freezes and unfreezes it."""

    def configure_optimizers(self) -> Any:
        dense = [*self.bottom.parameters(), *self.top.parameters()]
        groups = [{"params": [weight_of(self, path)], "name": path} for path in SPARSE if self.unsharded]
        optimizer: Any = torch.optim.SGD([{"params": dense}, *groups], 0.5)
        if not self.unsharded:
            optimizer = combined_optimizer(self, optimizer)
        self.names = [group.get("name") for group in optimizer.param_groups]
        rates = [lambda step: 1.0, *(partial(_rate_of_table, number) for number in range(len(SPARSE)))]
        return [optimizer], [{"scheduler": lr_scheduler.LambdaLR(optimizer, rates), "interval": "step"}]

    unsharded = False


def weight_of(module: Any, path: str) -> Tensor:
    collection, table = path.split(".")
    weight: Tensor = getattr(module, collection).embedding_bags[table].weight
    return weight


def _rate_of_table(number: int, step: int) -> float:
    return (0.0, 1.0, 0.25)[(number + step // 2) % 3]


def train_each_table(pipeline: str, options: dict[str, Any]) -> tuple[list[Any], dict[str, Tensor], list[int]]:
    """Return the names of the groups, the tables at the end, and the numbers of tables in the kernels."""
    model = RateOfEachTable(PER_TABLE)
    own = make_strategy(model, pipeline).sharding  # a plan
    strategy = OverlapEmbeddingStrategy(pipeline, **{"sharding": own, **options}, rate_per_table=True)
    make_trainer(strategy).fit(model, datamodule=Batches(PER_TABLE, 9))
    found = {path: strategy.table(path) for path in SPARSE}
    # A kernel may have several shards of columns.
    kernels = [len({shard.name for shard in one.shards}) for one in kernel_shards(model) if one.is_fused]
    return model.names, found, kernels


def train_each_table_unsharded(num_ranks: int) -> dict[str, Tensor]:
    """The same in one process without this package, with the mean of the gradients of all ranks' batches."""
    model: Any = RateOfEachTable(PER_TABLE, fused_optimizer=False)
    model.unsharded = True
    [optimizer], [scheduled] = model.configure_optimizers()
    for index in range(9):
        optimizer.zero_grad()
        for rank in range(num_ranks):
            (model.training_step(make_batch(PER_TABLE, index, rank), index) / num_ranks).backward()
        optimizer.step()
        scheduled["scheduler"].step()
    return {path: weight_of(model, path).detach() for path in SPARSE}


@pytest.mark.parametrize(
    ("pipeline", "options"),
    [
        ("fused_sparse_dist", {}),
        ("split_backward", {"replicate_tables": ["t0", "t1"], "sharding": {"t2": "row_wise"}}),
        ("base", {"sharding": "row_wise"}),
    ],
    ids=["fused_sparse_dist", "split_backward_replicas", "base_row_wise"],
)
def test_a_rate_for_each_table_trains_as_groups_of_the_unsharded_module(
    ranks: Ranks, pipeline: str, options: dict[str, Any]
) -> None:
    each = ranks.run(train_each_table, pipeline, options)
    expected = train_each_table_unsharded(ranks.world_size)
    for names, found, kernels in each:
        assert names == [None, *(f"fused_{path}" for path in SPARSE)]
        assert set(kernels) <= {1}
        for path, rows in found.items():
            torch.testing.assert_close(rows, expected[path], rtol=1e-5, atol=1e-6)
    start = Model(PER_TABLE)
    assert all(not torch.equal(rows, weight_of(start, path)) for path, rows in expected.items())


def test_tables_of_one_rate_share_a_group_unless_asked(get_ranks: Callable[..., Ranks]) -> None:
    [(shared, alone)] = get_ranks(1).run(groups_with_and_without)
    assert (shared, alone) == (["fused"], [f"fused_{path}" for path in SPARSE])


def groups_with_and_without() -> tuple[list[str], list[str]]:
    found = []
    for rate_per_table in (False, True):
        model = Unscheduled(PER_TABLE)
        trainer = make_trainer(make_strategy(model, rate_per_table=rate_per_table))
        trainer.fit(model, datamodule=Batches(PER_TABLE, 1))
        found.append([group["name"] for group in trainer.optimizers[0].fused_groups])
    return found[0], found[1]
