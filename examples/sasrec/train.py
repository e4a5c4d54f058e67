"""Next item by self-attention, as in SASRec: sharded items, balanced histories, averages, a ranking of all items.

python examples/sasrec/train.py
"""

import torch
import torchrec
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import logsigmoid, scaled_dot_product_attention
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import Balance, ExponentialMovingAverage, OverlapEmbeddingStrategy

NUM_ITEMS, GROUP_SIZE, DIM, NUM_HEADS, MAX_LENGTH, BATCH_SIZE = 600, 20, 32, 2, 100, 64


class Block(nn.Module):
    """A layer of causal self-attention. It takes all positions one after the other: nothing is padded."""

    def __init__(self) -> None:
        super().__init__()
        self.before_attention, self.before_feed_forward = nn.LayerNorm(DIM), nn.LayerNorm(DIM)
        self.query_key_value, self.joined = nn.Linear(DIM, 3 * DIM), nn.Linear(DIM, DIM)
        self.feed_forward = nn.Sequential(nn.Linear(DIM, DIM), nn.ReLU(), nn.Linear(DIM, DIM))

    def forward(self, states_PD: Tensor, lengths: list[int]) -> Tensor:
        attended = []
        for history in self.query_key_value(self.before_attention(states_PD)).split(lengths):
            query, key, value = history.view(len(history), 3, NUM_HEADS, -1).permute(1, 2, 0, 3)
            answer = scaled_dot_product_attention(query, key, value, is_causal=True)
            attended.append(answer.transpose(0, 1).flatten(1))
        states_PD = states_PD + self.joined(torch.cat(attended))
        return states_PD + self.feed_forward(self.before_feed_forward(states_PD))


class SASRec(LightningModule):
    """P positions (the items of all histories of a batch), B histories, D columns."""

    def __init__(self) -> None:
        super().__init__()
        features = ["history", "next", "other"]  # of one table: an item's row is the same wherever it occurs
        table = EmbeddingConfig(name="item_table", feature_names=features, num_embeddings=NUM_ITEMS, embedding_dim=DIM)
        self.items = EmbeddingCollection(tables=[table])
        self.places = nn.Embedding(MAX_LENGTH, DIM)
        self.blocks = nn.ModuleList([Block(), Block()])
        self.norm = nn.LayerNorm(DIM)

    def states(self, history_PD: Tensor, lengths: list[int]) -> Tensor:
        places = torch.cat([torch.arange(length - 1, -1, -1) for length in lengths]).to(history_PD.device)
        states_PD = history_PD + self.places(places)  # the newest item has place 0
        for block in self.blocks:
            states_PD = block(states_PD, lengths)
        return self.norm(states_PD)

    def training_step(self, batch: dict, batch_idx: int) -> Tensor:
        items = self.items(batch["sparse"])
        lengths = items["history"].lengths().tolist()
        states_PD = self.states(items["history"].values(), lengths)
        next_P = (states_PD * items["next"].values()).sum(1)
        other_P = (states_PD * items["other"].values()).sum(1)
        loss_P = -logsigmoid(next_P) - logsigmoid(-other_P)
        # A mean over this rank's positions would weigh a history by those that share its rank. This does not.
        return loss_P.sum() / (len(lengths) * MAX_LENGTH / 4)

    def on_validation_epoch_start(self) -> None:
        # Each rank has a part of the table. This reads the whole one, here of averages, so all ranks have to call it.
        self.all_items = self.trainer.strategy.table("item_table").to(self.device)

    def validation_step(self, batch: dict, batch_idx: int) -> None:
        history = self.items(batch["sparse"])["history"]
        lengths = history.lengths()
        last_BD = self.states(history.values(), lengths.tolist())[lengths.cumsum(0) - 1]
        scores = last_BD @ self.all_items.T
        better = (scores > scores.gather(1, batch["target"].unsqueeze(1))).sum(1)
        hits = (better < 10).float()
        found = {"hits_at_10": hits.mean(), "ndcg_at_10": (hits / torch.log2(better + 2.0)).mean()}
        self.log_dict(found, batch_size=len(lengths), sync_dist=True, prog_bar=True)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        dense = in_backward_optimizer_filter(self.named_parameters())
        return torch.optim.Adam((parameter for _, parameter in dense), lr=0.005)


class Histories(torch.utils.data.Dataset):
    """Batches of users' histories, most of them short and some long.

    A user takes items of one group, in 7 of 10 cases the one that follows the last item in the group.
    """

    def __init__(self, num_batches: int, first: int) -> None:
        self.num_batches, self.first = num_batches, first

    def __len__(self) -> int:
        return self.num_batches

    def __getitem__(self, index: int) -> dict:
        generator = torch.Generator().manual_seed(self.first + index)
        lengths = (3 / torch.rand(BATCH_SIZE, generator=generator)).long().clamp(max=MAX_LENGTH)
        histories = [self._history(int(length) + 1, generator) for length in lengths]
        history = torch.cat([one[:-1] for one in histories])
        following = torch.cat([one[1:] for one in histories])
        other = torch.randint(NUM_ITEMS, history.shape, generator=generator)
        sparse = KeyedJaggedTensor(
            ["history", "next", "other"], torch.cat([history, following, other]), lengths=lengths.repeat(3)
        )
        return {"sparse": sparse, "target": torch.stack([one[-1] for one in histories])}

    def _history(self, length: int, generator: torch.Generator) -> Tensor:
        group = torch.randint(NUM_ITEMS // GROUP_SIZE, (1,), generator=generator)
        jumps = torch.randint(GROUP_SIZE, (length,), generator=generator)
        follows = torch.rand(length, generator=generator) < 0.7
        steps = torch.where(follows, 1, jumps)
        return group * GROUP_SIZE + steps.cumsum(0) % GROUP_SIZE


def attention_cost(batch: dict) -> Tensor:
    """Return the work of each history `(B,)`: attention grows with the square of its length."""
    lengths = batch["sparse"]["history"].lengths().double()
    return lengths * (lengths + 12 * DIM)


if __name__ == "__main__":
    seed_everything(0, verbose=False)
    strategy = OverlapEmbeddingStrategy(
        sharding="row_wise",
        fused_optimizer=(torchrec.optim.RowWiseAdagrad, {"lr": 0.5}),
        balance=Balance(attention_cost),
    )
    averages = ExponentialMovingAverage(decay=0.99, tables=True)
    trainer = Trainer(
        accelerator="cpu",
        devices=2,
        strategy=strategy,
        callbacks=[averages],
        max_epochs=1,
        logger=False,
        enable_checkpointing=False,
    )
    loaders = [
        torch.utils.data.DataLoader(Histories(num_batches, first), batch_size=None)
        for num_batches, first in ((400, 0), (20, 1_000))
    ]
    trainer.fit(SASRec(), *loaders)
    if trainer.is_global_zero:
        found = trainer.callback_metrics
        print(
            f"next item among the first 10 of {NUM_ITEMS} after {trainer.global_step} steps: "
            f"{found['hits_at_10']:.3f}, NDCG {found['ndcg_at_10']:.3f}"
        )
