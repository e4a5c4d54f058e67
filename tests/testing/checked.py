"""`check_module` on modules that keep the laws, and on some broken on purpose. Functions that ranks run."""

from __future__ import annotations

import itertools
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_overlap import Schedule
from lightning_overlap.testing import ModuleReport, check_module

from ..support.cases import TABLE_WISE, Batches, Case, Model, make_batch, make_plan
from ..support.fits import mode_and_options

NUM = 12


def check(case: Case, pipeline: str | Schedule, module: type[Model] = Model, **options: Any) -> ModuleReport:
    plan = make_plan(case, Model(case), dist.get_world_size() if dist.is_initialized() else 1)
    rank = dist.get_rank() if dist.is_initialized() else 0
    batches = [make_batch(case, index, rank) for index in range(NUM)]
    mode, options = mode_and_options(pipeline, options)
    return check_module(lambda: module(case), batches, mode, sharding=plan, **options)


def what_is_said(case: Case, pipeline: str | Schedule, module: type[Model], **options: Any) -> str:
    try:
        return str(check(case, pipeline, module, **options))
    except AssertionError as err:
        return f"AssertionError: {err}"


class ClaimsToBeExact(Schedule):
    staleness = 0  # type: ignore[assignment]


class ClaimsMore(Schedule):
    staleness = 2  # type: ignore[assignment]


_count = itertools.count()


class NeverTwiceAlike(Model):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * (1 + next(_count) / 100)


class BatchesToValidate(Batches):
    def val_dataloader(self) -> DataLoader:
        return DataLoader([make_batch(self.case, 90, self.trainer.global_rank)], batch_size=None)


class FollowsItsValidation(Model):
    validated = torch.zeros(())

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss * (1 + self.validated.detach().clone())


class LeavesAForward(Model):
    def on_train_end(self) -> None:
        ebc: Any = self.ebc
        ebc.forward = print


class LeavesOneForward(LeavesAForward):
    def on_train_end(self) -> None:
        if dist.get_rank() == 1:
            super().on_train_end()


class SendsInItsOwnOrder(Model):
    def on_fit_start(self) -> None:
        self.groups = [dist.new_group(), dist.new_group()]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx == 3:
            groups = self.groups if dist.get_rank() == 0 else self.groups[::-1]
            for work in [dist.all_reduce(torch.zeros(1), group=group, async_op=True) for group in groups]:
                work.wait()
        loss: Tensor = super().training_step(batch, batch_idx)
        return loss


def check_by_default_group(pipeline: str) -> str:
    before = dist.group.WORLD
    report = check(TABLE_WISE, pipeline)
    assert dist.group.WORLD is before
    return str(report)
