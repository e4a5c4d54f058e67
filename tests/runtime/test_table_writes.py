"""Tables written between two steps: early lookups are left aside on all ranks, or one rank says that it cannot."""

from collections.abc import Callable, Sequence
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_overlap.runtime.deferred_updates import DeferredUpdates
from lightning_overlap.runtime.interfaces import InFlightBatch
from lightning_overlap.runtime.lookup_order import LookupOrder
from lightning_overlap.runtime.streams import Streams
from lightning_overlap.runtime.table_writes import TableWrites


class Tables:
    def __init__(self) -> None:
        self.written = False
        self.left: list[int] = []

    def is_overwritten(self, batches: Sequence[InFlightBatch]) -> bool:
        return self.written

    def leave_overwritten(self, batches: Sequence[InFlightBatch]) -> None:
        self.left += [batch.index for batch in batches]


def writes_of(tables: Any, any_rank: Callable[[bool], bool] | None, num_asks: int) -> TableWrites:
    order = LookupOrder(Streams(), rank=1)
    updates = DeferredUpdates(tables, order)
    queue: Any = SimpleNamespace(ahead=lambda: [InFlightBatch(7, None), InFlightBatch(8, None)])
    return TableWrites(tables, order, updates, queue, any_rank=any_rank, num_asks=num_asks)


@pytest.mark.parametrize("written", [False, True])
def test_on_one_rank_it_knows_by_itself(written: bool) -> None:
    tables = Tables()
    tables.written = written
    writes_of(tables, None, 0).begin_iteration()
    assert tables.left == ([7, 8] if written else [])


@pytest.mark.parametrize("written", [False, True])
def test_all_ranks_leave_them_aside_if_one_has_written(written: bool) -> None:
    tables, asked = Tables(), []
    tables.written = written
    writes_of(tables, lambda mine: bool(asked.append(mine)) or True, 1).begin_iteration()
    assert asked == [written]
    assert tables.left == [7, 8]


def test_a_rank_that_writes_when_nobody_asks_says_what_to_do() -> None:
    tables, asked = Tables(), []
    writes = writes_of(tables, lambda mine: bool(asked.append(mine)) or mine, 1)
    writes.begin_iteration()
    writes.begin_iteration()
    assert asked == [False]  # once, in front of the first batch
    tables.written = True
    with pytest.raises(RuntimeError, match=r"tables on rank 1 were written .* Call trainer.strategy.tables_changed"):
        writes.begin_iteration()
    writes.ask()  # an evaluation comes
    writes.begin_iteration()
    assert (asked, tables.left) == ([False, True], [7, 8])
