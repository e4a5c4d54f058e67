"""`Mismatches` on threads in the place of ranks, and a store in memory."""

import threading
import time
from collections.abc import Iterator
from concurrent.futures import ThreadPoolExecutor
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_overlap.distributed import Mismatches, mismatches


@pytest.fixture
def ranks() -> Iterator[list[Mismatches]]:
    store = dist.HashStore()
    with mock.patch.object(mismatches, "LOOK_EVERY_S", 0.05):
        made = [Mismatches(store, "run", 2, timeout_s=5) for _ in range(2)]
        yield made
        for one in made:
            one.end()
    assert not [thread for thread in threading.enumerate() if thread.name == "early_lookup_mismatches"]


def test_all_ranks_leave_the_same_call_however_late_one_is(ranks: list[Mismatches]) -> None:
    for one in ranks:
        one.served("ebc", 3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks[0].all_ranks, "ebc", 4)
        time.sleep(0.3)  # several looks, which find a call that nobody was served for
        assert not first.done()
        assert ranks[1].all_ranks("ebc", 4)
        assert first.result()
        again = pool.submit(ranks[1].all_ranks, "ebc", 5)
        assert ranks[0].all_ranks("ebc", 5)
        assert again.result()


def test_a_rank_that_was_served_says_so_at_once(ranks: list[Mismatches]) -> None:
    ranks[1].served("ebc", 4)
    started = time.monotonic()
    assert not ranks[0].all_ranks("ebc", 4)
    assert time.monotonic() - started < 4
