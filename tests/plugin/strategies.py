"""Fits that show what the strategy sets up, and what it refuses. Functions that ranks run."""

import functools
import logging
import re
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.types import ShardedModule, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.distributed import default_store, groups
from lightning_overlap.distributed.stores import FAILED
from lightning_overlap.plugin.first_words import LOGGER

from ..support import cases
from ..support.cases import MIXED, TABLE_WISE, Batches, Case, Model, make_plan
from ..support.fits import make_trainer
from ..support.modules import plan_of, whole_dense
from ..support.reference import Result, collect

SGD = (torch.optim.SGD, {"lr": 2.0})


def untrained(case: cases.Case = TABLE_WISE) -> Model:
    return Model(case, fused_optimizer=False)


class OwnsEverything(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


def trained_by(model: Model, made: torch.optim.Optimizer) -> Model:
    model.configure_optimizers = lambda: made  # type: ignore[method-assign]
    return model


def trained_partly() -> Model:
    model = Model(TABLE_WISE)
    return trained_by(model, torch.optim.SGD([*model.bottom.parameters(), *model.top.parameters()], 0.1))


def trained_by_an_early_optimizer(device: str) -> Model:
    model = untrained().to(device)
    return trained_by(model, torch.optim.AdamW(model.parameters()))


def with_shared_weight() -> Model:
    """Multiply with a table's weight, as an output layer for the next item does."""
    model = Model(TABLE_WISE)
    model.output = nn.Linear(8, 120, bias=False)
    model.output.weight = model.ebc.embedding_bags["t0"].weight
    return model


def with_sequences() -> Model:
    model = untrained()
    model.ec = EmbeddingCollection(tables=[EmbeddingConfig(100, 8, name="s0", feature_names=["f0"])])
    return model


class Dense(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        torch.manual_seed(3)
        self.layer = nn.Linear(6, 1)
        self.losses: list[Tensor] = []

    def training_step(self, batch: Tensor, batch_idx: int) -> Tensor:
        loss = self.layer(batch).square().mean()
        self.losses.append(loss.detach())
        return loss

    def train_dataloader(self) -> DataLoader:
        generator = torch.Generator().manual_seed(self.global_rank)
        return DataLoader(torch.randn(40, 6, generator=generator), batch_size=4, shuffle=False)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.parameters(), 0.1)


def dense_losses(overlap: bool) -> Tensor:
    model = Dense()
    make_trainer(OverlapEmbeddingStrategy() if overlap else DDPStrategy()).fit(model)
    return torch.stack(model.losses)


def fit_model(
    model: Model | None = None, *, num_steps: int = 4, trainer_kwargs: dict[str, Any] | None = None, **kwargs: Any
) -> Trainer:
    trainer = make_trainer(OverlapEmbeddingStrategy(**kwargs), **(trainer_kwargs or {}))
    model = model or Model(TABLE_WISE)
    trainer.fit(model, datamodule=Batches(model.case, num_steps))
    return trainer


def sharding_types(sharding: Any) -> dict[str, str]:
    model = untrained()
    if sharding == "planner":
        sharding = EmbeddingShardingPlanner(Topology(world_size=dist.get_world_size(), compute_device="cpu"))
    fit_model(model, sharding=sharding, fused_optimizer=functools.partial(torch.optim.SGD, lr=1.0))
    return {name: parameter.sharding_type for name, parameter in model.ebc.module_sharding_plan.items()}


def what_it_wraps(**options: Any) -> dict[str, Any]:
    seen: dict[str, Any] = {}

    class Looks(Model):
        def on_train_start(self) -> None:
            wrapped = self.trainer.strategy.model
            if isinstance(wrapped, DistributedDataParallel):
                ignored = wrapped.parameters_to_ignore
                seen["reduced"] = sorted(name for name, _ in wrapped.module.named_parameters() if name not in ignored)
                seen["gradients"] = wrapped.process_group.group_desc
            seen["tables"] = self.ebc._env.process_group.group_desc

    fit_model(Looks(TABLE_WISE), **options)
    return seen


def _fit_tables_by(optimizer: Any, model: Model | None = None, **kwargs: Any) -> None:
    fit_model(model or untrained(), fused_optimizer=(optimizer, {"lr": 1.0, **kwargs}))


class ClipsByHand(cases.ByHand, Model):
    num_clipped = 0

    def configure_optimizers(self) -> Any:
        return [torch.optim.SGD(part.parameters(), 0.2) for part in (nn.ModuleList([self.bottom, self.top]), self.ebc)]

    def training_step(self, batch: Any, batch_idx: int) -> None:
        self.manual_backward(super().training_step(batch, batch_idx))
        for optimizer in self.optimizers():
            self.clip_gradients(optimizer, gradient_clip_val=0.01)
            ClipsByHand.num_clipped += 1


def clip_by_hand() -> tuple[str, int]:
    """Return the error of clipping shards by hand, and how often gradients were clipped before."""
    ClipsByHand.num_clipped = 0
    with pytest.raises(ValueError, match="norm") as error:
        fit_dense_shards({}, ClipsByHand)
    return str(error.value), ClipsByHand.num_clipped


FAILING_PLANNER = mock.Mock(["plan"], **{"plan.side_effect": KeyError("these tables do not fit anywhere")})
REFUSED: dict[str, Callable[[], Any]] = {
    "unknown_table": lambda: fit_model(sharding={"t9": "table_wise"}),
    "impossible_type": lambda: fit_model(sharding={"t0": "grid_shard"}),
    "planner_fails": lambda: fit_model(sharding=FAILING_PLANNER),
    "no_fused_optimizer": lambda: fit_model(untrained(cases.TWO_COLLECTIONS), sharding="table_wise"),
    "no_fused_optimizer_by_name": lambda: fit_model(untrained(), sharding={"t0": "data_parallel"}),
    "adam_on_cpu": lambda: _fit_tables_by(torch.optim.Adam),
    "momentum": lambda: _fit_tables_by(torch.optim.SGD, with_sequences(), momentum=0.9),
    "weight_decay": lambda: _fit_tables_by(RowWiseAdagrad, weight_decay=0.1),
    "sequences_as_bags": lambda: fit_model(with_sequences(), sharding="data_parallel"),
    "owns_fused_tables": lambda: fit_model(OwnsEverything(TABLE_WISE), sharding="table_wise"),
    "owns_sequences": lambda: fit_model(OwnsEverything(cases.SEQUENCE), sharding="table_wise"),
    "nobody_trains_a_table": lambda: fit_model(trained_partly(), sharding="data_parallel"),
    "made_before": lambda: fit_model(trained_by_an_early_optimizer("cpu"), sharding="data_parallel"),
    "made_on_meta": lambda: fit_model(trained_by_an_early_optimizer("meta"), fused_optimizer=SGD),
    "16-mixed": lambda: fit_model(trainer_kwargs={"plugins": [MixedPrecision("16-mixed", "cpu")]}),
    "shares_a_weight": lambda: fit_model(with_shared_weight(), sharding="table_wise"),
    "clips_shards_by_norm": lambda: fit_dense_shards({"gradient_clip_val": 1.0}),
    "accumulates_static_graph": lambda: fit_model(static_graph=True, trainer_kwargs={"accumulate_grad_batches": 2}),
}
REFUSED_IN_A_STEP: dict[str, Callable[[], Any]] = {
    "unused": lambda: fit_model(Model(cases.UNUSED), sharding={one.name: one.sharding for one in cases.UNUSED.tables}),
}


def refuse(name: str) -> str:
    """Return the message of a fit that has to fail, before training starts or in a step."""
    steps: list[Any] = []

    def step(self: Model, *args: Any, own: Any = Model.training_step) -> Tensor:
        steps.append(args)
        return own(self, *args)  # type: ignore[no-any-return]

    counted = mock.patch.object(Model, "training_step", step)
    with counted, pytest.raises((ValueError, TypeError, RuntimeError)) as caught:
        (REFUSED | REFUSED_IN_A_STEP)[name]()
    assert bool(steps) == (name in REFUSED_IN_A_STEP)
    return f"{caught.type.__name__}: {caught.value}"


IN_PLACE: dict[str, Callable[[Tensor], Any]] = {
    "mul_": lambda values: values.mul_(2),
    "row": lambda values: values.__setitem__(0, 0.0),
    "relu": lambda values: nn.functional.relu(values, inplace=True),
    "no_grad": torch.no_grad()(lambda values: values.zero_()),
}


def change_sequences(ways: list[tuple[str, str]]) -> list[str]:
    """Train with steps that change embeddings of sequences in place, each a way and a mode; return the errors."""

    class Changes(Model):
        way: str

        def embeddings(self, collection: str, batch: cases.Batch) -> Any:
            found = super().embeddings(collection, batch)
            IN_PLACE[self.way](found["f0"].values())
            return found

    said = []
    for way, pipeline in ways:
        model = Changes(cases.SEQUENCE)
        model.way = way
        with pytest.raises(RuntimeError) as caught:
            fit_model(model, pipeline=pipeline)
        said.append(str(caught.value))
    return said


class TwoBackwards(cases.ByHand, Model):
    """Two tasks share the embeddings; each has its own layer, optimizer and backward."""

    def __init__(self) -> None:
        super().__init__(TABLE_WISE)
        torch.manual_seed(3)
        self.one, self.other = nn.Linear(8, 1), nn.Linear(8, 1)

    def training_step(self, batch: Any, batch_idx: int) -> None:
        pooled = self.ebc(batch.inputs["sparse"][0])["f0"]
        for task, optimizer in zip((self.one, self.other), self.optimizers(), strict=True):
            optimizer.zero_grad()
            loss = (task(pooled) - 1).square().mean()
            self.manual_backward(loss, retain_graph=task is self.one)
            optimizer.step()
        self.losses.append(loss.detach())

    def configure_optimizers(self) -> list[torch.optim.Optimizer]:
        for layer in (self.bottom, self.top):
            layer.requires_grad_(False)
        return [torch.optim.SGD(task.parameters(), 0.01) for task in (self.one, self.other)]


def two_backwards_as_told() -> tuple[list[Tensor], Tensor]:
    """Train with what the error offers first; return the losses, and the weight that the second backward trains."""
    with pytest.raises(RuntimeError, match="got no gradient") as caught:
        fit_model(TwoBackwards())
    offered = re.search(r"OverlapEmbeddingStrategy\((\w+)=True\)", str(caught.value))
    assert offered is not None
    model = TwoBackwards()
    fit_model(model, num_steps=12, **{offered[1]: True})
    return model.losses, model.other.weight.detach().clone()


def fit_dense_shards(trainer_kwargs: dict[str, Any], cls: type[Model] = Model) -> Model:
    """Train tables whose shards are those of each rank's dense optimizer; return the model."""
    model = cls(TABLE_WISE, fused_optimizer=False)
    plan = ShardingPlan({"ebc": plan_of(model.ebc, {f"t{number}": whole_dense(number) for number in range(3)})})
    fit_model(model, trainer_kwargs=trainer_kwargs, sharding=plan)
    return model


def clip_values_of_dense_shards() -> Tensor:
    model = fit_dense_shards({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})
    return model.top[0].weight.detach().clone()


def train_two_classes(*, shared: bool) -> tuple[Result, dict[str, Any]]:
    """Train one table with SGD, others with RowWiseAdagrad, by one dict or several; return the end, and the dict."""
    arguments = [{"lr": 1.0}] * 3 if shared else [{"lr": 1.0} for _ in range(3)]
    model, classes = untrained(), (torch.optim.SGD, RowWiseAdagrad, RowWiseAdagrad)
    for cls, own, weight in zip(classes, arguments, model.ebc.parameters(), strict=True):
        _apply_optimizer_in_backward(cls, [weight], own)
    trainer = fit_model(model, sharding=make_plan(TABLE_WISE, model, dist.get_world_size()))
    return collect(model, trainer.optimizers[0], model.losses), arguments[0]


def other_options() -> list[list[str]]:
    """Return what fits of one module warn of, under strategies that ask for what it is, and for something else."""
    model, said = untrained(), []
    for rate, sharding in ((2.0, "table_wise"), (2.0, "table_wise"), (0.1, "column_wise")):
        with warnings.catch_warnings(record=True, action="always") as caught:
            fit_model(model, sharding=sharding, fused_optimizer=(torch.optim.SGD, {"lr": rate}))
        said.append([str(one.message) for one in caught if "no effect" in str(one.message)])
    return said


def warnings_of(trainer_kwargs: dict[str, Any], case: Case = TABLE_WISE) -> list[str]:
    """Return what a fit warns of, ours only."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        fit_model(Model(case), trainer_kwargs=trainer_kwargs, sharding="table_wise")
    return [str(w.message) for w in caught if "fused" in str(w.message) or "in backward" in str(w.message)]


def frozen_table(sharding: str) -> list[str]:
    """Return the tables that two fits move, of which `t1` has no gradient though all optimizers know it."""
    model = _TrainsWhatNeedsIt(TABLE_WISE, fused_optimizer=False)
    weight = model.ebc.embedding_bags["t1"].weight.requires_grad_(False)
    before: dict[str, Tensor] = {name.split(".")[-2]: value.clone() for name, value in model.ebc.state_dict().items()}
    for _ in range(2):
        fit_model(model, sharding=sharding, fused_optimizer=None if sharding == "data_parallel" else SGD)
    assert weight.requires_grad is False
    kept = {name.split(".")[-2]: part for name, part in model.ebc.named_parameters()}
    assert [name for name, part in kept.items() if not part.requires_grad] == ["t1"]
    shards = local_shards(model).items()
    return [name for name, (shard, row) in shards if not torch.equal(shard, before[name][row : row + len(shard)])]


class _TrainsWhatNeedsIt(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        own = in_backward_optimizer_filter(self.named_parameters())
        return torch.optim.SGD([part for _, part in own if part.requires_grad], 0.2)


def local_shards(model: Model) -> dict[str, tuple[Tensor, int]]:
    """Return this rank's shard of each table, and its first row."""
    found = {}
    for name, value in model.ebc.state_dict().items():
        shards = value.local_shards() if hasattr(value, "local_shards") else [None]
        for shard in shards:
            row = 0 if shard is None else shard.metadata.shard_offsets[0]
            found[name.split(".")[-2]] = (value if shard is None else shard.tensor, row)
    return found


def changed_between_two_fits(unfreezes: bool, sharding: str) -> str:
    """Return what is said of a table that is given its gradient back after a fit, or loses it."""
    model = _TrainsWhatNeedsIt(TABLE_WISE, fused_optimizer=False)
    model.ebc.embedding_bags["t1"].weight.requires_grad_(not unfreezes)
    fit_model(model, sharding=sharding, fused_optimizer=None if sharding == "data_parallel" else SGD)
    try:
        model.ebc.requires_grad_(unfreezes)
    except RuntimeError as err:
        return str(err)
    return ""


def data_parallel_tables() -> dict[str, Tensor]:
    """Start from weights that differ between ranks, as without a common seed; return the data-parallel ones."""
    model = Model(MIXED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * dist.get_rank())
    fit_model(model, sharding=make_plan(MIXED, model, dist.get_world_size()))
    return {name: p.detach().clone() for name, p in model.ebc.named_parameters() if name.split(".")[-2].startswith("d")}


def whose_optimizer() -> tuple[bool, bool]:
    """Return whether the strategy's optimizer, which has state, trains a module without one, and one with its own."""
    models = untrained(), Model(TABLE_WISE)
    for model in models:
        model.again = model.ebc  # under two names
        fit_model(model, sharding="table_wise", fused_optimizer=(RowWiseAdagrad, {"lr": 1.0}))
        assert isinstance(model.ebc, ShardedModule)
        assert model.again is model.ebc
    given, own = (any(model.ebc.fused_optimizer.state_dict()["state"].values()) for model in models)
    return given, own


class Scheduled(Model):
    """Its scheduler moves the dense rate, and those of the fused tables if told so."""

    combined: bool

    def configure_optimizers(self) -> Any:
        dense = torch.optim.Adam(p for _, p in in_backward_optimizer_filter(self.named_parameters()))
        optimizer = combined_optimizer(self, dense) if self.combined else dense
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1)]


