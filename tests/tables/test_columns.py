"""`ConfigOrderKeyedTensor`: the columns of another KeyedTensor in another order, moved only where that is asked for."""

import torch
from torch.utils import _pytree
from torchrec.sparse.jagged_tensor import KeyedTensor

from lightning_overlap.tables.names import ConfigOrderKeyedTensor


def test_everything_stands_in_the_order_asked_for() -> None:
    columns = KeyedTensor(["c", "a", "b"], [2, 1, 3], torch.arange(12.0).reshape(2, 6))
    shown = ConfigOrderKeyedTensor(columns, ["a", "b", "c"])
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
