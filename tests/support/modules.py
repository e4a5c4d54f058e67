"""TorchRec modules of every kind, ids for them, and plans made of placements, without the package under test."""

import dataclasses
from collections.abc import Callable, Mapping
from typing import Any

import torch
import torch.distributed as dist
import torchrec
from torch import Tensor, nn
from torchrec import EmbeddingBagCollection, JaggedTensor, KeyedJaggedTensor
from torchrec.distributed import sharding_plan
from torchrec.distributed.types import ShardingPlan
from torchrec.modules import mc_embedding_modules, mc_modules
from torchrec.modules.embedding_tower import EmbeddingTower, EmbeddingTowerCollection
from torchrec.modules.feature_processor_ import PositionWeightedModule, PositionWeightedModuleCollection
from torchrec.modules.fp_embedding_modules import FeatureProcessedEmbeddingBagCollection
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

NUM_ROWS = 40
BATCH_SIZE = 8
DIM = 8
FEATURES = ("f0", "f1", "f2")
MAX_LENGTH = 3


def _configs(kind: type, num: int) -> list[Any]:
    common = {"num_embeddings": NUM_ROWS, "embedding_dim": DIM}
    return [kind(name=f"t{i}", feature_names=[FEATURES[i]], **common) for i in range(num)]


def bags(num: int = 3, *, weighted: bool = False) -> EmbeddingBagCollection:
    return EmbeddingBagCollection(tables=_configs(torchrec.EmbeddingBagConfig, num), is_weighted=weighted)


def means(num: int = 3) -> EmbeddingBagCollection:
    tables = [dataclasses.replace(one, pooling=torchrec.PoolingType.MEAN) for one in bags(num).embedding_bag_configs()]
    return EmbeddingBagCollection(tables=tables)


def sequences(num: int = 3) -> torchrec.EmbeddingCollection:
    return torchrec.EmbeddingCollection(tables=_configs(torchrec.EmbeddingConfig, num))


def position_weighted(num: int = 3, kind: type[nn.Module] = PositionWeightedModule) -> nn.Module:
    processors = {FEATURES[i]: kind(MAX_LENGTH) for i in range(num)}
    return FeatureProcessedEmbeddingBagCollection(bags(num, weighted=True), processors)


def position_weighted_collection(num: int = 3) -> nn.Module:
    processors = PositionWeightedModuleCollection({FEATURES[i]: MAX_LENGTH for i in range(num)})
    return FeatureProcessedEmbeddingBagCollection(bags(num, weighted=True), processors)


class _Counting(PositionWeightedModule):
    def __init__(self, max_length: int) -> None:
        super().__init__(max_length)
        self.register_buffer("seen", torch.zeros(()))

    def forward(self, features: JaggedTensor) -> JaggedTensor:
        self.seen += 1
        weighted = super().forward(features)
        own = weighted.weights() / self.seen
        return JaggedTensor(weighted.values(), lengths=weighted.lengths(), offsets=weighted.offsets(), weights=own)


def counting(num: int = 3) -> nn.Module:
    return position_weighted(num, _Counting)


def _managed(configs: list[Any]) -> mc_modules.ManagedCollisionCollection:
    options = {"device": torch.device("cpu"), "eviction_interval": 2, "input_hash_size": 10 * NUM_ROWS}
    modules = {
        config.name: mc_modules.MCHManagedCollisionModule(
            zch_size=config.num_embeddings, eviction_policy=mc_modules.DistanceLFU_EvictionPolicy(), **options
        )
        for config in configs
    }
    return mc_modules.ManagedCollisionCollection(managed_collision_modules=modules, embedding_configs=configs)


def managed_bags(num: int = 2) -> nn.Module:
    tables = bags(num)
    managed = _managed(tables.embedding_bag_configs())
    return mc_embedding_modules.ManagedCollisionEmbeddingBagCollection(tables, managed)


def managed_sequences(num: int = 2) -> nn.Module:
    tables = sequences(num)
    return mc_embedding_modules.ManagedCollisionEmbeddingCollection(tables, _managed(tables.embedding_configs()))


class _Sum(nn.Module):
    def __init__(self, num: int) -> None:
        super().__init__()
        self.linear = nn.Linear(num * DIM, DIM)

    def forward(self, rows: Any) -> Tensor:
        return self.linear(torch.cat([rows[name] for name in FEATURES if name in rows.keys()], dim=1))  # noqa: SIM118


def tower() -> nn.Module:
    return EmbeddingTower(bags(2), _Sum(2))


def towers() -> nn.Module:
    return EmbeddingTowerCollection([EmbeddingTower(bags(2), _Sum(2)), EmbeddingTower(bags(3), _Sum(3))])


def fused_bags() -> nn.Module:
    tables = _configs(torchrec.EmbeddingBagConfig, 2)
    return FusedEmbeddingBagCollection(tables, optimizer_type=torch.optim.SGD, optimizer_kwargs={"lr": 2.0})


