"""Modules that somebody else sharded before the strategy came, or that nobody shards. Functions that ranks run."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.ao.quantization as quantization
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.device_mesh import DeviceMesh
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.mc_embeddingbag import ManagedCollisionEmbeddingBagCollectionSharder
from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardedModule, ShardingEnv, ShardingEnv2D, ShardingPlan
from torchrec.modules.embedding_configs import QuantConfig
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection

from lightning_overlap.tables.supported_modules import why_never_early

from ..support.fits import make_trainer
from ..support.modules import BATCH_SIZE, DIM, FEATURES, MAX_LENGTH, NUM_ROWS, bags, rows, sequences, whole
from .supported_modules import (
    NUM_DENSE,
    NUM_STEPS,
    Batch,
    Batches,
    KindCase,
    Outcome,
    collect,
    dense_optimizer,
    draw_weights,
    fit_module,
    make_batch,
    pooled,
    summed,
    watched_strategy,
)

CPU = torch.device("cpu")
TABLES = {"fused_params": {"learning_rate": 2.0}}


def _placed(module: nn.Module, sharder: Any, place: Callable[[int], Any]) -> Any:
    kinds = {table: place(int(table.removeprefix("t"))) for table in sharder.shardable_parameters(module)}
    return construct_module_sharding_plan(module, kinds, sharder, dist.get_world_size(), dist.get_world_size(), "cpu")


def _sharded(module: nn.Module, sharder: Any, place: Callable[[int], Any] = whole) -> nn.Module:
    draw_weights(module, 31, 0.4)
    plan = _placed(module, sharder, place)
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU)
    sharded.load_state_dict(module.state_dict(), strict=False)
    return sharded


def pec() -> nn.Module:
    return _sharded(PECEmbeddingCollection(sequences(2)), PECEmbeddingCollectionSharder(**TABLES), rows)


def pool() -> nn.Module:
    ids = KeyedJaggedTensorPool(NUM_ROWS, dict.fromkeys(FEATURES, MAX_LENGTH), values_dtype=torch.int64, device=CPU)
    generator = torch.Generator().manual_seed(3)
    lengths = torch.randint(0, MAX_LENGTH + 1, (len(FEATURES) * NUM_ROWS,), generator=generator)
    values = torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator)
    ids.update(torch.arange(NUM_ROWS), KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths))
    return ids


def quantized() -> nn.Module:
    unsharded = bags(2)
    draw_weights(unsharded, 31, 0.4)
    weight = quantization.PlaceholderObserver.with_args(dtype=torch.qint8)
    activation = quantization.PlaceholderObserver.with_args(dtype=torch.float)
    unsharded.qconfig = QuantConfig(activation=activation, weight=weight)
    return QuantEmbeddingBagCollection.from_float(unsharded)


def _looked_up(kjt: KeyedJaggedTensor) -> Tensor:
    """(B, F) of a pool's answer: the mean id of each feature."""
    return torch.stack([kjt[name].to_padded_dense(MAX_LENGTH).float().mean(1) / NUM_ROWS for name in FEATURES], dim=1)


FOREIGN: dict[str, tuple[Callable[[], nn.Module], Callable[[Any], Tensor], int]] = {
    "pec": (pec, summed, 2 * DIM),
    "pool": (pool, _looked_up, len(FEATURES)),
    "quantized": (quantized, pooled, 2 * DIM),
}
"""Modules that the strategy finds sharded, or leaves whole; what makes (B, D) of their answers; D."""


class ForeignModel(LightningModule):
    def __init__(self, name: str) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        build, self.answer, width = FOREIGN[name]
        self.foreign = build()
        self.ebc = bags(2)
        _apply_optimizer_in_backward(torch.optim.SGD, self.ebc.parameters(), {"lr": 2.0})
        self.bottom = nn.Linear(NUM_DENSE, 8)
        self.top = nn.Linear(8 + 2 * DIM + width, 1)
        for module in (self.ebc, self.bottom, self.top):
            draw_weights(module, 31, 0.4)

    def merged(self, batch: Batch) -> Tensor:
        if isinstance(self.foreign, KeyedJaggedTensorPool):
            return self.answer(self.foreign.lookup((torch.arange(BATCH_SIZE) + len(batch.kjt.values())) % NUM_ROWS))
        return self.answer(self.foreign(batch.kjt))

    def forward(self, batch: Batch) -> Tensor:
        merged = [self.bottom(batch.dense), pooled(self.ebc(batch.kjt)), self.merged(batch)]
        logits = self.top(torch.cat(merged, dim=1)).squeeze(1)
        return nn.functional.binary_cross_entropy_with_logits(logits, batch.labels)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return dense_optimizer(self)


