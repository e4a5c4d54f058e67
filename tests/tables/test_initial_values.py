"""What rank 0 alone has loaded is what all ranks begin with, as under DistributedDataParallel."""

from typing import Any

from hypothesis import given
from hypothesis import strategies as st

from ..support.draws import few
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from . import initial_values
from .initial_values import ENTRIES, HOOKS
from .supported_modules import CASES, FOREIGN


def test_kinds_of_modules(two_ranks: Ranks) -> None:
    """Feature processors with weights and buffers, managed collisions, towers, data-parallel tables and others."""
    trained = [name for name in [*CASES, *FOREIGN] if name != "hashed"]
    cases = [
        *[(name, entry, "__init__") for name, entry in in_turn(trained, ENTRIES)],
        *[("feature_processors_with_buffers", entry, hook) for hook, entry in in_turn(HOOKS, ENTRIES)],
    ]
    for found in two_ranks.run(initial_values.of_kinds, cases):
        assert {case: names for case, names in found.items() if names} == {}


@st.composite
def _cases(draw: Any) -> dict[str, Any]:
    sequences = draw(st.booleans())
    kinds = ["row_wise", "column_wise", "table_wise", *([] if sequences else ["replicated", "data_parallel"])]
    tables, width = [], draw(st.sampled_from([8, 16]))
    for kind in draw(st.lists(st.sampled_from(kinds), min_size=1, max_size=4)):
        half = kind not in ("replicated", "data_parallel") and draw(st.booleans())
        rows, dim = draw(st.sampled_from([17, 40, 101])), width if sequences else draw(st.sampled_from([8, 16]))
        tables.append({"sharding": kind, "half": half, "rows": rows, "dim": dim})
    if {"replicated", "data_parallel"} <= {table["sharding"] for table in tables}:  # of one module: refused
        for table in tables:
            table["sharding"] = {"data_parallel": "replicated"}.get(table["sharding"], table["sharding"])
    return {
        "tables": tables,
        "sequences": sequences,
        "frozen": draw(st.booleans()),
        "pipeline": draw(st.sampled_from(["fused_sparse_dist", "base", "split_backward", "semi_sync"])),
        "entry": draw(st.sampled_from(ENTRIES)),
        "hook": draw(st.sampled_from(HOOKS[:3] + HOOKS[4:])),
    }


@few(max_examples=3)
@given(cases=st.lists(_cases(), min_size=6, max_size=6))
def test_shardings_dtypes_and_who_has_loaded(two_ranks: Ranks, cases: list[dict[str, Any]]) -> None:
    found = two_ranks.run(initial_values.of_shardings, cases)
    wrong = [(case, names) for of_rank in found for case, names in zip(cases, of_rank, strict=True) if names]
    assert wrong == []
