"""Modules that somebody else sharded before the strategy came, or that nobody shards."""

import torch
import torch.ao.quantization as quantization
import torch.distributed as dist
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.pec_embedding import PECEmbeddingCollectionSharder
from torchrec.distributed.sharding_plan import construct_module_sharding_plan
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.embedding_configs import QuantConfig
from torchrec.modules.hash_mc_modules import HashZchManagedCollisionModule
from torchrec.modules.keyed_jagged_tensor_pool import KeyedJaggedTensorPool
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection
from torchrec.modules.mc_modules import ManagedCollisionCollection
from torchrec.modules.pec_embedding_modules import PECEmbeddingCollection
from torchrec.quant.embedding_modules import EmbeddingBagCollection as QuantEmbeddingBagCollection

from ..support.modules import BATCH_SIZE, FEATURES, MAX_LENGTH, NUM_ROWS, bags, draw_weights, rows, sequences

CPU = torch.device("cpu")


def pec() -> nn.Module:
    module, sharder = (
        PECEmbeddingCollection(sequences(2)),
        PECEmbeddingCollectionSharder(fused_params={"learning_rate": 2.0}),
    )
    kinds = {table: rows(0) for table in sharder.shardable_parameters(module)}
    size = dist.get_world_size()
    plan = construct_module_sharding_plan(module, kinds, sharder, size, size, "cpu")
    return sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), CPU)


class Pool(nn.Module):
    """Answers (B, F): the mean id of each feature."""

    def __init__(self) -> None:
        super().__init__()
        self.ids = KeyedJaggedTensorPool(
            NUM_ROWS, dict.fromkeys(FEATURES, MAX_LENGTH), values_dtype=torch.int64, device=CPU
        )
        generator = torch.Generator().manual_seed(3)
        lengths = torch.randint(0, MAX_LENGTH + 1, (len(FEATURES) * NUM_ROWS,), generator=generator)
        values = torch.randint(0, NUM_ROWS, (int(lengths.sum()),), generator=generator)
        self.ids.update(torch.arange(NUM_ROWS), KeyedJaggedTensor(list(FEATURES), values, lengths=lengths))

    def forward(self, kjt: KeyedJaggedTensor) -> Tensor:
        found = self.ids.lookup((torch.arange(BATCH_SIZE) + len(kjt.values())) % NUM_ROWS)
        return torch.stack([found[name].to_padded_dense(MAX_LENGTH).float().mean(1) for name in FEATURES], 1) / NUM_ROWS


def quantized() -> nn.Module:
    unsharded = bags(2)
    draw_weights(unsharded, 31, 0.4)
    weight = quantization.PlaceholderObserver.with_args(dtype=torch.qint8)
    activation = quantization.PlaceholderObserver.with_args(dtype=torch.float)
    unsharded.qconfig = QuantConfig(activation=activation, weight=weight)
    return QuantEmbeddingBagCollection.from_float(unsharded)


def hashed() -> nn.Module:
    """Gives rows to ids by multi-probe zero-collision hashing (MPZCH)."""
    tables = bags(1)
    configs = tables.embedding_bag_configs()
    hashing = HashZchManagedCollisionModule(NUM_ROWS, CPU, total_num_buckets=2, input_hash_size=1000)
    managed = ManagedCollisionCollection({configs[0].name: hashing}, configs)
    return ManagedCollisionEmbeddingBagCollection(tables, managed)
