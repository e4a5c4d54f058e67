"""What the sparse stages are told is checked when it is said."""

from __future__ import annotations

from typing import Any

import pytest

from lightning_overlap.sparse import SparseOptions


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"step": ""}, "step is the name of the module's method"),
        ({"num_threads": -1}, "num_threads is a number of threads, got -1"),
        ({"timeout_s": 0}, "timeout_s is a time to wait for other ranks, got 0"),
        *(
            ({"trains": False, "step": "test_step"} | more, "for training, and test_step does not train")
            for more in ({"num_threads": 1}, {"releases": True}, {"set_rates": lambda: None})
        ),
    ],
)
def test_options_that_cannot_be_are_refused(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        SparseOptions(**options)


def test_a_rate_that_moves_keeps_cached_tables_from_early_lookups() -> None:
    assert SparseOptions(prefetches=True).looks_up_cached
    assert not SparseOptions(prefetches=True, set_rates=lambda: None).looks_up_cached
