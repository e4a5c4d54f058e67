"""Fits that show what the strategy sets up, and what it refuses. Functions that ranks run."""

import functools
import time
import warnings
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.plugins import MixedPrecision
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig
from torchrec.distributed.planner import EmbeddingShardingPlanner, Topology
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardedModule, ShardingPlan
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.distributed import default_store, groups
from lightning_overlap.tables.supported_modules import sharded_modules

from ..support import cases
from ..support.cases import MIXED, TABLE_WISE, Batches, Model, make_plan
from ..support.fits import make_trainer
from ..support.reference import Result, collect

SGD = (torch.optim.SGD, {"lr": 2.0})


class OwnsEverything(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.parameters())


class ForgetsDataParallel(Model):
    """Leaves every table to somebody else."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.bottom.parameters(), *self.top.parameters()], 0.1)


class MadeBefore(Model):
    def __init__(self, device: str) -> None:
        super().__init__(TABLE_WISE, fused_optimizer=False)
        self.to(device)
        self.made = torch.optim.AdamW(self.parameters())

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return self.made


class SharesItsWeight(Model):
    """Multiplies with a table's weight, as an output layer for the next item does."""

    def __init__(self) -> None:
        super().__init__(TABLE_WISE)
        self.output = nn.Linear(8, 120, bias=False)
        self.output.weight = self.ebc.embedding_bags["t0"].weight


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


def shapes(sharding: Any, on_meta: bool = False) -> dict[str, Any]:
    """Shard; return the sharding type of each table, and the shapes of this rank's shards."""
    model = Model(TABLE_WISE, fused_optimizer=False, device="meta" if on_meta else "cpu")
    if sharding == "planner":
        sharding = EmbeddingShardingPlanner(Topology(world_size=dist.get_world_size(), compute_device="cpu"))
    fit_model(model, sharding=sharding, fused_optimizer=functools.partial(torch.optim.SGD, lr=1.0))
    [module] = sharded_modules(model).values()
    local = {
        name.split(".")[-2]: [tuple(shard.tensor.shape) for shard in value.local_shards()]
        for name, value in module.state_dict().items()
        if hasattr(value, "local_shards")
    }
    types = {name: parameter.sharding_type for name, parameter in module.module_sharding_plan.items()}
    assert not any(parameter.is_meta for parameter in model.parameters())
    return {"types": types, "local": local, "losses": torch.stack(model.losses)}


def what_it_wraps(**options: Any) -> dict[str, Any]:
    """Look at the module while it trains, and after."""
    seen: dict[str, Any] = {}

    class Looks(Model):
        def on_train_start(self) -> None:
            wrapped = self.trainer.strategy.model
            seen["ddp"] = isinstance(wrapped, DistributedDataParallel)
            if seen["ddp"]:
                ignored = wrapped.parameters_to_ignore
                seen["reduced"] = sorted(name for name, _ in wrapped.module.named_parameters() if name not in ignored)
                seen["gradients"] = wrapped.process_group.group_desc
            [sharded] = sharded_modules(self).values()
            seen["group"] = sharded._env.process_group.group_desc
            seen["stand_in"] = "forward" in vars(self.ebc)
            seen["loop"] = type(self.trainer.fit_loop).__mro__[1].__name__

    model = Looks(TABLE_WISE)
    trainer = fit_model(model, **options)
    seen["after"] = ("forward" in vars(model.ebc), type(trainer.fit_loop).__name__, len(type(trainer.fit_loop).__mro__))
    seen["fresh"] = len(type(make_trainer(OverlapEmbeddingStrategy()).fit_loop).__mro__)
    seen["sharded"] = isinstance(model.ebc, ShardedModule)
    return seen


def fit_twice_and_evaluate() -> tuple[Tensor, Tensor, Tensor]:
    """Two fits of one module by two trainers, then a plain call: (losses, losses, embeddings of the first batch)."""
    model = Model(TABLE_WISE)
    first = fit_model(model, num_steps=6, sharding="table_wise")
    first_losses = torch.stack(model.losses)
    model.losses.clear()
    first.fit_loop.max_epochs = 2
    first.fit(model, datamodule=Batches(model.case, 6))
    second_losses = torch.stack(model.losses)
    with torch.no_grad():
        embeddings = model.embeddings("ebc", cases.make_batch(TABLE_WISE, 0, dist.get_rank()))
        values = torch.cat([torch.clone(embeddings[f"f{i}"]) for i in range(3)], dim=1)
    return first_losses, second_losses, values


def _with_sequences() -> Model:
    model = Model(TABLE_WISE, fused_optimizer=False)
    model.ec = EmbeddingCollection(tables=[EmbeddingConfig(100, 8, name="s0", feature_names=["f0"])])
    return model