@contextmanager
def logged(*names: str) -> Iterator[list[str]]:
    """Note what these loggers say and do not filter out."""
    seen: list[str] = []
    loggers = [logging.getLogger(name) for name in names]

    def note(logger: logging.Logger, record: logging.LogRecord) -> None:
        if logger in loggers:
            seen.append(record.getMessage())

    with ExitStack() as undo:
        undo.enter_context(mock.patch.object(logging.Logger, "callHandlers", note))
        for logger in loggers:
            undo.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.INFO)
        yield seen


def first_words(combined: bool, **options: Any) -> list[str]:
    """Return what a fit with `MIXED` tables logs and warns of, of the known texts and our own."""
    model = Scheduled(MIXED)
    model.combined, sharding = combined, {table.name: table.sharding for table in MIXED.tables}
    with (
        logged(LOGGER, "torchrec.distributed.planner.types", "torch.fx", "") as seen,
        warnings.catch_warnings(record=True, action="always") as caught,
    ):
        fit_model(model, sharding=sharding, **options)
    return [*seen, *(str(w.message) for w in caught)]


def refused_while_rank_0_is_late() -> str:
    """After a good fit, one that all ranks refuse; rank 0 joins the groups once the other has failed, if that does."""
    fit_model(sharding="table_wise")
    join, store = groups.join, default_store(60)
    assert store is not None
    before = store.add(FAILED, 0)

    def late(*args: Any, **kwargs: Any) -> groups.Groups:
        deadline = time.monotonic() + 1
        while dist.get_rank() == 0 and store.add(FAILED, 0) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        return join(*args, **kwargs)

    with mock.patch.object(groups, "join", late):
        return refuse("impossible_type")


def fit_on_a_device_without_kernels() -> str:
    """Return the error of a fit on the GPU of a Mac, which Lightning chooses there for accelerator="auto"."""
    mac = mock.patch.object(OverlapEmbeddingStrategy, "root_device", torch.device("mps"))
    with mac, mock.patch.object(CPUAccelerator, "setup_device"):
        model = Model(TABLE_WISE)
        try:
            make_trainer(OverlapEmbeddingStrategy()).fit(model, datamodule=Batches(TABLE_WISE, 2))
        except ValueError as err:
            return str(err)
    return ""
