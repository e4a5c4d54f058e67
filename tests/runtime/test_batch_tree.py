"""Every leaf of a batch is found, whatever the batch is made of, and its path leads back to it."""

import re
from collections import OrderedDict
from dataclasses import dataclass, field
from typing import Any, NamedTuple

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap.runtime.batch_tree import leaves, path_text, resolve, search


@dataclass
class Data:
    left: Any
    right: Any
    later: Any = field(init=False)  # not set


class Named(NamedTuple):
    left: Any
    right: Any


class Plain:
    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.right = left, right

    def __call__(self) -> None:
        """A batch may be called."""


class Slotted:
    __slots__ = ("__right", "left")

    def __init__(self, left: Any, right: Any) -> None:
        self.left, self.__right = left, right

    @property
    def right(self) -> Any:
        return self.__right


class Leaf:
    """What the tests look for: it must not be descended into."""

    def __init__(self) -> None:
        self.inside = torch.zeros(1)


def is_leaf(node: Any) -> bool:
    return isinstance(node, Leaf)


KINDS = (Data, Slotted, Named, Plain)
leaf_values = st.one_of(
    st.builds(Leaf),
    st.none(),
    st.integers(),
    st.text(max_size=3),
    st.binary(max_size=3),
    st.builds(torch.zeros, st.just(2)),
    st.sampled_from([torch.nn.Linear(1, 1), len, Leaf]),
)
batches = st.recursive(
    leaf_values,
    lambda children: st.one_of(
        *(st.builds(kind, children, children) for kind in KINDS),
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
    if isinstance(node, KINDS):
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
        assert count_leaves(leaf) == 1


def never(node: Any) -> bool:
    return False


@given(batches)
def test_a_search_finds_the_tensors_of_all_leaves_once(batch: Any) -> None:
    tensors, is_whole = search(batch)
    all_leaves = [leaf for _, leaf in leaves(batch, never)]
    assert len({id(tensor) for tensor in tensors}) == len(tensors)
    assert {id(tensor) for tensor in tensors} == {id(leaf) for leaf in all_leaves if isinstance(leaf, torch.Tensor)}
    if is_whole:  # then nothing is left that a search cannot look into
        kinds = (torch.Tensor, type(None), int, str, bytes, list, tuple, dict)
        assert all(isinstance(leaf, kinds) for leaf in all_leaves)


def test_an_object_at_two_places_is_found_twice_and_one_that_holds_itself_ends() -> None:
    leaf = Leaf()
    batch = Plain([leaf, leaf], None)
    batch.right = {"back": [batch]}
    found = [(path_text(path), leaf) for path, leaf in leaves(batch, is_leaf)]
    assert found == [("batch.left[0]", leaf), ("batch.left[1]", leaf)]


@pytest.mark.parametrize(
    ("last", "text"), [(("item", 5), "[5]"), (("item", "user"), "['user']"), (("attr", "absent"), ".absent")]
)
def test_a_path_that_leads_nowhere_names_itself(last: tuple[str, Any], text: str) -> None:
    with pytest.raises(LookupError, match=f"^the batch has no batch.left{re.escape(text)}$"):
        resolve(Data([1], 2), (("attr", "left"), last))
