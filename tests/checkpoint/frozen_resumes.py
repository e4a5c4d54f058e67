"""Resumes that freeze and unfreeze tables, beside the unsharded module and torch's optimizers. Ranks run this."""

import itertools
import random
import warnings
from collections.abc import Collection, Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec.optim import RowWiseAdagrad

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer

from ..support import modules
from ..support.fits import make_trainer

TABLES, NUM_BATCHES = ("t0", "t1", "t2"), 3
SHARDING = {"t0": "row_wise", "t1": "table_wise", "t2": "table_wise"}
OPTIMIZERS: dict[str, Any] = {"sgd": torch.optim.SGD, "adagrad": torch.optim.Adagrad, "rowwise": RowWiseAdagrad}
SETS = [set(names) for num in range(4) for names in itertools.combinations(TABLES, num)]


@dataclass(frozen=True)
class Chain:
    """Fits of which each resumes the one before; `frozen` has the tables that each one leaves untrained."""

    saved_as: str
    optimizer: str
    schedule: str  # none | combined | shared | each: whether, and how, a scheduler moves the tables' rates
    rates: tuple[float, float, float]
    frozen: tuple[frozenset[str], ...]


def drawn(num: int, seed: int) -> Iterator[Chain]:
    """Yield chains, each format with each optimizer, schedule and equal or other rates in turn."""
    draw = random.Random(seed)
    formats = itertools.cycle(("full", "sharded", "incremental"))
    for number in range(num):
        same = draw.random() < 0.5
        yield Chain(
            next(formats),
            [*OPTIMIZERS][number // 3 % 3],
            ("none", "shared", "combined", "each")[number % 4],
            (0.3, 0.3, 0.3) if same else (0.3, 0.3, 0.2),  # no numbers of float32
            tuple(frozenset(draw.choice(SETS)) for _ in range(3)),
        )


class Scorer(LightningModule):
    def __init__(self, chain: Chain, frozen: Collection[str], *, applied: bool) -> None:
        super().__init__()
        self.chain = chain
        self.ebc = modules.bags(3)
        self.scale = nn.Parameter(torch.ones(()))
        modules.draw_weights(self.ebc, 17, 0.4)
        for name, rate in zip(TABLES, chain.rates, strict=True):
            weight = self.weight(name)
            weight.requires_grad_(name not in frozen)
            if applied and name not in frozen:
                _apply_optimizer_in_backward(OPTIMIZERS[chain.optimizer], [weight], {"lr": rate})

    def weight(self, name: str) -> nn.Parameter:
        return self.ebc.embedding_bags[name].weight

    def training_step(self, ids: Any, batch_idx: int) -> Tensor:
        pooled = self.ebc(ids)
        rows = [torch.clone(pooled[feature]) for feature in modules.FEATURES]
        return self.scale * torch.stack([(part * torch.linspace(0.5, 1, 8)).mean() for part in rows]).sum()

    def configure_optimizers(self) -> Any:
        dense = torch.optim.SGD([self.scale], 0.1)
        if self.chain.schedule == "none":
            return dense
        optimizer = combined_optimizer(self, dense)
        if self.chain.schedule == "combined":
            return optimizer
        factors = [factor] * len(optimizer.param_groups) if self.chain.schedule == "each" else factor
        scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, factors)
        return [optimizer], [{"scheduler": scheduler, "interval": "step"}]


def factor(step: int) -> float:
    return 1 / (1 + step)


def _batches(rank: int, epoch: int) -> list[Any]:
    seeds = [7919 * rank + 31 * epoch + index for index in range(NUM_BATCHES)]
    return [modules.plain_ids(torch.Generator().manual_seed(seed)) for seed in seeds]


