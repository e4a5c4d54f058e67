"""`BatchMemory` on loaders with and without memory of their own; what a copy of a batch keeps."""

import weakref
from collections import OrderedDict, UserDict, UserList
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from functools import partial
from types import MappingProxyType
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchrec import KeyedJaggedTensor

from lightning_overlap.runtime.batch_memory import NUM_KEPT, NUM_SEEN, BatchMemory

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


def _keeps(retained: list[Tensor]) -> Iterator[Tensor]:
    for index in range(NUM):
        retained.append(torch.full((3,), index))
        yield retained[-1]


def _views() -> Iterator[Tensor]:
    yield from torch.zeros(NUM, 3)


def _arrays(of: Callable[[Any], Any] = lambda array: array) -> Iterator[Any]:
    for _ in range(NUM):
        yield of(np.zeros(3))


def _changes_its_ways() -> Iterator[Tensor]:
    first = torch.zeros(3)
    yield first
    for _ in range(NUM - 1):
        yield torch.zeros(3)


ARRAYS_AS_TENSORS = partial(_arrays, torch.from_numpy)
TRUSTED = {
    "makes_each": _Stream,
    "data_loader": lambda: DataLoader([torch.zeros(3)] * NUM, batch_size=1),
    "worker_process": lambda: DataLoader(_Stream(), batch_size=None, num_workers=1),
    "arrays": _arrays,
}
NOT_TRUSTED = {
    "keeps": lambda: _keeps([]),
    "views": _views,
    "arrays_as_tensors": ARRAYS_AS_TENSORS,
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


def test_the_first_batch_may_be_kept() -> None:
    assert copied(_changes_its_ways()) == [True] * (FIRST + 1) + [False] * (NUM - FIRST - 1)


def test_batches_that_are_none_say_nothing() -> None:
    batches = [None] * NUM + [torch.zeros(3) for _ in range(NUM)]
    assert copied(batches) == [False] * NUM + [True] * NUM


def test_a_loader_that_is_known_is_trusted_from_the_first_batch_on() -> None:
    memory = BatchMemory("cpu", is_own=True)
    assert memory.is_own
    assert copied(_views(), memory) == [False] * NUM


def test_what_goes_to_another_device_is_not_copied() -> None:
    """But its loader is looked at: batches may be fetched before they are transferred where it is trusted."""
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
    assert copied(ARRAYS_AS_TENSORS(), BatchMemory("cuda")) == [True] * FIRST + [False] * (NUM - FIRST)


class Named(NamedTuple):
    x: Any
    y: Any


@dataclass(frozen=True, slots=True)
class Frozen:
    x: Any
    y: Any


class Plain:
    def __init__(self, x: Any, y: Any) -> None:
        self.x, self.y = x, y


class _Data(Dataset):
    def __init__(self) -> None:
        self.rows = torch.zeros(3)


def test_every_kind_of_batch_is_copied() -> None:
    x, note = torch.arange(3.0), object()
    kjt = KeyedJaggedTensor(["f"], torch.arange(3), lengths=torch.tensor([1, 2]), weights=torch.rand(3))
    array, data = np.arange(3), _Data()
    batch = {
        "named": Named(x, note),
        "frozen": Frozen(kjt, note),
        "plain": Plain([x, (x, 3)], OrderedDict(a=x)),
        "packed": pack_sequence([torch.arange(2.0), torch.arange(1.0)]),
        "array": array,
        "data": data,
        "kjt": kjt,
    }
    own = BatchMemory("cpu").own(batch)
    x.zero_()
    array[:] = 0
    kjt.values().zero_()
    kjt.weights().zero_()
    assert torch.equal(own["named"].x, torch.arange(3.0))
    assert own["named"].y is note
    assert own["plain"].x[0] is own["plain"].x[1][0] is own["plain"].y["a"] is own["named"].x
    assert type(own["plain"].y) is OrderedDict
    assert own["frozen"].x is own["kjt"]
    assert torch.equal(own["kjt"].values(), torch.arange(3))
    assert bool(own["kjt"].weights().any())
    assert own["kjt"].keys() == ["f"]
    assert type(own["packed"]) is PackedSequence
    assert own["array"].tolist() == [0, 1, 2]
    assert own["data"] is data  # what a batch merely refers to is not copied


class WithMore(dict):
    pass


@dataclass
class Derived:
    x: Tensor

    def __post_init__(self) -> None:
        self.more = self.x.clone()


class Private:
    __slots__ = ("__x",)

    def __init__(self, x: Tensor) -> None:
        self.__x = x

    @property
    def x(self) -> Tensor:
        return self.__x


class Noted(np.ndarray):
    """An array with attributes."""


class Graph:
    """Its storage knows it, as in a graph library's batches."""

    def __init__(self, x: Tensor) -> None:
        self.x = x
        self.storage = UserDict(x=x)
        self.storage.parent, self.storage.weak_parent = self, weakref.ref(self)  # type: ignore[attr-defined]


def _derived() -> Any:
    batch = WithMore(x=torch.zeros(2))
    batch.more = torch.zeros(2)  # type: ignore[attr-defined]
    return batch


def _noted() -> Any:
    array = np.zeros(2).view(Noted)
    array.note = "kept"  # type: ignore[attr-defined]
    return array


OF_A_USERS_OWN: dict[str, tuple[Callable[[], Any], Callable[[Any], list[Any]]]] = {
    "mapping": (lambda: UserDict(x=torch.zeros(2)), lambda batch: [batch["x"]]),
    "sequence": (lambda: UserList([torch.zeros(2)]), lambda batch: [batch[0]]),
    "dict_with_attributes": (_derived, lambda batch: [batch["x"], batch.more]),
    "not_a_field": (lambda: Derived(torch.zeros(2)), lambda batch: [batch.x, batch.more]),
    "private_slot": (lambda: Private(torch.zeros(2)), lambda batch: [batch.x]),
    "array_with_attributes": (_noted, lambda batch: [batch]),
    "masked_array": (lambda: np.ma.array(np.zeros(2)), lambda batch: [batch]),
    "jagged": (
        lambda: torch.nested.nested_tensor([torch.zeros(2), torch.zeros(1)], layout=torch.jagged),
        lambda batch: [batch.values()],
    ),
    "knows_its_parent": (
        lambda: Graph(torch.zeros(2)),
        lambda batch: [batch.x, batch.storage["x"], batch.storage.parent.x, batch.storage.weak_parent().x],
    ),
}


@pytest.mark.parametrize("name", OF_A_USERS_OWN)
def test_a_class_of_a_users_own_is_copied_and_not_changed(name: str) -> None:
    make, parts_of = OF_A_USERS_OWN[name]
    batch = make()
    own = BatchMemory("cpu").own(batch)
    assert type(own) is type(batch)
    for part in parts_of(batch):  # which would be the copies, had they taken their places there
        part[:] = 1
    assert not any(part.sum() for part in parts_of(own))
    assert getattr(own, "note", None) == getattr(batch, "note", None)


def test_a_copy_of_a_view_is_of_the_view_alone() -> None:
    view = torch.zeros(1000, 3)[2:4]
    view.note = "kept"  # type: ignore[attr-defined]
    own = BatchMemory("cpu").own(view)
    assert own.untyped_storage().nbytes() == 2 * 3 * 4
    assert own.note == "kept"


def test_a_tensor_with_a_gradient_stays_the_same() -> None:
    weight = torch.zeros(3, requires_grad=True)
    assert BatchMemory("cpu").own([weight])[0] is weight


def test_a_batch_that_cannot_be_copied_is_told_once() -> None:
    memory = BatchMemory("cpu")
    batch = MappingProxyType({"x": torch.zeros(3)})
    with pytest.warns(UserWarning, match="Batches of the type mappingproxy cannot be copied"):
        assert memory.own(batch) is batch
    assert memory.own(batch) is batch
    assert not memory.is_own
