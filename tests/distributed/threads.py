"""Threads in the place of ranks, and a store in memory."""

import threading
from collections.abc import Iterator
from typing import Any, TypeVar
from unittest import mock

import pytest
import torch.distributed as dist

from lightning_overlap.distributed import Mismatches, SharedCalls, mismatches

_Kind = TypeVar("_Kind", Mismatches, SharedCalls)


def two_ranks_of(kind: type[_Kind]) -> Any:
    """Return a fixture of two ranks' objects of a class; none of their threads is left."""

    @pytest.fixture
    def ranks() -> Iterator[list[_Kind]]:
        store = dist.HashStore()
        with mock.patch.object(mismatches, "LOOK_EVERY_S", 0.05):
            made = [kind(store, "run", rank, 2, timeout_s=5) for rank in range(2)]
            yield made
            for one in made:
                one.end()
        assert not [thread for thread in threading.enumerate() if thread.name == "early_lookup_mismatches"]

    return ranks
