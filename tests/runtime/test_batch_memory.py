"""`BatchMemory` on loaders with and without memory of their own; what a copy of a batch keeps."""

import weakref
from collections import OrderedDict, UserDict
from collections.abc import Iterable, Iterator
from types import MappingProxyType
from typing import Any

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchrec import KeyedJaggedTensor

from lightning_overlap.runtime.batch_memory import NUM_KEPT, NUM_SEEN, BatchMemory

from .test_batch_tree import Named, Plain, Slotted

NUM = 40
FIRST = NUM_KEPT + NUM_SEEN - 1  # at least so many batches of an epoch are copied


def copied(loader: Iterable[Any], memory: BatchMemory | None = None) -> list[bool]:
    """Which batches of an epoch are copied; each is let go before the next one, as in training."""
    memory = memory or BatchMemory("cpu")
    memory.begin_epoch()
    found = []
    for batch in loader:
        found.append(memory.own(batch) is not batch)
        del batch
    return found


class _Stream(IterableDataset):
    def __iter__(self) -> Iterator[dict[str, Tensor]]:
        for index in range(NUM):
            batch = {"x": torch.full((3,), index), "y": torch.zeros(2)}  # still in this variable while the next is made
            yield batch


def _keeps() -> Iterator[Tensor]:
    return iter([torch.zeros(3) for _ in range(NUM)])


def _views() -> Iterator[Tensor]:
    yield from torch.zeros(NUM, 3)


def _arrays() -> Iterator[Any]:
    for _ in range(NUM):
        yield np.zeros(3)


def _arrays_as_tensors() -> Iterator[Tensor]:
    return map(torch.from_numpy, _arrays())


TRUSTED = {
    "makes_each": _Stream,
    "data_loader": lambda: DataLoader([torch.zeros(3)] * NUM, batch_size=1),
    "worker_process": lambda: DataLoader(_Stream(), batch_size=None, num_workers=1),
    "arrays": _arrays,
}
NOT_TRUSTED = {
    "keeps": _keeps,
    "views": _views,
    "arrays_as_tensors": _arrays_as_tensors,
    "views_of_arrays": lambda: iter(np.zeros((NUM, 3))),
}


@pytest.mark.parametrize("name", TRUSTED)
def test_a_loader_that_lets_its_memory_go_is_trusted(name: str) -> None:
    memory = BatchMemory("cpu")
    for _ in range(2):  # another epoch may be of another loader
        assert copied(TRUSTED[name](), memory) == [True] * FIRST + [False] * (NUM - FIRST)


@pytest.mark.parametrize("name", NOT_TRUSTED)
def test_a_loader_that_may_fill_its_memory_anew_is_not(name: str) -> None:
    assert copied(NOT_TRUSTED[name]()) == [True] * NUM


def test_what_comes_of_a_known_loader_or_goes_to_another_device_is_not_copied() -> None:
    """But the loader is looked at: batches may be fetched before they are transferred where it is trusted."""
    assert copied(_views(), BatchMemory("cpu", is_own=True)) == [False] * NUM
    memory = BatchMemory("cuda")
    assert copied(_views(), memory) == [False] * NUM
    assert not memory.is_own
    assert copied(_Stream(), memory) == [False] * NUM
    assert memory.is_own


def test_pinned_memory_is_copied_where_its_transfer_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda leaf, pin_memory: empty_like(leaf) if pin_memory else None)
    assert copied(_views(), BatchMemory("cuda")) == [True] * NUM
    assert copied(_Stream(), BatchMemory("cuda")) == [True] * FIRST + [False] * (NUM - FIRST)
    # As of `pin_memory()`: nobody can resize the storage, and the tensor alone has it.
    assert copied(_arrays_as_tensors(), BatchMemory("cuda")) == [True] * FIRST + [False] * (NUM - FIRST)


def test_every_kind_of_batch_is_copied() -> None:
    x, note = torch.arange(3.0), object()
    kjt = KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.tensor([1, 2]), weights=torch.rand(3))
    array, data = np.arange(3), TensorDataset(torch.zeros(3))
    batch = {
        "named": Named(x, note),
        "slotted": Slotted(kjt, note),
        "plain": Plain([x, (x, 3)], OrderedDict(a=x)),
        "packed": pack_sequence([torch.arange(2.0), torch.arange(1.0)]),
        "jagged": torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged),
        "array": array,
        "data": data,
        "kjt": kjt,
    }
    own = BatchMemory("cpu").own(batch)
    x.zero_()
    array[:] = 0
    kjt.values().zero_()
    kjt.weights().zero_()
    assert torch.equal(own["named"].left, torch.arange(3.0))
    assert own["named"].right is note
    assert own["plain"].left[0] is own["plain"].left[1][0] is own["plain"].right["a"] is own["named"].left
    assert type(own["plain"].right) is OrderedDict
    assert own["slotted"].left is own["kjt"]
    assert torch.equal(own["kjt"].values(), torch.arange(3))
    assert bool(own["kjt"].weights().any())
    assert own["kjt"].keys() == ["f"]
    assert type(own["packed"]) is PackedSequence
    assert own["jagged"] is not batch["jagged"]
    assert own["array"].tolist() == [0, 1, 2]
    assert own["data"] is data  # what a batch merely refers to is not copied


class Graph:
    """Its storage knows it, as in a graph library's batches."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.storage = UserDict(x=x)
        self.storage.parent, self.storage.weak_parent = self, weakref.ref(self)  # type: ignore[attr-defined]


def test_a_class_of_a_users_own_is_copied_and_not_changed() -> None:
    batch = Graph(torch.zeros(2))
    own = BatchMemory("cpu").own(batch)
    for part in (batch.x, batch.storage["x"]):  # which would be the copies, had they taken their places there
        part[:] = 1
    assert not any(x.any() for x in (own.x, own.storage["x"], own.storage.parent.x, own.storage.weak_parent().x))


def test_a_copy_of_a_view_is_of_the_view_alone_and_a_weight_stays() -> None:
    view = torch.zeros(1000, 3)[2:4]
    view.note = "kept"  # type: ignore[attr-defined]
    weight = torch.zeros(3, requires_grad=True)
    own, same = BatchMemory("cpu").own([view, weight])
    assert own.untyped_storage().nbytes() == 2 * 3 * 4
    assert own.note == "kept"
    assert same is weight


def test_a_batch_that_cannot_be_copied_is_told_once() -> None:
    memory = BatchMemory("cpu")
    batch = MappingProxyType({"x": torch.zeros(3)})
    with pytest.warns(UserWarning, match="Batches of the type mappingproxy cannot be copied"):
        assert memory.own(batch) is batch
    assert memory.own(batch) is batch
    assert not memory.is_own
