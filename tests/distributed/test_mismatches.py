"""`Mismatches` on threads in the place of ranks, and a store in memory."""

import json
import time
from concurrent.futures import ThreadPoolExecutor
from typing import Any

import pytest
import torch.distributed as dist

from lightning_overlap.distributed import Mismatches
from lightning_overlap.distributed.stores import FAILED, REQUESTS_PER_S

from .threads import two_ranks_of

ranks = two_ranks_of(Mismatches)


def test_all_ranks_leave_the_same_call_however_late_one_is(ranks: list[Mismatches]) -> None:
    for one in ranks:
        one.passed(("ebc",), 3)
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks[0].other, ("ebc",), 4)
        time.sleep(0.3)  # several looks, which find a call that nobody was served for
        assert not first.done()
        assert ranks[1].other(("ebc",), 4) is None
        assert first.result() is None
        again = pool.submit(ranks[1].other, ("ebc",), 5)
        assert ranks[0].other(("ebc",), 5) is None
        assert again.result() is None


def test_a_rank_that_was_served_says_so_at_once(ranks: list[Mismatches]) -> None:
    ranks[1].passed(("ebc",), 4)
    started = time.monotonic()
    other = ranks[0].other(("ebc",), 4)
    assert other is not None
    assert (other.rank, other.what) == (1, None)
    assert time.monotonic() - started < 4


def test_a_rank_that_has_ended_has_left_its_answer(ranks: list[Mismatches]) -> None:
    """It goes on where it waits for nobody, in the last batch of an evaluation."""
    ranks[1].passed(("ebc",), 4)
    ranks[1].end()
    other = ranks[0].other(("ebc",), 4)
    assert other is not None
    assert (other.rank, other.what) == (1, None)


def test_ranks_that_do_different_unusual_things_hear_of_each_other(ranks: list[Mismatches]) -> None:
    with ThreadPoolExecutor(1) as pool:
        first = pool.submit(ranks[0].other, ("call", 1), 4, "ebc")
        mine, theirs = ranks[1].other(("call", 1), 4, "second"), first.result()
    assert mine is not None
    assert theirs is not None
    assert (mine.rank, mine.what, theirs.rank, theirs.what) == (0, "ebc", 1, "second")


def test_a_rank_that_fails_is_not_waited_for(ranks: list[Mismatches]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[0].other, ("call", 1), 4, "ebc", waits="before its call of 'ebc'")
        ranks[1]._store.add(FAILED, 1)  # as `groups.forget` does
        with pytest.raises(RuntimeError, match=r"for which this rank waited before its call of 'ebc'\.$"):
            waiting.result()


def test_a_rank_that_is_late_is_told_as_late(ranks: list[Mismatches]) -> None:
    ranks[0]._timeout_s = 0.2
    with pytest.raises(
        RuntimeError, match=r"waited after its forward in step 4, and another rank did not come within 0\.2"
    ):
        ranks[0].other(("call", 1), 4, waits="after its forward")


class Requests:
    """A store in memory that counts what it is asked, while the clock runs only in sleeps."""

    def __init__(self, patch: pytest.MonkeyPatch) -> None:
        self.store, self.num, self.now_s = dist.HashStore(), 0, 0.0
        patch.setattr(time, "monotonic", lambda: self.now_s)
        patch.setattr(time, "sleep", self._sleep)

    def _sleep(self, seconds: float) -> None:
        self.now_s += seconds

    def __getattr__(self, name: str) -> Any:
        self.num += 1
        return getattr(self.store, name)


@pytest.mark.parametrize("num_ranks", [2, 1024])
def test_waiting_ranks_leave_the_store_time(monkeypatch: pytest.MonkeyPatch, num_ranks: int) -> None:
    requests: Any = Requests(monkeypatch)
    with pytest.raises(RuntimeError, match="did not come"):
        Mismatches(requests, "run", 0, num_ranks, timeout_s=60.0).other(("call", 1), 4, "ebc")
    assert requests.num * num_ranks / 60.0 <= 1.1 * REQUESTS_PER_S


def test_ranks_that_wait_for_the_same_are_listed_once(monkeypatch: pytest.MonkeyPatch) -> None:
    requests: Any = Requests(monkeypatch)
    for rank in range(10):
        with pytest.raises(RuntimeError, match="did not come"):
            Mismatches(requests, "run", rank, 20, timeout_s=1.0).other(("call", 1), 4, "ebc")
    assert len(json.loads(requests.store.get("run/waiting"))) == 1


def test_the_store_does_not_grow(ranks: list[Mismatches]) -> None:
    def go(rank: int) -> None:
        for step in range(20):
            assert ranks[rank].other(("call", 1), step) is None

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(go, range(2)))
    assert ranks[0]._store.num_keys() < 10
