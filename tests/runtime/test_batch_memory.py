"""Which loaders allocate each batch; what a copy of a batch keeps."""

from collections import OrderedDict, UserDict
from collections.abc import Iterator
from types import MappingProxyType

import numpy as np
import pytest
import torch
from torch import Tensor
from torch.nn.utils.rnn import PackedSequence, pack_sequence
from torch.utils.data import DataLoader, IterableDataset, TensorDataset
from torchrec import KeyedJaggedTensor

from lightning_overlap.runtime.batch_memory import BatchMemory, allocates_batches

from .test_batch_tree import Named, Plain, Slotted


class _Stream(IterableDataset):
    def __iter__(self) -> Iterator[Tensor]:
        buffer = torch.zeros(3)
        while True:
            yield buffer


LISTED = [torch.zeros(3)] * 4
LOADERS = {
    "collates": (DataLoader(_Stream(), batch_size=2), True),
    "list": (DataLoader(LISTED, batch_size=None), True),  # type: ignore[arg-type]
    "worker_process": (DataLoader(_Stream(), batch_size=None, num_workers=1), True),
    "buffer": (DataLoader(_Stream(), batch_size=None), False),
    "own_collate": (DataLoader(LISTED, batch_size=2, collate_fn=lambda samples: samples[0]), False),  # type: ignore[arg-type]
    "own_loader": (iter(LISTED), False),
}


@pytest.mark.parametrize("name", LOADERS)
def test_a_loader_is_trusted_if_pytorch_allocates_each_batch(name: str) -> None:
    loader, allocates = LOADERS[name]
    assert allocates_batches(loader) == allocates


def test_the_batches_of_a_trusted_loader_stay() -> None:
    batch = {"x": torch.zeros(3)}
    assert BatchMemory("cpu", allocates=True).own(batch) is batch
    assert _memory().own(batch)["x"] is not batch["x"]


def _memory(device_type: str = "cpu") -> BatchMemory:
    return BatchMemory(device_type, allocates=False)


def test_a_transfer_to_another_device_copies_ordinary_memory_at_once() -> None:
    memory = _memory("cuda")
    batch, array = torch.zeros(3), np.zeros(3)
    own, own_array = memory.own([batch, array])
    assert own is batch
    assert own_array is not array  # the hooks may keep it
    assert not memory.is_own  # the loader may write it before its transfer


def test_pinned_memory_is_copied_where_its_transfer_may_go_on(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(torch.Tensor, "is_pinned", lambda self: True)
    empty_like = torch.empty_like
    monkeypatch.setattr(torch, "empty_like", lambda leaf, pin_memory: empty_like(leaf) if pin_memory else None)
    batch = torch.arange(3)
    own = _memory("cuda").own(batch)
    assert own is not batch
    assert torch.equal(own, batch)


def test_every_kind_of_batch_is_copied() -> None:
    x, note = torch.arange(3.0), 5
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
    own = _memory().own(batch)
    x.zero_()
    array[:] = 0
    kjt.values().zero_()
    kjt.weights().zero_()
    assert torch.equal(own["named"].left, torch.arange(3.0))
    assert own["named"].right == note
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
        self.storage.parent = self  # type: ignore[attr-defined]


def test_a_class_of_a_users_own_is_copied_and_not_changed() -> None:
    batch = Graph(torch.zeros(2))
    own = _memory().own(batch)
    for part in (batch.x, batch.storage["x"]):  # which would be the copies, had they taken their places there
        part[:] = 1
    assert not any(x.any() for x in (own.x, own.storage["x"], own.storage.parent.x))


def test_a_copy_of_a_view_is_of_the_view_alone_and_a_weight_stays() -> None:
    view = torch.zeros(1000, 3)[2:4]
    view.note = "kept"  # type: ignore[attr-defined]
    weight = torch.zeros(3, requires_grad=True)
    own, same = _memory().own([view, weight])
    assert own.untyped_storage().nbytes() == 2 * 3 * 4
    assert own.note == "kept"
    assert same is weight


def test_a_batch_that_cannot_be_copied_is_told_once() -> None:
    memory = _memory()
    batch = MappingProxyType({"x": torch.zeros(3)})
    with pytest.warns(UserWarning, match="Batches of the type mappingproxy cannot be copied"):
        assert memory.own(batch) is batch
    assert memory.own(batch) is batch
    assert not memory.is_own
