"""What it would save to send each distinct bag of a feature once: TorchRec's variable batches with `inverse_indices`.

    torchrun --nproc-per-node=2 benchmarks/distinct_bags.py --shares 0.05 0.25 0.65 1
    sudo SCRIPT=benchmarks/distinct_bags.py RATE=300mbit benchmarks/two_hosts.sh -- --shares 0.05 0.25 0.65 1

The ranks train the same bags under `fused_sparse_dist`: `all` sends every bag; `distinct` those that differ within a
feature and batch, by TorchRec's variable batches; `by_hand` sends them too, as a smaller batch, and the model copies
embeddings to the rows that have them, which needs as many distinct bags of every feature. Bags are made so that a given
share of each feature's is distinct. Finding them is not timed: a data loader's workers would do it. Rounds take turns.
"""

from __future__ import annotations

import argparse
import itertools
import os
import statistics
import time
from typing import Any

import quiet
import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer, seed_everything
from torch import Tensor, nn
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_overlap import OverlapEmbeddingStrategy

WARM_UP = 5
ARMS = ("all", "distinct", "by_hand")


class Model(LightningModule):
    """A pooled collection and a small dense part."""

    def __init__(self, options: argparse.Namespace) -> None:
        super().__init__()
        self.features = [f"f{place}" for place in range(options.tables)]
        self.ebc = EmbeddingBagCollection(
            [
                EmbeddingBagConfig(name=f, embedding_dim=options.dim, num_embeddings=options.rows, feature_names=[f])
                for f in self.features
            ]
        )
        self.dense = nn.Sequential(nn.Linear(options.tables * options.dim, 256), nn.ReLU(), nn.Linear(256, 1))
        self.marks: list[tuple[float, float]] = []
        self.losses: list[Tensor] = []

    def training_step(self, batch: dict[str, Any], batch_idx: int) -> Tensor:
        self.marks.append((time.perf_counter(), time.process_time()))
        embeddings = self.ebc(batch["bags"]).values()
        if "which_FB" in batch:
            parts = embeddings.unflatten(1, (len(self.features), -1)).unbind(1)
            copied = [part.index_select(0, which) for part, which in zip(parts, batch["which_FB"], strict=True)]
            embeddings = torch.cat(copied, 1)
        loss: Tensor = self.dense(embeddings).square().mean()
        self.losses.append(loss.detach())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.dense.parameters(), 0.1)


def make_batch(options: argparse.Namespace, share: float, arm: str, seed: int) -> dict[str, Any]:
    """The same bags for all arms: for each feature `share` of the batch's rows, each at least once."""
    draw = torch.Generator().manual_seed(seed)
    features = [f"f{place}" for place in range(options.tables)]
    num_bags = max(1, round(share * options.batch))
    bags_FNL = torch.randint(0, options.rows, (len(features), num_bags, options.ids), generator=draw)
    which_FB = torch.randint(0, num_bags, (len(features), options.batch), generator=draw)
    which_FB[:, :num_bags] = torch.arange(num_bags)
    which_FB = torch.stack([row[torch.randperm(options.batch, generator=draw)] for row in which_FB])
    if arm == "all":
        num_bags = options.batch
        bags_FNL = torch.stack([bags[which] for bags, which in zip(bags_FNL, which_FB, strict=True)])
    lengths = torch.full((len(features) * num_bags,), options.ids)
    batch: dict[str, Any] = {"which_FB": which_FB} if arm == "by_hand" else {}
    variable: dict[str, Any] = {}
    if arm == "distinct":
        variable = {"stride_per_key_per_rank": [[num_bags] for _ in features], "inverse_indices": (features, which_FB)}
    return {**batch, "bags": KeyedJaggedTensor(features, bags_FNL.flatten(), lengths=lengths, **variable)}


def fit(options: argparse.Namespace, share: float, arm: str) -> Any:
    """Return the time and the CPU time (all threads) of each step in milliseconds, and the losses."""
    seed_everything(1, verbose=False)
    model = Model(options)
    seed = 1000 * int(os.environ["RANK"])
    num = options.steps + WARM_UP
    batches = [make_batch(options, share, arm, seed + index % 8) for index in range(num)]
    sgd = (torch.optim.SGD, {"lr": 0.1})
    trainer = Trainer(
        accelerator="cpu",
        devices=int(os.environ["LOCAL_WORLD_SIZE"]),
        num_nodes=int(os.environ["WORLD_SIZE"]) // int(os.environ["LOCAL_WORLD_SIZE"]),
        max_epochs=1,
        strategy=OverlapEmbeddingStrategy("fused_sparse_dist", sharding="table_wise", fused_optimizer=sgd),
        **quiet.OPTIONS,
    )
    trainer.fit(model, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    marks = itertools.pairwise(model.marks)
    steps = [[(late - early) * 1e3 for early, late in zip(*two, strict=True)] for two in marks]
    return steps[WARM_UP:], torch.stack(model.losses)


def main() -> None:
    """Be one rank."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--shares", type=float, nargs="+", default=[0.05, 0.25, 0.65, 1.0], help="of distinct bags")
    for name, default in {"tables": 8, "rows": 100_000, "dim": 32, "batch": 4096, "ids": 1}.items():
        parser.add_argument(f"--{name}", type=int, default=default)
    parser.add_argument("--steps", type=int, default=20, help="steps per arm and round")
    parser.add_argument("--rounds", type=int, default=5)
    options = parser.parse_args()
    quiet.be_quiet()
    torch.set_num_threads(1)
    for share in options.shares:
        times: dict[str, list[Any]] = {arm: [] for arm in ARMS}
        ratios: dict[str, list[float]] = {arm: [] for arm in ARMS}
        for turn in range(options.rounds):
            runs = {arm: fit(options, share, arm) for arm in ARMS[:: -1 if turn % 2 else 1]}
            for arm, (steps, losses) in runs.items():
                torch.testing.assert_close(losses, runs["all"][1], rtol=1e-5, atol=1e-7)
                times[arm] += steps
                ratios[arm].append(_median(steps, 0) / _median(runs["all"][0], 0))
        if dist.get_rank() == 0:
            print(f"{share:g} of the bags are distinct")
            for arm, own in times.items():
                spread = f"{statistics.median(ratios[arm]):.3f} ({min(ratios[arm]):.3f} to {max(ratios[arm]):.3f})"
                text = f"  {arm:10s}{_median(own, 0):8.1f} ms   CPU {_median(own, 1):7.1f} ms   of all {spread}"
                print(text, flush=True)
    dist.barrier()
    dist.destroy_process_group()


def _median(steps: list[Any], place: int) -> float:
    return statistics.median(step[place] for step in steps)


if __name__ == "__main__":
    main()
