"""All-to-alls of the backend that posts receives first. Functions that ranks run."""

from __future__ import annotations

import time
from collections.abc import Iterator
from contextlib import contextmanager
from datetime import timedelta
from typing import Any
from unittest import mock

import torch
import torch.distributed as dist

from lightning_overlap.distributed import Issue, gloo_alltoall, wrap_collectives
from lightning_overlap.distributed.gloo_alltoall import BACKEND, Exchange, ReceivesFirst
from lightning_overlap.tables.supported_modules import sharded_modules

from .cases import TABLE_WISE, Batches, Model
from .fits import make_strategy, make_trainer

_made: list[dist.ProcessGroup] = []


def _group() -> Any:
    gloo_alltoall.register()
    if not _made:
        _made.append(dist.new_group(backend=BACKEND, timeout=timedelta(seconds=20)))
    return _made[0]


def of_gloo_and_ours(shape: tuple[int, ...], dtype: torch.dtype, splits: list[list[int]] | None) -> list[torch.Tensor]:
    rank = dist.get_rank()
    mine = None if splits is None else splits[rank]
    theirs = None if splits is None else [row[rank] for row in splits]
    sent = (torch.arange(torch.Size(shape).numel()).reshape(shape) + 1000 * rank).to(dtype)
    results = []
    for group in (dist.group.WORLD, _group()):
        num = shape[0] if theirs is None else sum(theirs)
        received = torch.full((num, *shape[1:]), -1).to(dtype)
        for _ in range(3):  # the same again, some under way at once
            works = [dist.all_to_all_single(received, sent, theirs, mine, group=group, async_op=True) for _ in range(2)]
            for work in works:
                work.wait()
        results.append(received)
    return results


def order_of_posts() -> list[str]:
    group, posts = _group(), []

    class Posts:
        def recv(self, *args: Any) -> Any:
            posts.append("recv")
            return gloo.recv(*args)

        def send(self, *args: Any) -> Any:
            posts.append("send")
            return gloo.send(*args)

    gloo = group._gloo
    with mock.patch.object(group, "_gloo", Posts()):
        dist.all_to_all_single(torch.empty(4), torch.ones(4), group=group)
    return posts


def others_work() -> list[Any]:
    group, rank = _group(), dist.get_rank()
    total = torch.tensor([float(rank + 1)])
    dist.all_reduce(total, group=group)
    first = torch.tensor([float(rank)])
    dist.broadcast(first, 0, group=group)
    everyone: list[Any] = [None] * dist.get_world_size()
    dist.all_gather_object(everyone, rank, group=group)
    parts = torch.empty(1)
    dist.reduce_scatter_tensor(parts, torch.ones(dist.get_world_size()), group=group)
    dist.barrier(group=group)
    return [total.item(), first.item(), everyone, parts.item()]


def asked_of_gloo() -> list[str]:
    """Gather and reduce into one tensor; return what gloo is asked for, whatever name torch has for it."""
    group, asked = _group(), []

    class Asked:
        def __getattr__(self, name: str) -> Any:
            asked.append(name)
            return getattr(gloo, name)

    gloo = group._gloo
    with mock.patch.object(group, "_gloo", Asked()):
        gathered = torch.empty(dist.get_world_size())
        dist.all_gather_into_tensor(gathered, torch.ones(1), group=group)
        dist.reduce_scatter_tensor(torch.empty(1), gathered, group=group)
    return asked


def groups_of_a_run() -> list[bool]:
    seen = []

    class Looks(Model):
        def on_train_start(self) -> None:
            seen.append(self.trainer.strategy._groups)

    model = Looks(TABLE_WISE)
    make_trainer(make_strategy(model)).fit(model, datamodule=Batches(TABLE_WISE, 2))
    [joined] = seen
    return [isinstance(group, ReceivesFirst) for group in (joined.tables, joined.lookahead, joined.checkpoints)]


@contextmanager
def of_input_dist() -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []

    def keep(name: str, call: dict[str, Any], issue: Issue) -> dist.Work | None:
        if call["group"].group_desc == "lookahead":
            calls.append(call)
        return issue()

    with wrap_collectives(keep, ["all_to_all_single"]):
        yield calls


def dtypes_of_a_run(num_batches: int) -> tuple[list[torch.dtype], set[torch.dtype]]:
    looked_up: set[torch.dtype] = set()

    class Looks(Model):
        def on_train_start(self) -> None:
            for module in sharded_modules(self).values():
                for lookup in module._lookups:
                    lookup.register_forward_pre_hook(look)

    def look(_: Any, args: tuple[Any, ...]) -> None:
        looked_up.update((args[0].values().dtype, args[0].lengths().dtype))

    model = Looks(TABLE_WISE)
    with of_input_dist() as calls:
        make_trainer(make_strategy(model)).fit(model, datamodule=Batches(TABLE_WISE, num_batches))
    return [call["input"].dtype for call in calls], looked_up


def is_over_without_a_wait() -> tuple[bool, list[float]]:
    received = torch.zeros(2)
    work = dist.all_to_all_single(received, torch.full((2,), 1.0 + dist.get_rank()), group=_group(), async_op=True)
    deadline = time.monotonic() + 20
    while not (is_over := work.is_completed()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_over, received.tolist()


def waits_in_vain() -> str:
    """Wait for a rank that sends nothing."""
    group = _group()
    if dist.get_rank() != 0:
        return ""
    work = group._gloo.recv([torch.empty(3)], 1, 999_999)
    exchange = Exchange([work], (torch.empty(1), torch.empty(1)))
    texts = []
    for _ in range(2):
        try:
            exchange.wait(timedelta(milliseconds=200))
        except RuntimeError as error:
            texts.append(type(error).__name__)
    return f"{texts} {exchange.is_completed()}"
