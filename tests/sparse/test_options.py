"""What the sparse stages are told is checked when it is said."""

from __future__ import annotations

import pytest

from lightning_overlap.sparse import SparseOptions


def test_no_time_to_wait_for_other_ranks_is_refused() -> None:
    with pytest.raises(ValueError, match="timeout_s is a time to wait for other ranks, got 0"):
        SparseOptions(timeout_s=0)


def test_a_rate_that_moves_keeps_cached_tables_from_early_lookups() -> None:
    assert SparseOptions(prefetches=True).looks_up_cached
    assert not SparseOptions(prefetches=True, set_rates=lambda: None).looks_up_cached
