"""Checkpoint folders in S3, by its own client and a server on this host (moto's), with kills."""

import uuid
from collections.abc import Iterator
from typing import Any

import pytest
from hypothesis import Phase, given, settings
from hypothesis import strategies as st

from ..support.ranks import RankError
from . import s3_server
from .stores import fit, names_in, step_of


def fit_at(endpoint: str, address: str, how: str, num_steps: int, **options: Any) -> tuple[int, int]:
    with s3_server.uses(endpoint):
        return fit(how, num_steps, address=address, **options)


def sums_at(endpoint: str, address: str) -> dict[int, float]:
    """Read all checkpoints at an address, which have to be whole; return the sums of weights by step."""
    sums: dict[int, set[float]] = {}
    with s3_server.uses(endpoint):
        for name in names_in(address):
            step_of(f"{address}/{name}", sums)
    assert all(len(of_step) == 1 for of_step in sums.values())
    return {step: of_step.pop() for step, of_step in sums.items()}


@pytest.fixture(scope="module")
def s3() -> Iterator[str]:
    if not s3_server.find_packages():
        pytest.skip("no S3 server: `make s3-server` installs moto and s3fs")
    with s3_server.server() as endpoint:
        yield endpoint


@pytest.mark.slow
@pytest.mark.parametrize("how", ["sharded", "async"])
def test_a_rank_that_is_killed_while_s3_writes(get_ranks: Any, s3: str, how: str) -> None:
    """At any change of the store, before or after it: what is left is whole, and "last" goes on from the newest."""
    num_steps, at = 4, f"s3://{s3_server.BUCKET}"
    get_ranks(2).run(fit_at, s3, f"{at}/{how}", how, num_steps, save_last=False, save_top_k=-1)
    [expected] = get_ranks(1).run(sums_at, s3, f"{at}/{how}")
    assert len(set(expected.values())) == num_steps

    @settings(max_examples=2, database=None, phases=[Phase.generate])  # each takes seconds
    @given(st.integers(0, 1), st.integers(1, 80), st.booleans())
    def kill(rank: int, num: int, before: bool) -> None:
        folder, ranks = uuid.uuid4(), get_ranks(2)
        s3_server.kill_at(s3, ranks.pids[rank], num, before)
        with pytest.raises(RankError):
            ranks.run(fit_at, s3, f"{at}/{folder.hex}", how, num_steps)
        [left] = get_ranks(1).run(sums_at, s3, f"{at}/{folder.hex}")
        assert left.items() <= expected.items()
        newest = max(left, default=0)
        for began, _ in get_ranks(2).run(fit_at, s3, f"{at}/{folder.hex}", how, num_steps + 1, resume=True):
            assert began in {newest, newest - 1}

    kill()
