"""The groups that the runs of a process share."""

from __future__ import annotations

import sys
from datetime import timedelta
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_overlap.distributed import gloo_device, groups

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


def num_receivers() -> int:
    """Return how many threads of this process receive for gloo."""
    names = [(task / "comm").read_text().strip() for task in Path("/proc/self/task").iterdir()]
    return names.count("gloo_tcp_loop")


def exchanged_on_one_device() -> tuple[int, int, list[float], bool]:
    """How many threads that receive new groups add, with a device of their own and shared, and that both work."""
    world, timeout = dist.group.WORLD, timedelta(seconds=30)
    assert world is not None
    own_class = dist.distributed_c10d.ProcessGroupGloo

    before = num_receivers()
    apart = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
    between = num_receivers()
    with gloo_device.shared_with(world):
        shared = [dist.new_group(backend="gloo", timeout=timeout) for _ in range(2)]
    after = num_receivers()
    ones = torch.ones(1)
    for group in (*shared, *apart):  # all of them under way at once, on one device or on several
        dist.all_reduce(ones, group=group)
    sums = [float(ones)]
    for group in apart + shared:
        dist.destroy_process_group(group)
    dist.all_reduce(ones)  # the device outlives the groups that borrowed it
    sums.append(float(ones))
    return between - before, after - between, sums, dist.distributed_c10d.ProcessGroupGloo is own_class


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the names of threads on Linux only")
def test_groups_share_the_device_of_another(two_ranks: Ranks) -> None:
    assert two_ranks.run(exchanged_on_one_device) == [(2, 0, [16.0, 32.0], True)] * 2


def made_where_the_default_is_another() -> tuple[int, float]:
    """Groups of gloo where the default one is not (NCCL's, say): how many threads that receive three of them add."""

    class Nccl:
        def _get_backend(self, device: torch.device) -> None:
            raise RuntimeError(f"no backend for {device}")

    before = num_receivers()
    with gloo_device.shared_with(Nccl()):  # type: ignore[arg-type]
        groups_made = [dist.new_group(backend="gloo", timeout=timedelta(seconds=30)) for _ in range(3)]
    added = num_receivers() - before
    ones = torch.ones(1)
    for group in groups_made:
        dist.all_reduce(ones, group=group)
        dist.destroy_process_group(group)
    return added, float(ones)


@pytest.mark.skipif(sys.platform != "linux", reason="/proc tells the names of threads on Linux only")
def test_groups_share_the_device_of_the_first_where_the_default_has_none(two_ranks: Ranks) -> None:
    assert two_ranks.run(made_where_the_default_is_another) == [(1, 8.0)] * 2


def made_without_options() -> float:
    """A torch that has no options for gloo's groups: the groups have devices of their own."""
    world = dist.group.WORLD
    assert world is not None
    without = mock.patch.object(gloo_device, "PRIVATE_NAMES", ("_Options", "_no_such_option"))
    with without, gloo_device.shared_with(world):
        group = dist.new_group(backend="gloo", timeout=timedelta(seconds=30))
    ones = torch.ones(1)
    dist.all_reduce(ones, group=group)
    dist.destroy_process_group(group)
    return float(ones)


def test_groups_are_made_where_torch_has_no_options(two_ranks: Ranks) -> None:
    assert two_ranks.run(made_without_options) == [2.0, 2.0]
