"""Next item of a history: an EmbeddingCollection, whose rows go into a GRU one by one.

python examples/sequence_model/train.py
"""

import torch
import torchrec
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_overlap import OverlapEmbeddingStrategy

NUM_ITEMS, MAX_LENGTH, BATCH_SIZE = 200, 12, 128


class NextItem(LightningModule):
    def __init__(self) -> None:
        super().__init__()
        table = EmbeddingConfig(
            name="item_table", feature_names=["history"], num_embeddings=NUM_ITEMS, embedding_dim=32
        )
        self.items = EmbeddingCollection(tables=[table])
        self.gru = torch.nn.GRU(32, 64, batch_first=True)
        self.score = torch.nn.Linear(64, NUM_ITEMS)

    def training_step(self, batch: dict, batch_idx: int) -> torch.Tensor:
        history = self.items(batch["sparse"])["history"]  # a JaggedTensor: a row of the table for each item
        lengths = history.lengths()
        states, _ = self.gru(history.to_padded_dense(MAX_LENGTH))
        last = states[torch.arange(len(lengths), device=lengths.device), lengths - 1]
        scores = self.score(last)
        self.log("hits", (scores.argmax(1) == batch["next"]).float().mean(), prog_bar=True)
        return torch.nn.functional.cross_entropy(scores, batch["next"])

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([*self.gru.parameters(), *self.score.parameters()], lr=0.005)


class Histories(torch.utils.data.Dataset):
    """Batches of histories; half of the next items follow from the last one, the others are drawn."""

    def __len__(self) -> int:
        return 800

    def __getitem__(self, index: int) -> dict:
        generator = torch.Generator().manual_seed(index)
        lengths = torch.randint(2, MAX_LENGTH + 1, (BATCH_SIZE,), generator=generator)
        items = torch.randint(NUM_ITEMS, (int(lengths.sum()),), generator=generator)
        after = (7 * items[lengths.cumsum(0) - 1] + 3) % NUM_ITEMS
        drawn = torch.randint(NUM_ITEMS, (BATCH_SIZE,), generator=generator)
        follows = torch.rand(BATCH_SIZE, generator=generator) < 0.5
        sparse = KeyedJaggedTensor(keys=["history"], values=items, lengths=lengths)
        return {"sparse": sparse, "next": torch.where(follows, after, drawn)}


if __name__ == "__main__":
    seed_everything(0, verbose=False)
    strategy = OverlapEmbeddingStrategy(
        sharding="table_wise", fused_optimizer=(torchrec.optim.RowWiseAdagrad, {"lr": 0.1})
    )
    trainer = Trainer(
        accelerator="cpu", devices=2, strategy=strategy, max_epochs=1, logger=False, enable_checkpointing=False
    )
    trainer.fit(NextItem(), torch.utils.data.DataLoader(Histories(), batch_size=None))
    if trainer.is_global_zero:
        print(f"next items found after {trainer.global_step} steps: {trainer.callback_metrics['hits']:.3f}")
