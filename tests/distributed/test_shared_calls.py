"""`SharedCalls` on threads in the place of ranks, and a store in memory."""

from concurrent.futures import ThreadPoolExecutor

import pytest
import torch.distributed as dist

from lightning_overlap.distributed import SharedCalls

from .threads import two_ranks_of

ranks = two_ranks_of(SharedCalls)


def test_ranks_meet_in_every_call_of_every_stage(ranks: list[SharedCalls]) -> None:
    def go(rank: int) -> None:
        for stage in range(4):
            for call in range(stage):
                ranks[rank].meet(f"read {call}", "")
            ranks[rank].begin_shared_calls()

    with ThreadPoolExecutor(2) as pool:
        list(pool.map(go, range(2)))


@pytest.mark.parametrize("num_before", [0, 2])
def test_a_rank_that_goes_on_is_named(ranks: list[SharedCalls], num_before: int) -> None:
    with ThreadPoolExecutor(2) as pool:
        for _ in range(num_before):
            list(pool.map(lambda one: one.meet("read", ""), ranks))
        waiting = pool.submit(ranks[0].meet, "read", "Call it on all.")
        ranks[1].begin_shared_calls()
        with pytest.raises(RuntimeError, match=r"rank 0 calls read, rank 1 goes on without it\. Call it on all\."):
            waiting.result()


def test_a_rank_that_has_ended_is_named(ranks: list[SharedCalls]) -> None:
    ranks[1].end()
    with pytest.raises(RuntimeError, match="rank 1 goes on without it"):
        ranks[0].meet("read", "")


def test_different_calls_are_named(ranks: list[SharedCalls]) -> None:
    with ThreadPoolExecutor(1) as pool:
        waiting = pool.submit(ranks[0].meet, "read a", "")
        with pytest.raises(RuntimeError, match="rank 1 calls read b, rank 0 calls read a"):
            ranks[1].meet("read b", "")
        with pytest.raises(RuntimeError, match="rank 0 calls read a, rank 1 calls read b"):
            waiting.result()


def test_a_rank_that_is_late_is_told_as_late(ranks: list[SharedCalls]) -> None:
    ranks[0]._mismatches._timeout_s = 0.2
    with pytest.raises(RuntimeError, match=r"waited in its call of read, and another rank did not come within 0\.2 s"):
        ranks[0].meet("read", "")


def test_a_rank_goes_on_after_the_store_has_ended() -> None:
    """At the end of a run the rank that keeps the store may be the first to end its process."""
    server = dist.TCPStore("127.0.0.1", 0, is_master=True, wait_for_workers=False)
    client = dist.TCPStore("127.0.0.1", server.port, is_master=False)
    calls = SharedCalls(client, "run", 1, 2, timeout_s=5)
    calls.begin_shared_calls()
    del server
    later = calls.end_and_follow("after the run")
    with pytest.raises(RuntimeError, match="another rank has ended"):
        later.meet("read", "")
    later.end()