def _train_unsharded(chain: Chain, saved: dict[str, Any] | None, epoch: int) -> dict[str, Any]:
    """Train an epoch as torch does: what was not trained before has a new optimizer, at its own rate."""
    frozen = chain.frozen[epoch]
    module = Scorer(chain, frozen, applied=False)
    optimizers = {}
    for name, rate in zip(TABLES, chain.rates, strict=True):
        if name not in frozen:
            optimizers[name] = OPTIMIZERS[chain.optimizer]([module.weight(name)], lr=rate)
    if saved is not None:
        module.load_state_dict(saved["module"])
        for name in optimizers.keys() & saved["optimizers"].keys():
            optimizers[name].load_state_dict(saved["optimizers"][name])
    ranks = range(dist.get_world_size())
    for index, batches in enumerate(zip(*(_batches(rank, epoch) for rank in ranks), strict=True)):
        moved = factor(epoch * NUM_BATCHES + index) if chain.schedule in ("shared", "each") else 1.0
        (sum(module.training_step(ids, 0) for ids in batches) / len(batches)).backward()
        for name, optimizer in optimizers.items():
            optimizer.param_groups[0]["lr"] = chain.rates[TABLES.index(name)] * moved
            optimizer.step()
        with torch.no_grad():
            module.scale -= 0.1 * moved * module.scale.grad
        module.zero_grad()
    states = {name: optimizer.state_dict() for name, optimizer in optimizers.items()}
    return {"module": {key: value.clone() for key, value in module.state_dict().items()}, "optimizers": states}


def _fit(chain: Chain, epoch: int, folder: Path) -> tuple[dict[str, Tensor], list[str]]:
    module = Scorer(chain, chain.frozen[epoch], applied=True)
    options = {"sharding": SHARDING, "replicate_tables": False, "checkpoint_format": chain.saved_as}
    trainer = make_trainer(
        OverlapEmbeddingStrategy("fused_sparse_dist", **options),
        max_epochs=epoch + 1,
        reload_dataloaders_every_n_epochs=1,
    )
    module.train_dataloader = lambda: DataLoader(_batches(dist.get_rank(), trainer.current_epoch), batch_size=None)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, ckpt_path=str(folder / f"{epoch - 1}.ckpt") if epoch else None)
    trainer.save_checkpoint(folder / f"{epoch}.ckpt")
    found = {name: trainer.strategy.table(name) for name in TABLES}
    return {**found, "scale": module.scale.detach().clone()}, [str(one.message) for one in caught]


def _problems(chain: Chain, folder: Path) -> Iterator[str]:
    expected: dict[str, Any] | None = None
    for epoch, frozen in enumerate(chain.frozen):
        expected = _train_unsharded(chain, expected, epoch)
        found, said = _fit(chain, epoch, folder)
        weights = {name: expected["module"][f"ebc.embedding_bags.{name}.weight"] for name in TABLES}
        for name, want in {**weights, "scale": expected["module"]["scale"]}.items():
            if not torch.allclose(found[name], want, rtol=1e-4, atol=1e-6):
                yield f"fit {epoch}: {name} differs by {float((found[name] - want).abs().max())}"
        if epoch and dist.get_rank() == 0:
            before = chain.frozen[epoch - 1]
            unfrozen = "frozen in the checkpoint's run (requires_grad=False) and trained now"
            for names, words in ((before - frozen, unfrozen), (frozen - before, "frozen now (requires_grad=False)")):
                text = "".join(one for one in said if words in one)
                if any((f".{name}." in text) != (name in names) for name in TABLES):
                    yield f"fit {epoch}: of {sorted(names)} is said {said}"


def differences(chains: list[Chain], folder: str) -> dict[str, list[str]]:
    found = {}
    for number, chain in enumerate(chains):
        place = Path(folder) / str(number)
        if dist.get_rank() == 0:
            place.mkdir(parents=True)
        dist.barrier()
        try:
            found[f"{number} {chain}"] = list(_problems(chain, place))
        except RuntimeError as err:
            found[f"{number} {chain}"] = [f"{type(err).__name__}: {err}"]
    return found
