"""Names in checkpoints: a table may be called anything, and each piece of its state is found again."""

import string

from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.checkpoint.dense_state import split_table_key, table_key
from lightning_overlap.checkpoint.table_state import StateKey, kinds_by_weight, overlapping

AWKWARD = ("/", ".", " ", "[", "]", "[:, 0:8]", "%2F", "%", "\n", "ü", "表", "0/t/step", ".momentum1[:, 0:8]")
names = st.lists(st.one_of(st.sampled_from(AWKWARD), st.text(min_size=1, max_size=3)), min_size=1, max_size=5).map(
    "".join
)
kinds = st.text(string.ascii_lowercase + "_0123456789", min_size=1)
columns = st.tuples(st.integers(0, 64), st.integers(65, 128))


@given(st.integers(0, 9), names, st.one_of(names, kinds))
def test_state_of_dense_optimizers(index: int, name: str, kind: str) -> None:
    assert split_table_key(table_key(index, name, kind)) == (index, name, kind)


def test_keys_of_checkpoints_that_were_saved_before() -> None:
    assert table_key(0, "ebc.embedding_bags.t1.weight", "exp_avg") == "0/ebc.embedding_bags.t1.weight/exp_avg"
    assert StateKey.parse("ebc.t1.weight.momentum1[:, 8:16]") == ("ebc.t1.weight", "momentum1", (8, 16))


@given(names, names, kinds, columns)
def test_state_of_fused_optimizers(one: str, other: str, kind: str, of: tuple[int, int]) -> None:
    weights = {f"ebc.embedding_bags.{name}.weight" for name in (one, other)}
    keys = [StateKey(weight, kind, of) for weight in weights]
    saved = [*keys, *(StateKey(weight, "lr") for weight in weights)]
    for key in keys:
        assert StateKey.parse(str(key)) == key
        assert StateKey.parse(str(key._replace(columns=None))) == (*key[:2], None)
        assert overlapping(key, saved) == {str(key): of[1] - of[0]}
    assert kinds_by_weight(saved).keys() == weights
