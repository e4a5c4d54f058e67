"""When ranks that know how many batches they have poll each other."""

import itertools
import pickle
import re
from types import SimpleNamespace
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.distributed import (
    MAX_INTERVAL,
    PollInterval,
    check_none_batches,
    consensus,
    gather_if_unequal,
    gather_on_rank_zero,
)
from lightning_overlap.distributed.consensus import POLL_EVERY_S

from ..support.ranks import Ranks

SECONDS = st.floats(1e-4, 2.0)  # that a batch takes


@given(st.integers(1, 1500), st.lists(SECONDS, min_size=1, max_size=3))
def test_all_ranks_poll_about_the_same_batches_and_about_the_last(num_batches: int, per_batch_s: list[float]) -> None:
    """No rank can run out of batches between two polls, unless most of those left are None."""
    ranks = [PollInterval() for _ in per_batch_s]
    polled: list[int] = []
    now_s = 0.0
    with mock.patch.object(consensus, "time", SimpleNamespace(monotonic=lambda: now_s)):
        for index in range(num_batches):
            due = {rank.due(index) for rank in ranks}
            assert len(due) == 1
            if due.pop():
                polled.append(index)
                requested = []
                for rank, seconds in zip(ranks, per_batch_s, strict=True):
                    now_s = index * seconds  # each host has its own clock
                    requested.append(rank.note_poll(index))
                for rank in ranks:
                    rank.note_result(max(requested), num_batches)
    assert polled[0] == 0
    assert polled[-1] == num_batches - 1
    before = 1
    for index, following in itertools.pairwise(polled):
        interval = following - index
        assert interval <= max(1, (num_batches - index) // 2)
        assert interval <= min(MAX_INTERVAL, 2 * before)
        assert interval <= max(1, int(POLL_EVERY_S / max(per_batch_s)) + 1)  # a stop is heard of in time
        before = max(before, interval)


@given(st.lists(st.integers(-1, 4), min_size=1, max_size=5))
def test_ranks_whose_latest_none_batches_differ_are_named(latest: list[int]) -> None:
    """One that has the latest of all, and one that lacks it."""
    if len(set(latest)) == 1:
        check_none_batches(dict(enumerate(latest)))
        return
    with pytest.raises(RuntimeError, match="the ranks have different None batches") as caught:
        check_none_batches(dict(enumerate(latest)))
    found = re.search(r"so far is batch (\d) on rank (\d), (none|batch (\d)) on rank (\d)\.", str(caught.value))
    assert found is not None
    number, rank, _, theirs, other = found.groups()
    assert int(number) == latest[int(rank)] == max(latest)
    assert int(theirs or -1) == latest[int(other)] < int(number)


def gathered(numbers: dict[str, list[int]]) -> Any:
    rank, found, group = dist.get_rank(), list[Any](), dist.group.WORLD
    assert group is not None
    with mock.patch.object(dist, "all_gather_object", wraps=dist.all_gather_object) as gather:
        for of_ranks in numbers.values():
            value = (of_ranks[rank], ("a", [of_ranks[rank]] * 100))
            found.append([one[0] for one in gather_if_unequal(value, group)])
        sizes = [len(pickle.dumps(call.args[1])) for call in gather.call_args_list]
    on_zero = gather_on_rank_zero({"rank": rank}, group)
    return [*found, sizes, on_zero]


def test_equal_objects_are_not_sent_and_others_come_from_all_ranks(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(gathered, {"equal": [3, 3], "other": [3, 4]})
    assert first[:2] == second[:2] == [[3], [3, 4]]
    of_equal, *of_others = first[2]
    assert of_equal < 100
    assert len(of_others) == 2, "digests, then the objects"
    assert (first[3], second[3]) == ([{"rank": 0}, {"rank": 1}], [])