def _fit_tables_by(optimizer: Any, model: Model | None = None, **kwargs: Any) -> None:
    model = model or Model(TABLE_WISE, fused_optimizer=False)
    fit_model(model, fused_optimizer=(optimizer, {"lr": 1.0, **kwargs}))


REFUSED: dict[str, Any] = {
    "unknown_table": lambda: fit_model(sharding={"t9": "table_wise"}),
    "impossible_type": lambda: fit_model(sharding={"t0": "grid_shard"}),
    "unknown_type": lambda: fit_model(sharding="table_wize"),
    "sharding_of_wrong_type": lambda: fit_model(sharding=3),
    "no_fused_optimizer": lambda: fit_model(Model(cases.TWO_COLLECTIONS, fused_optimizer=False), sharding="table_wise"),
    "no_fused_optimizer_planned": lambda: fit_model(Model(TABLE_WISE, fused_optimizer=False)),
    "no_fused_optimizer_by_name": lambda: fit_model(
        Model(TABLE_WISE, fused_optimizer=False), sharding={"t0": "data_parallel"}
    ),
    "adam_on_cpu": lambda: _fit_tables_by(torch.optim.Adam),
    "momentum": lambda: _fit_tables_by(torch.optim.SGD, momentum=0.9),
    "lr_decay": lambda: _fit_tables_by(torch.optim.Adagrad, lr_decay=0.1),
    "weight_decay": lambda: _fit_tables_by(RowWiseAdagrad, weight_decay=0.1),
    "owns_fused_tables": lambda: fit_model(OwnsEverything(TABLE_WISE), sharding="table_wise"),
    "owns_sequences": lambda: fit_model(OwnsEverything(cases.SEQUENCE), sharding="table_wise"),
    "nobody_trains_a_table": lambda: fit_model(ForgetsDataParallel(TABLE_WISE), sharding="data_parallel"),
    "made_before": lambda: fit_model(MadeBefore("cpu"), sharding="data_parallel"),
    "made_on_meta": lambda: fit_model(MadeBefore("meta"), sharding="table_wise", fused_optimizer=SGD),
    "16-mixed": lambda: fit_model(trainer_kwargs={"plugins": [MixedPrecision("16-mixed", "cpu")]}),
    "shares_a_weight": lambda: fit_model(SharesItsWeight(), sharding="table_wise"),
    "clips_shards_by_norm": lambda: fit_dense_shards({"gradient_clip_val": 1.0}),
    "sequences_as_bags": lambda: fit_model(Model(cases.SEQUENCE, fused_optimizer=False), sharding="data_parallel"),
    "sequences_as_bags_beside_bags": lambda: fit_model(_with_sequences(), sharding="data_parallel"),
    "momentum_of_sequences": lambda: _fit_tables_by(torch.optim.SGD, _with_sequences(), momentum=0.9),
    "accumulates_static_graph": lambda: fit_model(static_graph=True, trainer_kwargs={"accumulate_grad_batches": 2}),
    "planner_fails": lambda: fit_model(sharding=_Fails()),
}


def fit_dense_shards(trainer_kwargs: dict[str, Any], cls: type[Model] = Model) -> Model:
    """Train tables whose shards are those of each rank's dense optimizer; return the model."""
    model = cls(TABLE_WISE, fused_optimizer=False)
    places = {name: table_wise(rank=rank, compute_kernel="dense") for name, rank in (("t0", 0), ("t1", 1), ("t2", 0))}
    plan = construct_module_sharding_plan(model.ebc, places, local_size=2, world_size=2, device_type="cpu")
    fit_model(model, trainer_kwargs=trainer_kwargs, sharding=ShardingPlan({"ebc": plan}))
    return model


def train_without_a_gradient() -> str:
    sharding = {table.name: table.sharding for table in cases.UNUSED.tables}
    with pytest.raises(RuntimeError) as caught:
        fit_model(Model(cases.UNUSED), sharding=sharding)
    return str(caught.value)


def clip_values_of_dense_shards() -> Tensor:
    """Return what clipping by value leaves of the dense weights."""
    model = fit_dense_shards({"gradient_clip_val": 0.01, "gradient_clip_algorithm": "value"})
    return model.top[0].weight.detach().clone()


class TwoClasses(Model):
    """Trains one table with SGD, the others with RowWiseAdagrad, by arguments in one dict or in one for each."""

    def __init__(self, arguments: list[dict[str, Any]]) -> None:
        super().__init__(TABLE_WISE, fused_optimizer=False)
        classes = [torch.optim.SGD, RowWiseAdagrad, RowWiseAdagrad]
        for cls, own, weight in zip(classes, arguments, self.ebc.parameters(), strict=True):
            _apply_optimizer_in_backward(cls, [weight], own)


def train_two_classes(*, shared: bool) -> tuple[Result, dict[str, Any]]:
    """Return the end, and the arguments as they are then."""
    arguments = [{"lr": 1.0}] * 3 if shared else [{"lr": 1.0} for _ in range(3)]
    model = TwoClasses(arguments)
    trainer = fit_model(model, sharding=make_plan(TABLE_WISE, model, dist.get_world_size()))
    return collect(model, trainer.optimizers[0], model.losses), arguments[0]


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


