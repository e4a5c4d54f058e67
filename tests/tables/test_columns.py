"""`ConfigOrderKeyedTensor`: the columns of another KeyedTensor in another order, moved only where that is asked for."""

import pytest
import torch
from torch.utils import _pytree
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from lightning_overlap.tables.names import ConfigOrderKeyedTensor, without_graph

KEYS, LENGTHS = ["c", "a", "b"], [2, 1, 3]


def planned(*, requires_grad: bool = False) -> KeyedTensor:
    values = torch.arange(12.0).reshape(2, 6).requires_grad_(requires_grad)
    return KeyedTensor(KEYS, LENGTHS, values * 1 if requires_grad else values)


def ordered(columns: KeyedTensor) -> ConfigOrderKeyedTensor:
    return ConfigOrderKeyedTensor(columns, ["a", "b", "c"])


def test_everything_stands_in_the_order_asked_for() -> None:
    columns = planned()
    shown = ordered(columns)
    assert shown.keys() == ["a", "b", "c"]
    assert shown.length_per_key() == [1, 3, 2]
    assert shown.offset_per_key() == [0, 1, 4, 6]
    assert torch.equal(shown.values(), torch.cat([columns[key] for key in ("a", "b", "c")], dim=1))
    assert list(shown.to_dict()) == ["a", "b", "c"]
    assert all(torch.equal(shown[key], columns[key]) for key in KEYS)
    assert all(torch.equal(shown.to_dict()[key], columns[key]) for key in KEYS)
    moved = shown.to(torch.device("cpu"))
    assert (moved.keys(), moved.values().tolist()) == (shown.keys(), shown.values().tolist())
    assert shown["b"].data_ptr() == columns["b"].data_ptr(), "by name nothing is copied"
    assert shown.to_dict()["c"].data_ptr() == columns["c"].data_ptr()


def test_torchrec_regroups_it() -> None:
    columns = planned()
    groups = [["b", "c"], ["a"]]
    expected = [torch.cat([columns[key] for key in group], dim=1) for group in groups]
    for found, wanted in zip(KeyedTensor.regroup([ordered(columns)], groups), expected, strict=True):
        assert torch.equal(found, wanted)


def test_a_first_look_without_gradients_costs_no_gradient() -> None:
    shown = ordered(planned(requires_grad=True))
    with torch.no_grad():
        shown.values().norm()
    assert shown.values().requires_grad
    with torch.inference_mode():
        again = ordered(planned(requires_grad=True))
    assert again.keys() == ["a", "b", "c"]


def test_it_is_taken_apart_and_put_together_as_a_keyed_tensor() -> None:
    shown = ordered(planned())
    leaves, spec = _pytree.tree_flatten({"rows": shown})
    [values] = leaves
    assert torch.equal(values, shown.values())
    back = _pytree.tree_unflatten(leaves, spec)["rows"]
    assert (back.keys(), back.length_per_key()) == (shown.keys(), shown.length_per_key())
    assert torch.equal(back["b"], shown["b"])


@pytest.mark.parametrize("wrap", [ordered, lambda columns: columns], ids=["in_order", "as_planned"])
def test_without_graph_keeps_the_numbers(wrap: object) -> None:
    shown = wrap(planned(requires_grad=True))  # type: ignore[operator]
    sequence = JaggedTensor(torch.ones(3, 2, requires_grad=True) * 2, lengths=torch.tensor([1, 2]))
    columns, sequences, rest = without_graph((shown, {"f": sequence}, None))
    assert not columns.values().requires_grad
    assert torch.equal(columns.values(), shown.values())
    assert columns.keys() == shown.keys()
    assert not sequences["f"].values().requires_grad
    assert torch.equal(sequences["f"].lengths(), sequence.lengths())
    assert rest is None
