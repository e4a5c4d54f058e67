"""The backend whose all-to-alls post receives first: it gives what gloo gives."""

import contextlib
import functools
import time
from datetime import timedelta
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_overlap import MODES
from lightning_overlap.distributed import gloo_alltoall
from lightning_overlap.distributed.gloo_alltoall import Exchange, ReceivesFirst

from ..support import cases, reference
from ..support.fits import fit, make_strategy, make_trainer
from ..support.pairs import in_turn
from ..support.ranks import Ranks


@functools.cache
def _group() -> Any:
    return dist.new_group(backend=gloo_alltoall.register(), timeout=timedelta(seconds=20))


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


def _watched(group: Any) -> Any:
    return mock.patch.object(group, "gloo", mock.Mock(wraps=group.gloo))


def order_of_posts() -> list[str]:
    with _watched(_group()) as gloo:
        dist.all_to_all_single(torch.empty(4), torch.ones(4), group=_group())
    return [name for name, *_ in gloo.mock_calls]


def other_collectives() -> tuple[list[Any], list[str]]:
    group, rank = _group(), dist.get_rank()
    total, first, part = torch.tensor([float(rank + 1)]), torch.tensor([float(rank)]), torch.empty(1)
    gathered = torch.empty(dist.get_world_size())
    dist.all_reduce(total, group=group)
    dist.broadcast(first, 0, group=group)
    dist.barrier(group=group)
    with _watched(group) as gloo:
        dist.all_gather_into_tensor(gathered, torch.tensor([float(rank)]), group=group)
        dist.reduce_scatter_tensor(part, torch.ones(dist.get_world_size()), group=group)
    asked = [name.strip("_").replace("_", "") for name, *_ in gloo.mock_calls]
    return [total.item(), first.item(), gathered.tolist(), part.item()], asked


def groups_of_a_run() -> list[bool]:
    seen = []

    class Looks(cases.Model):
        def on_train_start(self) -> None:
            seen.append(self.trainer.strategy._groups)

    model = Looks(cases.TABLE_WISE)
    make_trainer(make_strategy(model)).fit(model, datamodule=cases.Batches(cases.TABLE_WISE, 2))
    [joined] = seen
    return [isinstance(group, ReceivesFirst) for group in (joined.tables, joined.lookahead, joined.checkpoints)]


def is_over_without_a_wait() -> tuple[bool, list[float]]:
    received = torch.zeros(2)
    work = dist.all_to_all_single(received, torch.full((2,), 1.0 + dist.get_rank()), group=_group(), async_op=True)
    deadline = time.monotonic() + 20
    while not (is_over := work.is_completed()) and time.monotonic() < deadline:
        time.sleep(0.01)
    return is_over, received.tolist()


def waits_in_vain() -> str:
    group = _group()
    if dist.get_rank() != 0:
        return ""
    work = group.gloo.recv([torch.empty(3)], 1, 999_999)
    exchange = Exchange([work], (torch.empty(1), torch.empty(1)))
    texts = []
    for _ in range(2):
        try:
            exchange.wait(timedelta(milliseconds=200))
        except RuntimeError as error:
            texts.append(type(error).__name__)
    return f"{texts} {exchange.is_completed()}"


@pytest.mark.parametrize(
    ("shape", "splits", "dtype"),
    [
        ((4, 3), None, torch.bfloat16),
        ((0,), None, torch.int32),
        ((5,), [[2, 3], [4, 1]], torch.float32),
        ((5, 2), [[0, 5], [5, 0]], torch.int64),
        ((2,), [[0, 2], [0, 2]], torch.int32),
    ],
    ids=str,
)
def test_gives_what_gloo_gives(
    two_ranks: Ranks, shape: tuple[int, ...], splits: list[list[int]] | None, dtype: torch.dtype
) -> None:
    for gloos, ours in two_ranks.run(of_gloo_and_ours, shape, dtype, splits):
        assert torch.equal(gloos, ours)


def test_receives_are_posted_before_sends(two_ranks: Ranks) -> None:
    assert two_ranks.run(order_of_posts) == [["recv", "send"]] * 2


def test_other_collectives_are_gloos(two_ranks: Ranks) -> None:
    """Also by the names that torch 2.13 calls them by; the base class would hold Python's lock meanwhile."""
    for results, asked in two_ranks.run(other_collectives):
        assert results == [3.0, 0.0, [0.0, 1.0], 2.0]
        assert asked in (["allgatherbase", "reducescatterbase"], ["allgathersingle", "reducescattersingle"])


@pytest.mark.parametrize("num_nodes", [1, 2])
def test_a_run_over_several_hosts_uses_it_for_tables_and_input_dist(num_nodes: int, get_ranks: Any) -> None:
    between_hosts = num_nodes > 1
    ranks = get_ranks(2, num_nodes=num_nodes)
    assert ranks.run(groups_of_a_run) == [[between_hosts, between_hosts, False]] * 2


@pytest.mark.parametrize(
    ("case", "pipeline"),
    in_turn(
        [cases.MIXED, cases.SEQUENCE, cases.TWO_COLLECTIONS, cases.COLUMN_WISE, cases.EMPTY_FEATURE],
        [name for name, mode in MODES.items() if mode.staleness == 0],
    ),
    ids=lambda value: getattr(value, "name", value),
)
def test_two_hosts_train_as_the_plain_loop(case: cases.Case, pipeline: str, get_ranks: Any) -> None:
    ranks = get_ranks(2, num_nodes=2)
    actual = ranks.run(fit, case, pipeline)
    assert reference.differences(actual, reference.on_ranks(ranks, case)) == [[], []]


def test_an_exchange_is_over_without_a_wait(two_ranks: Ranks) -> None:
    assert two_ranks.run(is_over_without_a_wait) == [(True, [1.0, 2.0])] * 2


@pytest.mark.slow
def test_everyone_who_waits_hears_of_a_failure() -> None:
    with contextlib.closing(Ranks(2)) as ranks:  # of its own: the group is of no more use
        text, _ = ranks.run(waits_in_vain)
    assert text.startswith("['RuntimeError', 'RuntimeError']") or text.startswith("['DistBackendError'")
    assert text.endswith("True")