def other_options() -> list[list[str]]:
    """Return what fits of one module warn of, under strategies that ask for what it is, and for something else."""
    model = Model(TABLE_WISE, fused_optimizer=False)
    said = []
    for rate, sharding in ((2.0, "table_wise"), (2.0, "table_wise"), (0.1, "column_wise")):
        with warnings.catch_warnings(record=True, action="always") as caught:
            fit_model(model, sharding=sharding, fused_optimizer=(torch.optim.SGD, {"lr": rate}))
        said.append([str(one.message) for one in caught if "no effect" in str(one.message)])
    return said


class _Fails:
    def plan(self, module: Any, sharders: Any) -> Any:
        raise KeyError("these tables do not fit anywhere")


def refuse(name: str) -> str:
    """Return the message of a fit that has to fail before training starts."""
    steps: list[Any] = []
    counted = mock.patch.object(Model, "training_step", lambda self, *args: steps.append(args))
    with counted, pytest.raises((ValueError, TypeError)) as caught:
        REFUSED[name]()
    assert not steps
    return f"{caught.type.__name__}: {caught.value}"


def warnings_of(trainer_kwargs: dict[str, Any], case: Any = TABLE_WISE) -> list[str]:
    """Return what a fit warns of, ours only."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        fit_model(Model(case), trainer_kwargs=trainer_kwargs, sharding="table_wise")
    return [str(w.message) for w in caught if "fused" in str(w.message) or "in backward" in str(w.message)]


def frozen_table() -> bool:
    """A table without gradient stays as it is, the others move."""
    model = Model(TABLE_WISE, fused_optimizer=False)
    weight = model.ebc.embedding_bags["t1"].weight.requires_grad_(False)
    before = {name: bag.weight.detach().clone() for name, bag in model.ebc.embedding_bags.items()}
    fit_model(model, sharding="table_wise", fused_optimizer=SGD)
    assert weight.requires_grad is False
    shards = {
        name.split(".")[-2]: shard.tensor
        for name, value in model.ebc.state_dict().items()
        for shard in value.local_shards()
    }
    return all(torch.equal(shard, before[name]) == (name == "t1") for name, shard in shards.items())


def data_parallel_tables(pipeline: str) -> dict[str, Tensor]:
    """Start from weights that differ between ranks, as without a common seed; return the data-parallel ones."""
    model = Model(MIXED)
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.add_(0.1 * dist.get_rank())
    fit_model(model, pipeline=pipeline, sharding=make_plan(MIXED, model, dist.get_world_size()))
    return {name: p.detach().clone() for name, p in model.ebc.named_parameters() if name.split(".")[-2].startswith("d")}


class TwoNames(Model):
    def __init__(self) -> None:
        super().__init__(TABLE_WISE)
        self.again = self.ebc

    def embeddings(self, collection: str, batch: Any) -> Any:
        return self.again(batch.inputs["sparse"][0])


def two_names() -> bool:
    model = TwoNames()
    fit_model(model, sharding="table_wise")
    return model.again is model.ebc and isinstance(model.ebc, ShardedModule)


def rowwise_adagrad_given_to_the_strategy() -> bool:
    """The fused optimizer argument reaches the kernel, and the module's own choice beats it."""
    given = Model(TABLE_WISE, fused_optimizer=False)
    fit_model(given, sharding="table_wise", fused_optimizer=(RowWiseAdagrad, {"lr": 1.0}))
    own = Model(TABLE_WISE)
    fit_model(own, sharding="table_wise", fused_optimizer=(RowWiseAdagrad, {"lr": 1.0}))
    states = [bool(any(s for s in m.ebc.fused_optimizer.state_dict()["state"].values())) for m in (given, own)]
    filtered = [name for name, _ in in_backward_optimizer_filter(given.named_parameters()) if "ebc" in name]
    return states == [True, False] and filtered == []


def refused_while_rank_0_is_late() -> str:
    """After a good fit, one that all ranks refuse; rank 0 joins the groups once the other has failed, if that does."""
    fit_model(sharding="table_wise")
    join, store = groups.join, default_store()
    assert store is not None
    before = store.add(groups._FAILURES, 0)

    def late(*args: Any, **kwargs: Any) -> groups.Groups:
        deadline = time.monotonic() + 1
        while dist.get_rank() == 0 and store.add(groups._FAILURES, 0) == before and time.monotonic() < deadline:
            time.sleep(0.01)
        return join(*args, **kwargs)

    with mock.patch.object(groups, "join", late), pytest.raises(ValueError, match="unknown table") as caught:
        fit_model(sharding={"t9": "table_wise"})
    return str(caught.value)
