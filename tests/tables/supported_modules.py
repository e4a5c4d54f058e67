"""Models with one kind of TorchRec module each, and plain loops over them. Functions that ranks run."""

from __future__ import annotations

import warnings
from collections.abc import Callable, Iterator, Mapping
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist
from fbgemm_gpu.split_table_batched_embeddings_ops_common import PoolingMode
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingCollection, KeyedJaggedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import get_default_sharders
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.tables import sharding

from ..sparse.update_rates import factor
from ..support import cases
from ..support.cases import NUM_DENSE, NUM_STEPS, dense_optimizer
from ..support.cases import summed as sum_of_each
from ..support.fits import make_trainer
from ..support.modules import (
    BATCH_SIZE,
    FEATURES,
    Placement,
    bags,
    copies,
    counting,
    draw_weights,
    fused_bags,
    half_precision,
    managed_bags,
    managed_sequences,
    means,
    plain_ids,
    plan_by_place,
    position_weighted,
    position_weighted_collection,
    rows,
    sequences,
    shared_tables,
    tower,
    towers,
    variable_batch,
    weighted,
    weighted_ids,
    weighted_means,
    whole,
    whole_dense,
    wide_ids,
)
from ..support.reference import local, set_fused_rates, set_rates
from .foreign import Pool, hashed, pec, quantized


@contextmanager
def dense_kernels_without_pooling() -> Iterator[None]:
    """FBGEMM 1.8 has them on CUDA only: on a CPU its dense kernel always pools. So here is one in PyTorch."""
    kernel = DenseTableBatchedEmbeddingBagsCodegen
    forward = kernel.forward

    def look_up(self: Any, indices: Tensor, offsets: Tensor, *args: Any, **kwargs: Any) -> Tensor:
        if self.pooling_mode != PoolingMode.NONE:
            return forward(self, indices, offsets, *args, **kwargs)
        batch_size = (len(offsets) - 1) // len(self.embedding_specs)  # a feature a table, as in the cases below
        rows, start = [], 0
        for table, (num_rows, dim) in enumerate(self.embedding_specs):
            weight = self.weights[start : start + num_rows * dim].view(num_rows, dim)
            first, last = offsets[table * batch_size], offsets[(table + 1) * batch_size]
            rows.append(nn.functional.embedding(indices[first:last].long(), weight))
            start += num_rows * dim
        return torch.cat(rows)

    with mock.patch.object(kernel, "forward", look_up), mock.patch.object(sharding, "_refuse_sequences_as_bags"):
        yield


@dataclass
class Batch:
    dense: Tensor
    kjt: KeyedJaggedTensor
    labels: Tensor


def pooled(embeddings: Any) -> Tensor:
    """(B, D) of a KeyedTensor, by name: TorchRec orders columns by the plan."""
    return torch.cat([embeddings[name] for name in FEATURES if name in embeddings.keys()], dim=1)  # noqa: SIM118


def summed(embeddings: Any) -> Tensor:
    """(B, D) of a dict of JaggedTensors."""
    parts = [sum_of_each(embeddings[name]) for name in FEATURES if name in embeddings.keys()]  # noqa: SIM118
    # A variable batch has less samples of a feature; which they are does not matter here.
    return torch.cat([nn.functional.pad(part, (0, 0, 0, BATCH_SIZE - len(part))) for part in parts], dim=1)


def first_of(answer: Callable[[Any], Tensor]) -> Callable[[Any], Tensor]:
    """Of managed collision modules, which also return remapped ids."""
    return lambda embeddings: answer(embeddings[0])


def as_it_is(embeddings: Tensor) -> Tensor:
    return embeddings


def _alternating(first: Callable[[int], Any], second: Callable[[int], Any]) -> Callable[[int], Any]:
    return lambda table: (second if table % 2 else first)(table)


@dataclass(frozen=True)
class Part:
    """A module of a model."""

    build: Callable[[], nn.Module]
    answer: Callable[[Any], Tensor] = pooled  # turns what the module returns into (B, D)
    place: Placement | None = whole  # None: nothing of it is sharded
    stale: bool = True  # whether a stale mode looks it up before the updates of the batches before


@dataclass(frozen=True)
class KindCase:
    """A model and its data."""

    name: str
    parts: Mapping[str, Part]
    ids: Callable[[torch.Generator], KeyedJaggedTensor] = field(default=plain_ids)
    fused_lr: float | None = 2.0  # of the optimizer applied in backward; None: the modules have one of their own
    plain: bool = False  # whether nothing of it starts early
    exact_only: bool = False  # whether its embeddings cannot be taken apart from the dense part, for a stale reference


