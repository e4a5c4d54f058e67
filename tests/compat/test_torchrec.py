"""What TorchRec's private names have to mean: an exchange of ids gives what TorchRec's own all-to-all gives."""

from collections.abc import Callable

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from lightning_overlap.compat import torchrec

from ..support.ranks import Ranks
from . import ids
from .meanings import Meanings

pytestmark = pytest.mark.smoke
meanings = Meanings()

EXCHANGES = st.integers(1, 3).flatmap(
    lambda size: st.builds(
        ids.Exchange,
        features=st.tuples(*[st.integers(0, 3)] * size).filter(any),
        batch_sizes=st.one_of(
            st.tuples(*[st.integers(0, 3)] * size), st.integers(0, 3).map(lambda batch_size: (batch_size,) * size)
        ),
        weighted=st.booleans(),
        stagger=st.sampled_from([1, size]),
        seed=st.integers(0, 1000),
    )
)


@meanings.of(*(f"KJTAllToAll.{name}" for name in torchrec.PRIVATE_NAMES["KJTAllToAll"]))
@meanings.of(*(f"KJTAllToAllTensorsAwaitable.{name}" for name in torchrec.PRIVATE_NAMES["KJTAllToAllTensorsAwaitable"]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exchange=EXCHANGES)
def test_ids_arrive_as_by_torchrecs_all_to_all(get_ranks: Callable[..., Ranks], exchange: ids.Exchange) -> None:
    for expected, *found in get_ranks(len(exchange.features)).run(ids.by_both, exchange):
        for ours in found:
            assert ours == expected


def test_each_listed_name_has_a_test() -> None:
    assert meanings.without_test(torchrec.PRIVATE_NAMES) == set()
