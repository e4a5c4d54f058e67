"""Tables written between two steps: early lookups are left aside on all ranks, or one rank says that it cannot."""

from unittest import mock

import pytest

from lightning_overlap.runtime import Streams, Telemetry
from lightning_overlap.runtime.deferred_updates import DeferredUpdates
from lightning_overlap.runtime.table_writes import TableWrites

AHEAD = [mock.sentinel.batch7, mock.sentinel.batch8]


def writes_of(sparse: mock.Mock, any_rank: mock.Mock | None, num_polls: int) -> TableWrites:
    streams, batches = Streams(), mock.Mock(**{"ahead.return_value": AHEAD})
    updates = DeferredUpdates(sparse, streams, Telemetry())
    return TableWrites(sparse, updates, batches, streams, any_rank=any_rank, num_polls=num_polls, rank=1)


@pytest.mark.parametrize("any_rank", [None, mock.Mock(return_value=True)], ids=["1rank", "2ranks"])
@pytest.mark.parametrize("written", [False, True])
def test_lookups_are_left_aside_where_any_rank_has_written(written: bool, any_rank: mock.Mock | None) -> None:
    sparse = mock.Mock(**{"are_overwritten.return_value": written})
    writes_of(sparse, any_rank, 1).begin_iteration()
    if any_rank is not None:
        any_rank.assert_called_with(written)
    assert sparse.drop_overwritten.mock_calls == [mock.call(AHEAD)] * (written or any_rank is not None)


def test_a_rank_that_writes_between_two_polls_gets_an_error() -> None:
    sparse, any_rank = mock.Mock(**{"are_overwritten.return_value": False}), mock.Mock(side_effect=bool)
    writes = writes_of(sparse, any_rank, 1)
    writes.begin_iteration()
    writes.begin_iteration()
    any_rank.assert_called_once_with(False)  # in front of the first batch
    sparse.are_overwritten.return_value = True
    with pytest.raises(RuntimeError, match=r"tables on rank 1 were written .* Call trainer.strategy.tables_changed"):
        writes.begin_iteration()
    sparse.drop_overwritten.assert_not_called()
    writes.poll_next()  # an evaluation comes
    writes.begin_iteration()
    any_rank.assert_called_with(True)
    sparse.drop_overwritten.assert_called_once_with(AHEAD)