MIXED = _alternating(whole, copies)
MIXED_DENSE = _alternating(whole_dense, copies)
ALSO_DENSE = _alternating(whole, whole_dense)
TABLES, PROCESSORS = Part(bags), Part(position_weighted, stale=False)
MANAGED_BAGS = Part(managed_bags, first_of(pooled), rows, stale=False)
MANAGED_SEQUENCES = Part(managed_sequences, first_of(summed), rows, stale=False)

CASES = {
    case.name: case
    for case in (
        KindCase("feature_processors", {"fp": PROCESSORS}),
        KindCase("feature_processors_one_module", {"fp": Part(position_weighted_collection, stale=False)}),
        KindCase("feature_processors_data_parallel", {"fp": Part(position_weighted, place=MIXED, stale=False)}),
        KindCase("feature_processors_row_wise", {"fp": Part(position_weighted_collection, place=rows, stale=False)}),
        KindCase("feature_processors_beside_tables", {"fp": PROCESSORS, "ebc": TABLES}),
        KindCase("feature_processors_with_buffers", {"fp": Part(counting, stale=False)}, plain=True),
        KindCase("bags_dense_kernel", {"ebc": Part(bags, place=whole_dense, stale=False)}),
        KindCase("bags_some_dense_kernel", {"ebc": Part(bags, place=ALSO_DENSE, stale=False)}),
        KindCase("sequences_data_parallel", {"ec": Part(sequences, summed, copies, stale=False)}),
        KindCase("sequences_dense_kernel", {"ec": Part(sequences, summed, MIXED_DENSE, stale=False)}),
        KindCase("variable_batch", {"ebc": TABLES}, variable_batch),
        KindCase("variable_batch_sequences", {"ec": Part(sequences, summed)}, variable_batch),
        KindCase("tower", {"tower": Part(tower, as_it_is)}, exact_only=True),
        KindCase("towers", {"towers": Part(towers, as_it_is)}, exact_only=True),
        KindCase("fused_bags", {"ebc": Part(fused_bags)}, fused_lr=None),
        KindCase("managed_bags", {"mc": MANAGED_BAGS}, wide_ids),
        KindCase("managed_sequences", {"mc": MANAGED_SEQUENCES}, wide_ids),
        KindCase("two_managed_collections", {"first": MANAGED_BAGS, "second": MANAGED_SEQUENCES}, wide_ids),
        KindCase("managed_bags_beside_tables", {"mc": MANAGED_BAGS, "ebc": TABLES}),
        KindCase(
            "mixed_bags_and_sequences", {"ebc": Part(bags, place=copies, stale=False), "ec": Part(sequences, summed)}
        ),
    )
}
OTHERS = {
    case.name: case
    for case in (
        KindCase("bags", {"ebc": TABLES}),
        KindCase("sequences", {"ec": Part(sequences, summed)}),
        KindCase("means", {"ebc": Part(means, place=_alternating(whole, rows))}),
        KindCase("weighted", {"ebc": Part(weighted)}, weighted_ids),
        KindCase("weighted_means", {"ebc": Part(weighted_means, place=rows)}, weighted_ids, fused_lr=None),
        KindCase("half_precision", {"ebc": Part(half_precision)}),
        KindCase("shared_tables", {"ebc": Part(shared_tables, place=_alternating(rows, whole))}),
        KindCase(
            "several_collections", {"ebc": TABLES, "other": Part(means, place=rows), "ec": Part(sequences, summed)}
        ),
    )
}
"""Kinds of inputs and tables, which `CASES` has only one of for each kind of module."""
FOREIGN = {
    case.name: case
    for case in (
        KindCase("sharded_by_another", {"other": Part(pec, summed, None, stale=False), "ebc": TABLES}),
        KindCase("pool", {"other": Part(Pool, as_it_is, None, stale=False), "ebc": TABLES}),
        KindCase("quantized", {"other": Part(quantized, place=None, stale=False), "ebc": TABLES}),
        KindCase("hashed", {"mc": Part(hashed, first_of(pooled), rows, stale=False)}),
    )
}


def case_of(name: str) -> KindCase:
    return {**CASES, **OTHERS, **FOREIGN}[name]


