"""Names in checkpoints: a table may be called anything, and each piece of its state is found again."""

from __future__ import annotations

import string

from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.checkpoint.dense_state import split_table_key, table_key
from lightning_overlap.checkpoint.table_state import _kinds, _overlapping, _row_wise_key, _split_row_wise

AWKWARD = ("/", ".", " ", "[", "]", "[:, 0:8]", "%2F", "%", "\n", "ü", "表", "0/t/step", ".momentum1[:, 0:8]")
names = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(min_size=1, max_size=3)), min_size=1, max_size=5).map(
    "".join
)
kinds = st.text(string.ascii_lowercase + "_0123456789", min_size=1)
columns = st.tuples(st.integers(0, 64), st.integers(1, 64))


@given(st.integers(0, 9), names, st.one_of(names, kinds))
def test_state_of_dense_optimizers(index: int, name: str, kind: str) -> None:
    assert split_table_key(table_key(index, name, kind)) == (index, name, kind)


def test_keys_of_checkpoints_that_were_saved_before() -> None:
    assert table_key(0, "ebc.embedding_bags.t1.weight", "exp_avg") == "0/ebc.embedding_bags.t1.weight/exp_avg"
    assert _split_row_wise("ebc.t1.weight.momentum1[:, 8:16]") == ("ebc.t1.weight.momentum1", (8, 8))


@given(names, names, kinds, columns)
def test_state_of_fused_optimizers(one: str, other: str, kind: str, of: tuple[int, int]) -> None:
    """Row-wise state of a table is that of its own columns, whatever another one's name has in it."""
    weights = {name: f"ebc.embedding_bags.{name}.weight" for name in (one, other)}
    bases = {name: f"{weight}.{kind}" for name, weight in weights.items()}
    saved = {_row_wise_key(base, of) for base in bases.values()} | {f"{weight}.lr" for weight in weights.values()}
    for base in bases.values():
        assert _split_row_wise(_row_wise_key(base, of)) == (base, of)
        assert _split_row_wise(base) == (base, None)
        assert _overlapping(base, of, saved) == {_row_wise_key(base, of): of[1]}
    assert _kinds(saved).keys() == set(weights.values())
