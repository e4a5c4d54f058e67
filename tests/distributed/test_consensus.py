"""When ranks that know how many batches they have poll each other."""

import itertools
from types import SimpleNamespace
from unittest import mock

from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.distributed import MAX_INTERVAL, PollInterval, consensus
from lightning_overlap.distributed.consensus import POLL_EVERY_S

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
