"""Random fits trained unsharded, by each rank alone: batches of all ranks, one backward of the mean of their losses.

Imports nothing of the package under test.
"""

import dataclasses
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..support.reference import Result
from .random_fits import Fit
from .random_models import Net, make_batch, order_of, seed_dropout

TOLERANCE = 1e-4
"""Rounding is 1e-6 in most fits; a wrong column is off by 0.01 to 1 in the first step."""


class _Loop:
    def __init__(self, fit: Fit) -> None:
        parts = tuple(dataclasses.replace(part, checkpoint="") for part in fit.parts)
        self.fit = dataclasses.replace(fit, parts=parts)
        self.module = Net(self.fit)
        self.optimizer = self.module.configure_optimizers()
        self.losses: list[Tensor] = []  # of this rank
        self.num_steps = 0
        self.generators: dict[int, Tensor] = {}  # by rank: the state of its generator, which dropout draws from

    def train(self) -> None:
        for rank in range(self.fit.num_ranks):
            seed_dropout(self.fit, rank)
            self.generators[rank] = torch.get_rng_state()
        for epoch in range(self.fit.epochs):
            order = order_of(self.fit, epoch)
            for index in range(self.fit.num_batches):
                if self.num_steps != self.fit.max_steps:
                    self._step(index, order[index])

    def _forward(self, index: int, number: int, rank: int) -> Tensor | None:
        torch.set_rng_state(self.generators[rank])
        loss = self.module.training_step(make_batch(self.fit, number, rank), index)
        self.generators[rank] = torch.get_rng_state()
        return loss

    def _step(self, index: int, number: int) -> None:
        fit, module = self.fit, self.module
        if fit.manual or index % fit.accumulate == 0:
            self.optimizer.zero_grad()
        losses = [self._forward(index, number, rank) for rank in range(fit.num_ranks)]
        self.losses.append(module.losses[dist.get_rank() - fit.num_ranks])
        given = [loss for loss in losses if loss is not None]
        if given:
            (torch.stack(given).sum() / fit.num_ranks / fit.accumulate).backward()
        last = (index + 1) % fit.accumulate == 0 or index + 1 == fit.num_batches
        if last and not module.skips(index):
            if fit.clip is not None:
                torch.nn.utils.clip_grad_norm_(self.optimizer.param_groups[0]["params"], fit.clip)
            self.optimizer.step()
            self.num_steps += 1
        if fit.validate_every and (index + 1) % fit.validate_every == 0:
            module.eval()
            with torch.no_grad():
                for number in range(2):
                    module.validation_step(make_batch(fit, 1000 + number, dist.get_rank()), number)
                    self.losses.append(module.losses[-1])
            module.train()


def differences_from_unsharded(fit: Fit, trained: Result) -> list[str]:
    """Return which losses, tables and dense weights of a fit are not those of unsharded training; [] if not defined."""
    if not fit.is_plain_arithmetic:
        return []
    loop = _Loop(fit)
    loop.train()
    weights: dict[str, Any] = dict(loop.module.named_parameters())
    tables = {name.split(".")[-2]: weight for name, weight in weights.items() if ".embedding" in name}
    found = [
        f"losses from step {step}, unsharded {theirs:.6g} and not {mine:.6g}"
        for step, (mine, theirs) in enumerate(zip(trained.losses.tolist(), loop.losses, strict=True))
        if not _close(torch.tensor(mine), theirs)
    ][:1]
    for name, shard in trained.tables.items():
        table, _, offsets = name.partition(" ")
        row, column = map(int, offsets.strip("[]").split(",")) if offsets else (0, 0)
        same = tables[table].detach()[row : row + shard.shape[0], column : column + shard.shape[1]]
        found += [] if _close(shard, same) else [f"tables {name}, unsharded"]
    found += [f"dense {name}, unsharded" for name, one in trained.dense.items() if not _close(one, weights[name])]
    return found


def _close(mine: Tensor, theirs: Tensor) -> bool:
    return torch.allclose(mine, theirs.detach(), rtol=TOLERANCE, atol=TOLERANCE)
