"""Two towers: a visitor's embeddings and an item's, each through a small network; their dot product is the logit."""

from typing import Any

import torch
from lightning.pytorch import LightningModule
from torch import nn
from torchmetrics.classification import BinaryAUROC
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.optim.optimizers import in_backward_optimizer_filter


class TwoTower(LightningModule):
    """Logs `train/loss`, `val/loss`, `val/auc` and `test/auc`.

    Args:
        num_users: Rows of the table of users.
        num_items: Rows of the table of items, which item and history share.
        dim: Columns of each table.
        learning_rate: Of the dense part. The tables have their own: `strategy.fused_optimizer`.
    """

    def __init__(self, num_users: int, num_items: int, dim: int = 16, learning_rate: float = 0.01):
        super().__init__()
        self.save_hyperparameters()
        user = EmbeddingBagConfig(
            name="user_table", feature_names=["user"], num_embeddings=num_users, embedding_dim=dim
        )
        item = EmbeddingBagConfig(
            name="item_table", feature_names=["item", "history"], num_embeddings=num_items, embedding_dim=dim
        )
        self.ebc = EmbeddingBagCollection(tables=[user, item])
        self.visitor = nn.Sequential(nn.Linear(2 * dim, 32), nn.ReLU(), nn.Linear(32, dim))
        self.item = nn.Sequential(nn.Linear(dim, 32), nn.ReLU(), nn.Linear(32, dim))
        self.val_auc, self.test_auc = BinaryAUROC(), BinaryAUROC()

    def forward(self, ids: Any) -> torch.Tensor:
        found = self.ebc(ids)
        visitor = self.visitor(torch.cat([found["user"], found["history"]], dim=1))
        return (visitor * self.item(found["item"])).sum(dim=1)

    def loss(self, batch: dict[str, Any], logits: torch.Tensor) -> torch.Tensor:
        return nn.functional.binary_cross_entropy_with_logits(logits, batch["clicked"])

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> torch.Tensor:
        loss = self.loss(batch, self(batch["ids"]))
        self.log("train/loss", loss, batch_size=len(batch["clicked"]))
        return loss

    def validation_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        logits = self(batch["ids"])
        self.val_auc(logits, batch["clicked"].int())
        self.log("val/loss", self.loss(batch, logits), batch_size=len(logits), sync_dist=True)
        self.log("val/auc", self.val_auc, batch_size=len(logits))

    def test_step(self, batch: dict[str, Any], batch_idx: int) -> None:
        logits = self(batch["ids"])
        self.test_auc(logits, batch["clicked"].int())
        self.log("test/auc", self.test_auc, batch_size=len(logits))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        dense = in_backward_optimizer_filter(self.named_parameters())  # without what a backward updates
        return torch.optim.Adam((parameter for _, parameter in dense), lr=self.hparams.learning_rate)