def make_batch(case: KindCase, index: int, rank: int) -> Batch:
    generator = torch.Generator().manual_seed(7919 * rank + index)
    kjt = case.ids(generator)
    labels = torch.randint(0, 2, (BATCH_SIZE,), generator=generator).float()
    return Batch(torch.randn(BATCH_SIZE, NUM_DENSE, generator=generator), kjt, labels)


class Batches(cases.Batches):
    make = staticmethod(make_batch)

    def val_dataloader(self) -> DataLoader:
        return self.loader_of(range(500, 503))

    def loader_of(self, indices: range) -> DataLoader:
        # The loader draws a seed: not from the generator of all others.
        return DataLoader(super().loader_of(indices).dataset, batch_size=None, generator=torch.Generator())


class KindModel(LightningModule):
    """The parts' answers and a bottom MLP, merged into a top MLP."""

    def __init__(self, name: str, rates_move: bool = False, *, frozen: bool = False, applies: bool = True) -> None:
        """`frozen`: whether each first table is; `applies`: whether tables have an optimizer before the strategy."""
        super().__init__()
        self.case, self.rates_move = case_of(name), rates_move
        self.losses: list[Tensor] = []
        self.validated: list[Tensor] = []
        for part_name, part in self.case.parts.items():
            self.add_module(part_name, part.build())
        self.bottom = nn.Sequential(nn.Linear(NUM_DENSE, 8), nn.ReLU())
        self.top = nn.Sequential(nn.LazyLinear(16), nn.ReLU(), nn.Linear(16, 1))
        with torch.no_grad():
            self.eval()(make_batch(self.case, 0, 0))  # makes the lazy layer
        self.train()
        self.register_buffer("scale", torch.ones(()))  # DistributedDataParallel sends it before each forward
        draw_weights(self, 17, 0.4)
        modules = self.modules() if self.case.fused_lr is not None else ()
        for module in (one for one in modules if isinstance(one, (EmbeddingBagCollection, EmbeddingCollection))):
            for name, parameter in module.named_parameters():
                table = int(name.split(".")[-2].removeprefix("t"))
                if frozen and table == 0:
                    parameter.requires_grad_(False)
                elif applies and is_fused(self.part_of(module), table):
                    _apply_optimizer_in_backward(torch.optim.SGD, [parameter], {"lr": self.case.fused_lr})

    def part_of(self, module: nn.Module) -> Part:
        [name] = [name for name in self.case.parts if any(module is inner for inner in getattr(self, name).modules())]
        return self.case.parts[name]

    def answers(self, batch: Batch, embeddings: Mapping[str, Any] | None = None) -> dict[str, Tensor]:
        found = {name: (embeddings or {}).get(name) for name in self.case.parts}
        found = {name: getattr(self, name)(batch.kjt) if row is None else row for name, row in found.items()}
        return {name: self.case.parts[name].answer(one) for name, one in found.items()}

    def forward(self, batch: Batch, embeddings: Mapping[str, Any] | None = None) -> Tensor:
        merged = [self.bottom(batch.dense), *self.answers(batch, embeddings).values()]
        logits = self.top(torch.cat(merged, dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)

    def on_train_epoch_start(self) -> None:
        torch.manual_seed(23)  # rows that managed collision modules hand out anew are drawn

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.validated.append(self(batch))

    def configure_optimizers(self) -> Any:
        if not self.rates_move:
            return dense_optimizer(self)
        optimizer = combined_optimizer(self, dense_optimizer(self))
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factor)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def is_fused(part: Part, table: int) -> bool:
    is_dense = part.place in (None, copies, whole_dense, MIXED_DENSE)
    return not is_dense and not (table % 2 and part.place in (MIXED, ALSO_DENSE))


def make_plan(module: KindModel) -> ShardingPlan:
    return plan_by_place(module, lambda inner: module.part_of(inner).place)


@dataclass
class Outcome:
    """What training leaves behind on one rank: losses, and every tensor of it."""

    losses: Tensor
    state: dict[str, Tensor]
    num_early: int = 0  # input dists of coming batches that were used
    messages: list[str] = field(default_factory=list)
    before: dict[str, Tensor] = field(default_factory=dict)  # what the plain loop has before its last step

    def differences(self, other: Outcome) -> list[str]:
        if self.state.keys() != other.state.keys():
            return [f"{sorted(self.state.keys() ^ other.state.keys())}"]
        found = [key for key in self.state if not torch.equal(self.state[key], other.state[key])]
        return found if torch.equal(self.losses, other.losses) else ["losses", *found]


