"""Means of tables that are sharded by rows, where no unsharded module can tell them: managed collisions."""

import dataclasses

import torch
import torch.distributed as dist
import torchrec
from torch import nn
from torchrec import EmbeddingBagCollection
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingEnv
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingBagCollection

from lightning_overlap.tables.names import answer_in_config_order, divide_means_by_name, find_features_by_name

from ..support import modules
from ..support.ranks import Ranks


def _managed() -> nn.Module:
    """A sum and a mean of tables of ones: the number of ids, and 1 or 0."""
    configs = modules.bags(2).embedding_bag_configs()
    tables = [configs[0], dataclasses.replace(configs[1], pooling=torchrec.PoolingType.MEAN)]
    return ManagedCollisionEmbeddingBagCollection(EmbeddingBagCollection(tables=tables), modules._managed(tables))


def answers() -> tuple[list[list[float]], list[list[int]]]:
    model = nn.Module()
    model.managed = _managed()
    env, plan = ShardingEnv.from_process_group(dist.group.WORLD), modules.plan_by_place(model, lambda _: modules.rows)
    DistributedModelParallel(model, env, torch.device("cpu"), plan, init_data_parallel=False)
    for name, weight in model.named_parameters():
        if "embedding_bags" in name:
            nn.init.ones_(weight)
    divide_means_by_name(model)
    answer_in_config_order(model)
    find_features_by_name(model)
    kjt = modules.wide_ids(torch.Generator().manual_seed(dist.get_rank()))
    columns, _ = model.managed(kjt)
    return [columns[name][:, 0].tolist() for name in ("f0", "f1")], [
        kjt[name].lengths().tolist() for name in ("f0", "f1")
    ]


def test_means_of_managed_collisions(ranks: Ranks) -> None:
    for (sums, means), (lengths, other_lengths) in ranks.run(answers):
        assert sums == lengths
        assert means == [min(length, 1) for length in other_lengths]