def train(name: str) -> Outcome:
    """DistributedDataParallel around the dense part, in a hand-written loop."""
    model = ForeignModel(name)
    model.ebc = _sharded(model.ebc, EmbeddingBagCollectionSharder(**TABLES))
    optimizer = dense_optimizer(model)
    inner = {key: child for key, child in model.named_modules() if isinstance(child, ShardedModule)}
    names = [key for key, _ in (*model.named_parameters(), *model.named_buffers())]
    ignored = [key for key in names if any(key.startswith(f"{outer}.") for outer in inner)]
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(model, ignored)
    ddp = DistributedDataParallel(model, broadcast_buffers=False)
    losses = []
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        loss = ddp(make_batch(IDS, index, dist.get_rank()))
        loss.backward()
        optimizer.step()
        losses.append(loss.detach())
    return Outcome(torch.stack(losses), collect(model, optimizer))


IDS = KindCase("foreign", {})


def fit(name: str, pipeline: str) -> Outcome:
    model = ForeignModel(name)
    of_ebc = _placed(model.ebc, EmbeddingBagCollectionSharder(**TABLES), whole)
    return fit_module(model, Batches(IDS), ShardingPlan({"ebc": of_ebc}), pipeline)


def fit_unsharded_pruning() -> None:
    model = ForeignModel("quantized")
    pruning = GenericITEPModule(table_name_to_unpruned_hash_sizes={}, lookups=[], enable_pruning=False)
    model.foreign = ITEPEmbeddingBagCollection(bags(2), pruning)
    make_trainer(watched_strategy("base", None)[0]).fit(model, datamodule=Batches(IDS, 2))


class Hashes(LightningModule):
    """Its rows go to ids by multi-probe zero-collision hashing (MPZCH)."""

    def __init__(self) -> None:
        super().__init__()
        tables = bags(1)
        _apply_optimizer_in_backward(torch.optim.SGD, tables.parameters(), {"lr": 2.0})
        configs = tables.embedding_bag_configs()
        hashing = HashZchManagedCollisionModule(NUM_ROWS, CPU, total_num_buckets=2, input_hash_size=1000)
        self.mc = ManagedCollisionEmbeddingBagCollection(
            tables, ManagedCollisionCollection({configs[0].name: hashing}, configs)
        )

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.mc(batch.kjt)[0].values().sum()

    validation_step = training_step  # type: ignore[assignment]

    def configure_optimizers(self) -> None:
        return None


def hash_on_a_cpu() -> tuple[Tensor, Tensor, str]:
    """Return a table's rows before and after an evaluation has sharded it, of this rank, and the error of a fit."""
    rank, world_size, model = dist.get_rank(), dist.get_world_size(), Hashes()
    key = "mc._embedding_module.embedding_bags.t0.weight"
    before = model.get_parameter(key).detach().clone().tensor_split(world_size)[rank]
    plan = ShardingPlan({"mc": _placed(model.mc, ManagedCollisionEmbeddingBagCollectionSharder(), rows)})
    data = [make_batch(IDS, 0, rank)]
    make_trainer(watched_strategy("base", plan)[0]).validate(model, [DataLoader(data, batch_size=None)], verbose=False)
    after = model.state_dict()[key].local_shards()[0].tensor
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        make_trainer(watched_strategy("base", None)[0]).fit(Hashes(), DataLoader(data, batch_size=None))
    return before, after, str(caught.value)


def reasons_of_other_ranks() -> list[str | None]:
    """Tables sharded over all ranks, over this one alone, and in two dimensions."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    module = _sharded(bags(2), EmbeddingBagCollectionSharder(**TABLES))
    found = [why_never_early(module, dist.group.WORLD)]
    module._env = ShardingEnv.from_process_group(alone)
    found.append(why_never_early(module, dist.group.WORLD))
    mesh = DeviceMesh("cpu", torch.arange(world_size).reshape(world_size, 1), mesh_dim_names=("replicate", "shard"))
    module._env = ShardingEnv2D(alone, dist.group.WORLD, dist.group.WORLD, mesh, node_group_size=1)
    return [*found, why_never_early(module, dist.group.WORLD)]