@dense_kernels_without_pooling()
def train(name: str, staleness: int = 0, rates_move: bool = False) -> Outcome:
    """Plain DistributedModelParallel: stale parts are looked up before the updates of `staleness` batches."""
    module = KindModel(name)
    case = module.case
    weights = {key: getattr(module, key).state_dict() for key in case.parts}
    env, plan = ShardingEnv.from_process_group(dist.group.WORLD), make_plan(module)
    dmp = DistributedModelParallel(module, env, torch.device("cpu"), plan, list(get_default_sharders()))
    for key, state in weights.items():
        # A managed collision module begins without ids; its sharded form does not take the whole one's.
        tables = {weight: value for weight, value in state.items() if "managed_collision_modules" not in weight}
        getattr(module, key).load_state_dict(tables, strict=False)
    optimizer = dense_optimizer(module)
    batches = [make_batch(case, index, dist.get_rank()) for index in range(NUM_STEPS)]
    stale = [key for key, part in case.parts.items() if part.stale]
    embeddings: dict[int, dict[str, Any]] = {}
    losses = []
    module.on_train_epoch_start()
    for index in range(NUM_STEPS):
        before = collect(module, optimizer) if index == NUM_STEPS - 1 else {}
        for ahead in range(index, min(index + staleness + 1, NUM_STEPS)) if staleness else ():
            if ahead not in embeddings:
                embeddings[ahead] = {key: getattr(module, key)(batches[ahead].kjt) for key in stale}
        optimizer.zero_grad()
        if rates_move:
            set_rates(optimizer, factor(index))
            set_fused_rates(dmp, factor(index))
        loss = dmp(batches[index], embeddings.pop(index, None))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return Outcome(torch.stack(losses), collect(module, optimizer), before=before)


@dense_kernels_without_pooling()
def fit(name: str, pipeline: Any, rates_move: bool = False, **kwargs: Any) -> Outcome:
    """The same under the strategy."""
    module = KindModel(name, rates_move)
    return fit_module(module, Batches(module.case), pipeline, **kwargs)


def fit_module(
    module: KindModel, data: Batches, pipeline: Any, load: str | None = None, save: str | None = None, **kwargs: Any
) -> Outcome:
    """Fit, from a checkpoint and into one, if given. `kwargs` are the trainer's; `options` are the strategy's."""
    early: list[bool] = []

    def observe(kind: str, stage: Any, batch: int) -> None:
        early.append(kind == "wait" and str(stage) == "input_data_dist")

    options = kwargs.pop("options", {})
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=make_plan(module), observer=observe, **options)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = make_trainer(strategy, **{"limit_val_batches": 0, **kwargs})
        trainer.fit(module, datamodule=data, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)
    messages = [str(warning.message) for warning in caught if "not overlapped" in str(warning.message)]
    state = collect(module, trainer.optimizers[0])
    return Outcome(torch.stack(module.losses), state, sum(early), messages)


@dense_kernels_without_pooling()
def fit_at_once_and_in_two(name: str, pipeline: str, folder: str) -> tuple[Outcome, Outcome]:
    """Two epochs in one fit; the second one alone, from a checkpoint after the first."""
    path = f"{folder}/one.ckpt"
    at_once, _, rest = (
        fit_module(KindModel(name), Batches(CASES[name], 6), pipeline, load, save, max_epochs=epochs)
        for load, save, epochs in ((None, None, 2), (None, path, 1), (path, None, 2))
    )
    return Outcome(at_once.losses[6:], at_once.state), rest


def collect(module: nn.Module, optimizer: torch.optim.Optimizer) -> dict[str, Tensor]:
    """Every local tensor: weights, buffers, the fused optimizers' state, the dense optimizer's."""
    found = {}
    for key, value in module.state_dict().items():
        found.update(local(key, value))
    for name, inner in module.named_modules():
        if isinstance(inner, (ShardedEmbeddingBagCollection, ShardedEmbeddingCollection)):
            for key, states in inner.fused_optimizer.state_dict()["state"].items():
                for kind, value in states.items():
                    found.update(local(f"fused {name}.{key} {kind}", value))
    parameters = {id(parameter): name for name, parameter in module.named_parameters()}
    for parameter, states in optimizer.state.items():
        for kind, value in states.items():
            found.update(local(f"dense {parameters[id(parameter)]} {kind}", value))
    return found
