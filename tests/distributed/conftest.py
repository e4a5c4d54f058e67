"""Rank processes, kept for the session: starting them is most of a distributed test's time."""

from __future__ import annotations

from collections.abc import Callable, Iterator

import pytest

from .ranks import Ranks


@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[tuple[int, str, int], Ranks]]:
    pools: dict[tuple[int, str, int], Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def get_ranks(_pools: dict[tuple[int, str, int], Ranks]) -> Callable[..., Ranks]:
    """Return the rank processes of a world size, started again if an earlier test ended them."""

    def get(world_size: int, device_type: str = "cpu", num_nodes: int = 1) -> Ranks:
        key = (world_size, device_type, num_nodes)
        if key not in _pools or not _pools[key].alive:
            _pools[key] = Ranks(world_size, device_type, num_nodes)
        return _pools[key]

    return get


@pytest.fixture(params=[1, 2], ids=["1rank", "2ranks"])
def ranks(request: pytest.FixtureRequest, get_ranks: Callable[..., Ranks]) -> Ranks:
    """One rank, then two, on the CPU."""
    return get_ranks(request.param)


@pytest.fixture
def two_ranks(get_ranks: Callable[..., Ranks]) -> Ranks:
    """Two ranks on the CPU."""
    return get_ranks(2)
