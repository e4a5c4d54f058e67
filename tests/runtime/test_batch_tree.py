"""Every leaf of a batch is found, whatever the batch is made of, and its path leads back to it."""

from collections import OrderedDict
from dataclasses import dataclass, field
from types import SimpleNamespace
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.runtime.batch_tree import Path, leaves, path_text, resolve


@dataclass
class Data:
    left: Any
    right: Any


@dataclass
class WithUnsetField:
    left: Any
    later: Any = field(init=False)


@dataclass(frozen=True, slots=True)
class SlottedData:
    left: Any
    right: Any


class Named(NamedTuple):
    left: Any
    right: Any


class Plain:
    def __init__(self, left: Any, right: Any) -> None:
        self.left = left
        self.right = right


class Leaf:
    """What the tests look for: it must not be descended into."""

    def __init__(self) -> None:
        self.inside = torch.zeros(1)


def is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


def found(batch: Any) -> list[tuple[str, Any]]:
    return [(path_text(path), leaf) for path, leaf in leaves(batch, is_leaf)]


leaf_values = st.one_of(
    st.builds(Leaf),
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.builds(torch.zeros, st.just(2)),
)


def pairs(kind: Any, children: st.SearchStrategy[Any]) -> st.SearchStrategy[Any]:
    return st.builds(kind, children, children)


batches = st.recursive(
    leaf_values,
    lambda children: st.one_of(
        *(pairs(kind, children) for kind in (Data, SlottedData, Named, Plain)),
        st.lists(children, max_size=3),
        st.lists(children, max_size=3).map(tuple),
        st.dictionaries(st.one_of(st.text(max_size=3), st.integers()), children, max_size=3),
        st.dictionaries(st.text(max_size=3), children, max_size=3).map(OrderedDict),
    ),
    max_leaves=12,
)


def count_leaves(node: Any) -> int:
    """Count by types, not by the code under test."""
    if isinstance(node, dict):
        return sum(map(count_leaves, node.values()))
    if isinstance(node, (list, tuple)):
        return sum(map(count_leaves, node))
    if isinstance(node, (Data, SlottedData, Plain)):
        return count_leaves(node.left) + count_leaves(node.right)
    return 1


@given(batches)
def test_every_path_leads_to_its_leaf_and_reads_as_python(batch: Any) -> None:
    all_leaves = list(leaves(batch, is_leaf))
    assert len(all_leaves) == count_leaves(batch)
    assert len({path for path, _ in all_leaves}) == len(all_leaves)
    assert [path for path, _ in leaves(batch, is_leaf)] == [path for path, _ in all_leaves], "the order stays the same"
    for path, leaf in all_leaves:
        assert resolve(batch, path) is leaf
        assert eval(path_text(path), {"batch": batch}) is leaf
        assert leaf is None or isinstance(leaf, (Leaf, int, str, bytes, torch.Tensor))


def test_paths_of_a_mixed_batch() -> None:
    one, two, three, four = Leaf(), Leaf(), Leaf(), Leaf()
    batch = Data([one, {"user": two}], Named((three,), Plain(7, SimpleNamespace(item=four))))
    assert found(batch) == [
        ("batch.left[0]", one),
        ("batch.left[1]['user']", two),
        ("batch.right.left[0]", three),
        ("batch.right.right.left", 7),
        ("batch.right.right.right.item", four),
    ]


def test_a_batch_that_is_a_leaf_has_the_empty_path() -> None:
    leaf = Leaf()
    assert list(leaves(leaf, is_leaf)) == [((), leaf)]
    assert resolve(leaf, ()) is leaf
    assert path_text(()) == "batch"


def test_strings_tensors_modules_and_functions_are_not_descended_into() -> None:
    batch = ["text", b"bytes", torch.zeros(2, 2), torch.nn.Linear(1, 1), len, Leaf]
    assert [leaf for _, leaf in leaves(batch, is_leaf)] == batch


def test_the_same_object_at_two_places_is_found_twice() -> None:
    shared = Data(Leaf(), 1)
    assert [text for text, _ in found([shared, shared])] == [
        "batch[0].left",
        "batch[0].right",
        "batch[1].left",
        "batch[1].right",
    ]


def test_an_object_that_holds_itself_ends() -> None:
    leaf = Leaf()
    batch = Plain(leaf, None)
    batch.right = {"back": [batch]}
    assert found(batch) == [("batch.left", leaf)]
    rows: list[Any] = [leaf]
    rows.append(rows)
    assert found(rows) == [("batch[0]", leaf)]


@pytest.mark.parametrize(
    ("path", "text"),
    [
        ((("attr", "absent"),), "batch.absent"),
        ((("attr", "left"), ("item", 5)), "batch.left[5]"),
        ((("attr", "left"), ("item", "user")), "batch.left['user']"),
        ((("attr", "right"), ("attr", "absent")), "batch.right.absent"),
        ((("attr", "right"), ("item", 0)), "batch.right[0]"),
    ],
)
def test_a_path_that_leads_nowhere_names_itself(path: Path, text: str) -> None:
    with pytest.raises(LookupError) as caught:
        resolve(Data([1], 2), path)
    assert str(caught.value) == f"the batch has no {text}"


class Slotted:
    __slots__ = ("left",)

    def __init__(self, left: object) -> None:
        self.left = left


class Callable:
    def __init__(self, left: object) -> None:
        self.left = left

    def __call__(self) -> None: ...


@pytest.mark.parametrize("kind", [Slotted, Callable, WithUnsetField])
def test_slots_batches_that_can_be_called_and_fields_that_are_not_set(kind: type) -> None:
    leaf = Leaf()
    batch = kind(leaf)
    assert found(batch) == [("batch.left", leaf)]
    assert resolve(batch, (("attr", "left"),)) is leaf
