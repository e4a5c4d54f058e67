"""A LightningModule with an EmbeddingBagCollection, as it was; the strategy is the only new thing.

python examples/existing_module/train.py
"""

import torch
from lightning.pytorch import LightningModule, Trainer
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_overlap import OverlapEmbeddingStrategy


class ClickModel(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingBagConfig(name="item_table", feature_names=["item"], num_embeddings=1000, embedding_dim=16)
        self.ebc = EmbeddingBagCollection(tables=[table])
        self.dense = torch.nn.Sequential(torch.nn.Linear(16, 64), torch.nn.ReLU(), torch.nn.Linear(64, 1))

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        logits = self.dense(self.ebc(batch["items"]).values()).squeeze(1)
        loss = torch.nn.functional.binary_cross_entropy_with_logits(logits, batch["clicked"])
        self.log("loss", loss, prog_bar=True)
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam(self.dense.parameters(), lr=0.01)


class Clicks(torch.utils.data.Dataset):
    """Batches of 128 samples with one item each; even items are clicked."""

    def __len__(self) -> int:
        return 400

    def __getitem__(self, index: int) -> dict:
        items = torch.randint(1000, (128,), generator=torch.Generator().manual_seed(index))
        sparse = KeyedJaggedTensor(keys=["item"], values=items, lengths=torch.ones(128, dtype=torch.long))
        return {"items": sparse, "clicked": (items % 2 == 0).float()}


if __name__ == "__main__":
    strategy = OverlapEmbeddingStrategy(fused_optimizer=(torch.optim.SGD, {"lr": 5.0}))
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False
    )
    # batch_size=None: an item is a batch already. Lightning gives each of the two processes every other one.
    trainer.fit(ClickModel(), torch.utils.data.DataLoader(Clicks(), batch_size=None))
    if trainer.is_global_zero:
        print(f"loss after {trainer.global_step} steps: {trainer.callback_metrics['loss']:.6f}")