def weighted_means() -> nn.Module:
    """Means over weighted ids; the unfused collection refuses them."""
    tables = _configs(torchrec.EmbeddingBagConfig, 2)
    tables[0].pooling = torchrec.PoolingType.MEAN
    options = {"optimizer_type": torch.optim.SGD, "optimizer_kwargs": {"lr": 2.0}, "is_weighted": True}
    return FusedEmbeddingBagCollection(tables, **options)


def weighted() -> nn.Module:
    return bags(weighted=True)


def half_precision() -> nn.Module:
    tables = [
        dataclasses.replace(one, data_type=torchrec.types.DataType.FP16) for one in bags(2).embedding_bag_configs()
    ]
    return EmbeddingBagCollection(tables=tables)


def shared_tables() -> nn.Module:
    """Tables of several features and of one."""
    features = [["f0", "f1"], ["f2"]]
    tables = zip(bags(2).embedding_bag_configs(), features, strict=True)
    return EmbeddingBagCollection(tables=[dataclasses.replace(one, feature_names=names) for one, names in tables])


def plain_ids(generator: torch.Generator, num_ids: int = NUM_ROWS) -> KeyedJaggedTensor:
    lengths = torch.randint(0, MAX_LENGTH + 1, (len(FEATURES) * BATCH_SIZE,), generator=generator)
    values = torch.randint(0, num_ids, (int(lengths.sum()),), generator=generator)
    return KeyedJaggedTensor(keys=list(FEATURES), values=values, lengths=lengths)


def wide_ids(generator: torch.Generator) -> KeyedJaggedTensor:
    """Ids of which a table has not enough rows: a managed collision module has to choose."""
    return plain_ids(generator, 3 * NUM_ROWS)


def weighted_ids(generator: torch.Generator) -> KeyedJaggedTensor:
    kjt = plain_ids(generator)
    weights = torch.rand(kjt.values().numel(), generator=generator)
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, kjt.lengths())


def variable_batch(generator: torch.Generator, sizes: list[int] | None = None) -> KeyedJaggedTensor:
    """Of each feature only so many samples, each used by several rows of the batch (`inverse_indices`)."""
    sizes = sizes or torch.randint(2, BATCH_SIZE + 1, (len(FEATURES),), generator=generator).tolist()
    lengths = torch.randint(0, MAX_LENGTH + 1, (sum(sizes),), generator=generator)
    indices = [torch.randint(0, size, (BATCH_SIZE,), generator=generator) for size in sizes]
    return KeyedJaggedTensor(
        keys=list(FEATURES),
        values=torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator),
        lengths=lengths,
        stride_per_key_per_rank=[[size] for size in sizes],
        inverse_indices=(list(FEATURES), torch.stack(indices)),
    )


def variable_batch_alike(generator: torch.Generator) -> KeyedJaggedTensor:
    """The same with equal sizes on all ranks: gloo gathers no others, as row-wise tables need it."""
    return variable_batch(generator, [3, 8, 5])


def draw_weights(module: nn.Module, seed: int, scale: float) -> None:
    generator = torch.Generator().manual_seed(seed)
    with torch.no_grad():
        for _, parameter in sorted(module.named_parameters()):
            parameter.copy_(torch.randn(parameter.shape, generator=generator) * scale)


def own_parameters(module: nn.Module) -> list[nn.Parameter]:
    return [p for _, p in in_backward_optimizer_filter(module.named_parameters()) if p.requires_grad]


Placement = Callable[[int], Any]  # number of a table -> how it is sharded


def whole(table: int) -> Any:
    return sharding_plan.table_wise(rank=table % dist.get_world_size(), compute_kernel="fused")


def whole_dense(table: int) -> Any:
    return sharding_plan.table_wise(rank=table % dist.get_world_size(), compute_kernel="dense")


def rows(table: int) -> Any:
    return sharding_plan.row_wise(compute_kernel="fused")


def copies(table: int) -> Any:
    return sharding_plan.data_parallel()


def halves(first: int, second: int) -> Any:
    size = dist.get_world_size()
    return sharding_plan.column_wise(ranks=[first % size, second % size])


def plan_of(module: nn.Module, tables: Mapping[str, Any]) -> Any:
    size = dist.get_world_size()
    plan: Any = sharding_plan.construct_module_sharding_plan(
        module, per_param_sharding=dict(tables), local_size=size, world_size=size, device_type="cpu"
    )
    for how in plan.values():  # TorchRec's functions for these types take no kernel, and a CPU would get the dense one
        if how.sharding_type in ("table_row_wise", "grid_shard"):
            how.compute_kernel = "fused"
    return plan


def plan_by_place(module: nn.Module, place_of: Callable[[nn.Module], Placement | None]) -> ShardingPlan:
    """Shard every TorchRec module inside a module, the outermost ones; `t3` is table 3, None leaves a module out."""
    sharders = sharding_plan.get_module_to_default_sharders()
    plan: dict[str, Any] = {}
    for name, inner in module.named_modules():
        inside = any(name.startswith(f"{outer}.") for outer in plan)
        place = None if type(inner) not in sharders or inside else place_of(inner)
        if place is not None:
            tables = sharders[type(inner)].shardable_parameters(inner)
            plan[name] = plan_of(inner, {table: place(int(table.removeprefix("t"))) for table in tables})
    return ShardingPlan(plan=plan)
