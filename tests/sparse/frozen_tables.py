"""Fits with frozen tables, and a plain loop that looks them up without gradients. Functions that ranks run."""

from collections.abc import Mapping, Sequence
from dataclasses import replace
from typing import Any, NamedTuple
from unittest import mock

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor, PoolingType
from torchrec.distributed.embedding_lookup import GroupedPooledEmbeddingsLookup
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.compat.torchrec import kernels_in, lookups_of
from lightning_overlap.sparse import discovery
from lightning_overlap.sparse.backward_fill import BackwardFill
from lightning_overlap.tables import table_modules

from ..support import reference
from ..support.cases import Batch, Batches, Case, Model, make_batch, make_plan
from ..support.fits import make_trainer
from ..support.reference import Result, collect
from . import caller_fits
from .callers import NUM_STEPS, TrainsWeights
from .update_rates import Rates, Scheduled
from .variants import Variant


class Frozen(Model):
    """The tables of the collection `ebc` are frozen; it notes whether embeddings have a graph, by collection."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, fused_optimizer=False)
        self.ebc.requires_grad_(False)
        self.graphs: dict[str, list[bool]] = {name: [] for name in case.collections}

    def dense(self, batch: Batch, embeddings: Mapping[str, Any]) -> Tensor:
        for name, found in embeddings.items():
            parts = [one.values() for one in found.values()] if self.case.sequence else [found.values()]
            self.graphs[name].append(any(part.requires_grad for part in parts))
        return super().dense(batch, embeddings)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        cls, kwargs = self.case.dense
        own = in_backward_optimizer_filter(self.named_parameters())
        return cls([part for _, part in own if part.requires_grad], **kwargs)


class WithoutGradients(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        with torch.set_grad_enabled(collection != "ebc"):
            return super().embeddings(collection, batch)


class TrainsWeightsOfFrozen(TrainsWeights, Frozen):
    """The weights of the ids are trained, which are sent nowhere on one rank."""


class Fitted(NamedTuple):
    result: Result
    early: int  # lookups whose early embeddings were used
    graphs: dict[str, list[bool]]  # by collection, in every step
    gradients: list[bool]  # whether a weight of the frozen tables' kernels has a gradient


def fit(case: Case, pipeline: str) -> Fitted:
    """Train with frozen tables under the strategy."""
    module = Frozen(case)
    options = {"fused_optimizer": case.optimizer} if len(case.collections) > 1 else {}
    plan = make_plan(case, module, dist.get_world_size())
    found = caller_fits.fit(module, plan, Variant(case, "", NUM_STEPS), pipeline, options, limit_val_batches=0)
    lookups = lookups_of(table_modules(module)["ebc"])
    kernels = [kernel for lookup in lookups for _, kernel in kernels_in(lookup)]
    gradients = [weight.grad is not None for kernel in kernels for weight in kernel.parameters()]
    return Fitted(found.result, found.early, module.graphs, gradients)


def by_hand(case: Case) -> Result:
    """Train in a plain loop of DistributedModelParallel that looks up `ebc` without gradients."""
    module, rank = WithoutGradients(case), dist.get_rank()
    plan = make_plan(case, module, dist.get_world_size())
    return caller_fits.loop(module, plan, lambda index: make_batch(case, index, rank), NUM_STEPS)


def trained_weights(case: Case, pipeline: str) -> tuple[float, dict[str, list[bool]]]:
    """Train weights of ids of frozen tables on one rank; return the trained scale, and whether there were graphs."""
    module = TrainsWeightsOfFrozen(case)
    plan = make_plan(case, module, dist.get_world_size())
    caller_fits.fit(module, plan, Variant(case, "", NUM_STEPS), pipeline, limit_val_batches=0)
    return module.scale.item(), module.graphs


class VaryingSizes(LightningModule):
    """Frozen tables, whose features have batches of different sizes (VBE)."""

    def __init__(self) -> None:
        super().__init__()
        kinds = (PoolingType.SUM, PoolingType.MEAN, PoolingType.SUM)
        tables = [
            EmbeddingBagConfig(name=f"t{at}", num_embeddings=9, embedding_dim=4, feature_names=[f"f{at}"], pooling=kind)
            for at, kind in enumerate(kinds)
        ]
        self.ebc = EmbeddingBagCollection(tables).requires_grad_(False)
        self.linear = nn.Linear(12, 1)
        self.graphs: list[bool] = []

    def training_step(self, batch: KeyedJaggedTensor) -> Tensor:
        embeddings = self.ebc(batch).values()
        self.graphs.append(embeddings.requires_grad)
        return self.linear(embeddings).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.linear.parameters(), lr=0.1)

    def train_dataloader(self) -> Any:
        sizes = [2, 3, 4]
        inverse = torch.stack([torch.arange(4) % size for size in sizes])
        batch = KeyedJaggedTensor(
            ["f0", "f1", "f2"],
            torch.arange(9),
            lengths=torch.ones(9, dtype=torch.int64),
            stride_per_key_per_rank=[[size] for size in sizes],
            inverse_indices=(["f0", "f1", "f2"], inverse),
        )
        return DataLoader([batch] * NUM_STEPS, batch_size=None)  # type: ignore[arg-type]


def fit_varying_sizes(pipeline: str) -> list[bool]:
    """Train with two frozen kernels on rank 0 and one on rank 1; return whether embeddings had a graph, by step.

    Several kernels write one `vbe_output` on CUDA. FBGEMM's kernels for a CPU take none, and ignore it here.
    """
    on_cpu, module = SplitTableBatchedEmbeddingBagsCodegen.forward, VaryingSizes()

    def forward(self: Any, *args: Any, vbe_output: Any = None, vbe_output_offsets: Any = None, **kwargs: Any) -> Tensor:
        return on_cpu(self, *args, **kwargs)

    def of_several(self: Any, inputs: Any, device: torch.device) -> Tensor:
        given = {"vbe_output": torch.empty(0), "vbe_output_offsets": torch.empty(0)}
        found = [kernel(features, **given) for kernel, features in zip(self._emb_modules, inputs, strict=True)]
        return self._merge_variable_batch_embeddings(found, self._vbe_splits(inputs))

    with (
        mock.patch.object(SplitTableBatchedEmbeddingBagsCodegen, "forward", forward),
        mock.patch.object(GroupedPooledEmbeddingsLookup, "_forward_with_vbe_merging", of_several),
        mock.patch.object(discovery, "why_not_varying_sizes", return_value=None),  # they are refused on a CPU
    ):
        places = {
            name: table_wise(rank=rank, compute_kernel="fused") for name, rank in (("t0", 0), ("t1", 0), ("t2", 1))
        }
        size, sharder = dist.get_world_size(), EmbeddingBagCollectionSharder()
        plan = construct_module_sharding_plan(module.ebc, places, sharder, size, size, "cpu")
        strategy = OverlapEmbeddingStrategy(pipeline, sharding=ShardingPlan({"ebc": plan}))
        make_trainer(strategy).fit(module)
    return module.graphs


# -- frozen tables beside trained ones ---------------------------------------------------------------------------------


class Beside(Scheduled):
    """Some tables are frozen; it notes of each lookup which parts of its embeddings have a graph."""

    def __init__(self, case: Case, frozen: Sequence[str], rates: Rates) -> None:
        super().__init__(case, fused_optimizer=False)
        for name in frozen:
            table_of(self, name).requires_grad_(False)
        self.frozen, self.factor = frozen, rates
        self.wrong: set[str] = set()

    def make_dense_optimizer(self) -> torch.optim.Optimizer:
        self._watch()
        cls, kwargs = self.case.dense
        own = in_backward_optimizer_filter(self.named_parameters())
        return cls([weight for _, weight in own if weight.requires_grad], **kwargs)

    def _watch(self) -> None:
        for module in table_modules(self).values():
            plan = module.module_sharding_plan
            trained = {how.sharding_type for name, how in plan.items() if name not in self.frozen}
            for kind, lookup in zip(module._sharding_types, lookups_of(module), strict=True):
                if isinstance(lookup, DistributedDataParallel):
                    assert kind in trained
                    continue
                self._expect(lookup, kind, kind in trained)
                for tables, kernel in kernels_in(lookup):
                    names = [table.name for table in tables]
                    self._expect(kernel, f"{kind}: {names}", not set(names) <= set(self.frozen))

    def _expect(self, part: nn.Module, name: str, has_graph: bool) -> None:
        def look(_: nn.Module, args: Any, embeddings: Tensor) -> None:
            if embeddings.requires_grad is not has_graph:
                self.wrong.add(f"{name} has {'no ' if has_graph else 'a '}graph")

        part.register_forward_hook(look)


def table_of(model: Model, name: str) -> nn.Parameter:
    [weight] = [weight for key, weight in model.named_parameters() if key.split(".")[-2:] == [name, "weight"]]
    return weight


def without(frozen: Sequence[str], result: Result) -> Result:
    """Leave frozen tables out of a result: the reference has them elsewhere, and with optimizer states."""
    kept = {
        part: {key: value for key, value in getattr(result, part).items() if key.split(" ")[0] not in frozen}
        for part in ("tables", "fused_state", "dense_state")
    }
    return replace(result, **kept)


def fit_beside(case: Case, frozen: Sequence[str], pipeline: str, factors: list[float]) -> tuple[Result, list[str]]:
    """Train with frozen tables beside trained ones; return the rest of the result, and what is wrong."""
    model = Beside(case, frozen, Rates(factors))
    before = {name: table_of(model, name).detach().clone() for name in frozen}
    trained = [table for table in case.tables if table.name not in frozen and table.sharding != "data_parallel"]
    plan = make_plan(case, Model(case), dist.get_world_size())  # with fused kernels, as tables have optimizers there
    optimizer = case.optimizer if trained else None
    trainer = make_trainer(OverlapEmbeddingStrategy(pipeline, sharding=plan, fused_optimizer=optimizer))
    trainer.fit(model, datamodule=Batches(case, NUM_STEPS))
    return without(frozen, collect(model, trainer.optimizers[0], model.losses)), [*model.wrong, *moved(model, before)]


def fills(case: Case, frozen: Sequence[str], pipeline: str) -> list[bool]:
    """Train; return of each backward whether rows of the schedule run while it waits."""
    register, found = BackwardFill.register, []

    def note(self: BackwardFill, *args: Any) -> bool:
        found.append(register(self, *args))
        return found[-1]

    with mock.patch.object(BackwardFill, "register", note):
        fit_beside(case, frozen, pipeline, [1.0])
    return found


def moved(model: Model, before: Mapping[str, Tensor]) -> list[str]:
    """Return the shards of frozen tables that have changed by a bit."""
    found = []
    for key, value in model.state_dict().items():
        if (whole := before.get(key.split(".")[-2])) is None:
            continue
        if not hasattr(value, "local_shards"):
            parts = [(value, whole)]
        else:
            shards = [
                (one.tensor, *one.metadata.shard_offsets, *one.metadata.shard_sizes) for one in value.local_shards()
            ]
            parts = [(tensor, whole[row : row + rows, at : at + num]) for tensor, row, at, rows, num in shards]
        found += [f"{key} has moved" for now, then in parts if now.view(torch.int32).ne(then.view(torch.int32)).any()]
    return found


def by_hand_beside(case: Case, frozen: Sequence[str], staleness: int, factors: list[float]) -> Result:
    """Train in a plain loop that updates frozen tables, too, at a rate of 0; none is data-parallel there."""
    at_zero = [
        replace(table, lr=0.0, sharding="column_wise" if table.sharding == "data_parallel" else table.sharding)
        if table.name in frozen
        else table
        for table in case.tables
    ]
    seen = reference.Delayed(staleness) if staleness else None
    other = replace(case, tables=tuple(at_zero))
    return without(frozen, reference.train_delayed(other, seen, num_steps=NUM_STEPS, factor=Rates(factors)))
