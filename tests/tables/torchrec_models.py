"""TorchRec's own test models, under the strategy and in a loop by hand. Functions that ranks run."""

from types import SimpleNamespace
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.test_utils.model_input import ModelInput
from torchrec.distributed.test_utils.test_model import TestSparseNN
from torchrec.distributed.types import ShardingEnv

from lightning_overlap import OverlapEmbeddingStrategy

from ..support.fits import make_trainer
from ..support.modules import draw_weights, own_parameters, plan_by_place, rows

NUM_STEPS = 6


def _tables(kind: str) -> list[Any]:
    size = {"num_embeddings": 40, "embedding_dim": 8}
    return [EmbeddingBagConfig(name=f"t{kind}{i}", feature_names=[f"{kind}{i}"], **size) for i in range(2)]


PLAIN, WEIGHTED = _tables("1"), _tables("2")


class ManagedSparseNN(LightningModule):
    """Two managed collision collections, of which the second one weighs its ids, and a dense part that has buffers."""

    def __init__(self) -> None:
        super().__init__()
        managed = {one.name: SimpleNamespace(mc_type="sort-zch", input_hash_size=4000) for one in PLAIN + WEIGHTED}
        self.net = TestSparseNN(tables=PLAIN, weighted_tables=WEIGHTED, zch_kwargs=managed)
        draw_weights(self.net.dense, 17, 0.4)
        draw_weights(self.net.over, 18, 0.4)
        self.losses: list[Tensor] = []
        for module in (self.net.sparse.ebc, self.net.sparse.weighted_ebc):
            _apply_optimizer_in_backward(torch.optim.SGD, module._embedding_module.parameters(), {"lr": 2.0})

    def on_train_start(self) -> None:  # the tables are on `meta` until they are sharded
        for module in (self.net.sparse.ebc, self.net.sparse.weighted_ebc):
            for number, value in enumerate(module._embedding_module.state_dict().values()):
                local = value.local_shards()[0].tensor
                generator = torch.Generator().manual_seed(100 * number + dist.get_rank())
                local.copy_(torch.randn(local.shape, generator=generator) * 0.4)
        torch.manual_seed(23)

    def forward(self, batch: ModelInput) -> Tensor:
        loss: Tensor = self.net(batch)[0]
        self.losses.append(loss.detach().clone())
        return loss

    def training_step(self, batch: ModelInput, batch_idx: int) -> Tensor:
        return self(batch)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(own_parameters(self), 0.5)


def _batches() -> list[ModelInput]:
    torch.manual_seed(100 + dist.get_rank())
    return [
        ModelInput.generate(batch_size=4, tables=PLAIN, weighted_tables=WEIGHTED, num_float_features=10)
        for _ in range(NUM_STEPS)
    ]


def train() -> list[Tensor]:
    module = ManagedSparseNN()
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    plan = plan_by_place(module, lambda _: rows)
    dmp = DistributedModelParallel(module, env=env, device=torch.device("cpu"), plan=plan)
    optimizer, batches = module.configure_optimizers(), _batches()
    module.on_train_start()
    for batch in batches:
        optimizer.zero_grad()
        dmp(batch).backward()
        optimizer.step()
    return module.losses


def fit(pipeline: str) -> list[Tensor]:
    module, batches = ManagedSparseNN(), _batches()
    plan = plan_by_place(module, lambda _: rows)
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=plan, find_unused_parameters=True)
    make_trainer(strategy).fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return module.losses
