"""The groups that the runs of a process share."""

from __future__ import annotations

from datetime import timedelta

import torch.distributed as dist

from lightning_overlap.distributed import groups

from ..support.ranks import Ranks


def joined_by_turns() -> tuple[bool, bool, bool]:
    """Whether runs of one timeout share groups, those of another have their own, and a failed run ends the sharing."""
    joined = []
    for seconds in (31, 32, 31, 32):
        dist.barrier()
        joined.append(groups.join(timedelta(seconds=seconds)))
    dist.barrier()
    if dist.get_rank() == 0:
        groups.forget()
    dist.barrier()
    fresh = groups.join(timedelta(seconds=31))
    shared = joined[0] is joined[2] and joined[1] is joined[3]
    return shared, joined[0] is not joined[1], fresh is not joined[0]


def test_runs_of_one_timeout_share_their_groups(two_ranks: Ranks) -> None:
    """A group has threads, which gloo wakes a hundred times a second for as long as the process lives."""
    assert two_ranks.run(joined_by_turns) == [(True, True, True)] * 2
