"""`ConfigOrderKeyedTensor`: the columns of another KeyedTensor in another order, moved only where that is asked for."""

import torch
from hypothesis import given
from hypothesis import strategies as st
from torch.utils import _pytree
from torchrec.sparse.jagged_tensor import KeyedTensor

from lightning_overlap.tables.columns import ColumnOrder, ConfigOrderKeyedTensor


def test_everything_stands_in_the_order_asked_for() -> None:
    columns = KeyedTensor(["c", "a", "b"], [2, 1, 3], torch.arange(12.0).reshape(2, 6))
    shown = ConfigOrderKeyedTensor(columns, ColumnOrder(columns, ["a", "b", "c"]))
    assert shown.keys() == list(shown.to_dict()) == ["a", "b", "c"]
    assert (shown.length_per_key(), shown.offset_per_key()) == ([1, 3, 2], [0, 1, 4, 6])
    assert torch.equal(shown.values(), torch.cat([columns[key] for key in ("a", "b", "c")], dim=1))
    assert all(torch.equal(shown[key], columns[key]) for key in "abc")
    assert all(torch.equal(shown.to_dict()[key], columns[key]) for key in "abc")
    assert shown["b"].data_ptr() == columns["b"].data_ptr(), "by name nothing is copied"
    moved = shown.to(torch.device("cpu"))
    assert (moved.keys(), moved.values().tolist()) == (shown.keys(), shown.values().tolist())
    [values], spec = _pytree.tree_flatten(shown)
    assert torch.equal(values, shown.values())
    back = _pytree.tree_unflatten([values], spec)
    assert (back.keys(), back.length_per_key()) == (shown.keys(), shown.length_per_key())
    regrouped = KeyedTensor.regroup([shown], [["b", "c"], ["a"]])
    assert torch.equal(torch.cat(regrouped, dim=1), torch.cat([columns[key] for key in ("b", "c", "a")], dim=1))


@given(dims=st.lists(st.integers(0, 3), min_size=1, max_size=6), unit=st.integers(1, 4), data=st.data())
def test_values_and_gradients_of_every_order_are_those_of_split_and_cat(
    dims: list[int], unit: int, data: st.DataObject
) -> None:
    keys = [f"k{number}" for number in range(len(dims))]
    lengths, asked = [unit * dim for dim in dims], data.draw(st.permutations(keys))
    plain = torch.randn(3, sum(lengths), requires_grad=True)
    weights = torch.randn(3, sum(lengths))
    columns = dict(zip(keys, plain.split(lengths, dim=1), strict=True))
    expected = torch.cat([columns[key] for key in asked], dim=1)
    source = plain.detach().requires_grad_()
    in_plan_order = KeyedTensor(keys, lengths, source)
    values = ConfigOrderKeyedTensor(in_plan_order, ColumnOrder(in_plan_order, asked)).values()
    assert torch.equal(values, expected)
    derived = []
    for answer, leaf in ((expected, plain), (values, source)):
        [first] = torch.autograd.grad((answer**3 * weights).sum(), leaf, create_graph=True)
        derived += [first, *torch.autograd.grad((first * leaf).sum(), leaf)]
    assert torch.equal(derived[0], derived[2])
    assert torch.equal(derived[1], derived[3])
