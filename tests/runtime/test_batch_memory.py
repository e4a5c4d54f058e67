"""`BatchMemory` on loaders with and without memory of their own; what a copy of a batch keeps."""

from __future__ import annotations

from collections import OrderedDict
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
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
FIRST = NUM_KEPT + NUM_SEEN - 1
"""How many batches of an epoch are copied at least."""


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


def _arrays_as_tensors() -> Iterator[Tensor]:
    for _ in range(NUM):
        yield torch.from_numpy(np.zeros(3))


def _arrays() -> Iterator[Any]:
    for _ in range(NUM):
        yield np.zeros(3)


def _views_of_arrays() -> Iterator[Any]:
    yield from np.zeros((NUM, 3))


def _changes_its_ways() -> Iterator[Tensor]:
    first = torch.zeros(3)
    yield first
    for _ in range(NUM - 1):
        yield torch.zeros(3)


TRUSTED = {
    "makes_each": _Stream,
    "data_loader": lambda: DataLoader([torch.zeros(3)] * NUM, batch_size=1),
    "worker_process": lambda: DataLoader(_Stream(), batch_size=None, num_workers=1),
    "arrays": _arrays,
}
NOT_TRUSTED = {
    "keeps": lambda: _keeps([]),
    "views": _views,
    "arrays_as_tensors": _arrays_as_tensors,
    "views_of_arrays": _views_of_arrays,
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
