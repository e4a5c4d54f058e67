"""Steps of a sequence model with and without balanced batches, on lengths by Zipf's law and on equal lengths.

    torchrun --nproc-per-node=2 benchmarks/balance.py
    torchrun --nproc-per-node=4 benchmarks/balance.py --threads-share

Attention runs over each sequence by itself, without padding, so a sample costs about `length ** 2 + 4 * dim * length`.
The ranks train the same batches under `fused_sparse_dist`, `plain` as loaded and `balanced`; rounds take turns. A
rank's time is the CPU time of the thread that trains, from the step's beginning to the end of its backward: without the
wait for other ranks, and true as well where ranks share cores. `--threads-share` says so in the output.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from typing import Any

import numpy as np
import quiet
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.nn.functional import scaled_dot_product_attention
from torch.utils.data import DataLoader
from torchrec import EmbeddingCollection, EmbeddingConfig, KeyedJaggedTensor

from lightning_overlap import Balance, OverlapEmbeddingStrategy

WARM_UP = 4
ARMS = ("plain", "balanced")


class Model(LightningModule):
    """A collection of sequences and a layer of attention."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        dim = options.dim
        table = EmbeddingConfig(
            name="item_table", embedding_dim=dim, num_embeddings=options.rows, feature_names=["history"]
        )
        self.sequences = EmbeddingCollection([table])
        self.projections, self.top = nn.Linear(dim, 3 * dim), nn.Linear(dim, 1)
        self.walls: list[float] = []
        self.own: list[float] = []
        self.bytes: list[int] = []
        self.costs: list[tuple[float, float]] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.walls.append(time.perf_counter())
        self._start = time.thread_time()
        history = self.sequences(batch["history"])["history"]
        pooled = []
        for part in self.projections(history.values()).split(history.lengths().tolist()):
            query, key, value = part.unsqueeze(0).chunk(3, dim=2)
            pooled.append(scaled_dot_product_attention(query, key, value).mean(1))
        loss: Tensor = (self.top(torch.cat(pooled)).squeeze(1) - batch["label"]).square().mean()
        return loss

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.own.append(time.thread_time() - self._start)
        balanced = self.trainer.strategy.balanced
        if balanced is not None:
            self.bytes.append(balanced.num_bytes)
            mean = statistics.fmean(balanced.before)
            self.costs.append((max(balanced.before) / mean, max(balanced.after) / mean))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD([*self.projections.parameters(), *self.top.parameters()], 0.1)


def cost_of(dim: int) -> Any:
    def cost(batch: dict[str, Any]) -> Tensor:
        lengths = batch["history"].lengths().double()
        return lengths * (lengths + 4 * dim)

    return cost


def make_batch(options: argparse.Namespace, lengths: str, seed: int) -> dict[str, Any]:
    draw = np.random.default_rng(seed)
    longest = options.longest
    if lengths == "equal":
        of_samples = np.full(options.batch, longest // 4)
    else:
        of_samples = np.minimum(draw.zipf(options.zipf, options.batch) * 8, longest)
    ids = torch.from_numpy(draw.integers(0, options.rows, int(of_samples.sum())))
    history = KeyedJaggedTensor(["history"], ids, lengths=torch.from_numpy(of_samples))
    return {"history": history, "label": torch.from_numpy(draw.random(options.batch, np.float32))}


def train(options: argparse.Namespace, lengths: str, arm: str) -> Model:
    rank = int(os.environ["RANK"])
    seed_everything(0, verbose=False)
    batches = [make_batch(options, lengths, 1000 * index + rank) for index in range(options.steps + WARM_UP)]
    model = Model(options)
    strategy = OverlapEmbeddingStrategy(
        fused_optimizer=(torch.optim.SGD, {"lr": 0.1}),
        sharding="row_wise",
        balance=Balance(cost_of(options.dim)) if arm == "balanced" else None,
    )
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        strategy=strategy,
        max_epochs=1,
        **quiet.OPTIONS,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))
    return model


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--batch", type=int, default=64, help="samples of a rank")
    parser.add_argument("--longest", type=int, default=512)
    parser.add_argument("--zipf", type=float, default=1.3)
    parser.add_argument("--dim", type=int, default=64)
    parser.add_argument("--rows", type=int, default=100_000)
    parser.add_argument("--steps", type=int, default=20)
    parser.add_argument("--rounds", type=int, default=3)
    parser.add_argument("--threads-share", action="store_true", help="there are more ranks than cores")
    options = parser.parse_args()
    quiet.be_quiet()
    torch.set_num_threads(1)
    found: dict[tuple[str, str], list[Any]] = {}
    for _ in range(options.rounds):
        for lengths in ("zipf", "equal"):
            for arm in ARMS:
                found.setdefault((lengths, arm), []).append(train(options, lengths, arm))
    if dist.get_rank() == 0:
        shared = ", more ranks than cores: walls say little" if options.threads_share else ""
        print(f"{dist.get_world_size()} ranks of {options.batch} samples{shared}")
    for (lengths, arm), models in found.items():
        own = [[one.own[step] for one in models] for step in range(WARM_UP, WARM_UP + options.steps)]
        mine = torch.tensor([statistics.median(rounds) for rounds in own])
        of_ranks = [torch.empty_like(mine) for _ in range(dist.get_world_size())]
        dist.all_gather(of_ranks, mine)
        own_SR = torch.stack(of_ranks, 1)
        walls = [after - before for one in models for before, after in itertools.pairwise(one.walls[WARM_UP:])]
        sent = [one for model in models for one in model.bytes[WARM_UP:]]
        costs = [one for model in models for one in model.costs[WARM_UP:]]
        if dist.get_rank() == 0:
            slowest = (own_SR.max(1).values.sum() / own_SR.mean(1).sum()).item()
            line = f"{lengths:5} {arm:8} step {statistics.median(walls) * 1e3:7.1f} ms (median), "
            line += (
                f"mean {statistics.fmean(walls) * 1e3:7.1f}; a rank's own time: mean {own_SR.mean() * 1e3:6.1f} ms, "
            )
            line += f"slowest {own_SR.max(1).values.mean() * 1e3:6.1f}, {slowest:.3f} of the mean"
            if sent:
                before, after = (statistics.fmean(one[place] for one in costs) for place in (0, 1))
                line += f"; cost {before:.3f} -> {after:.3f}; {statistics.fmean(sent):,.0f} bytes sent a step"
            print(line, flush=True)


if __name__ == "__main__":
    main()
