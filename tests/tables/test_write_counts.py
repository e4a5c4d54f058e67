"""Whether what an early lookup was made from is still what it was: inputs, and tables that somebody writes."""

import copy

import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from lightning_overlap.sparse.inputs import release
from lightning_overlap.tables.write_counts import SentInput, WatchedTable, count_writes, watch_tables


def make() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.arange(3), weights=torch.rand(3), lengths=torch.tensor([1, 2]))


def test_what_nobody_wrote_is_unchanged() -> None:
    kjt = make()
    sent = SentInput(kjt)
    kjt.values() + kjt.lengths().sum()
    assert sent.is_unchanged(kjt)
    assert sent.is_unchanged(copy.copy(kjt))


@pytest.mark.parametrize("part", ["_values", "_lengths", "_weights"])
def test_a_write_or_another_tensor_is_a_change(part: str) -> None:
    kjt = make()
    sent = SentInput(kjt)
    getattr(kjt, part).add_(0)
    assert not sent.is_unchanged(kjt)
    kjt = make()
    sent = SentInput(kjt)
    setattr(kjt, part, getattr(kjt, part).clone())
    assert not sent.is_unchanged(kjt)


def test_ids_that_were_released_cannot_change() -> None:
    kjt = make()
    sent = SentInput(kjt)
    release(kjt)
    sent.forget_ids()
    assert sent.is_unchanged(kjt)
    kjt.lengths().add_(0)
    assert not sent.is_unchanged(kjt)


def test_inputs_made_in_inference_mode_count_their_writes_too() -> None:
    with torch.inference_mode():
        kjt = make()
        count_writes([kjt])
        sent = SentInput(kjt)
        assert sent.is_unchanged(kjt)
        kjt.values().add_(1)
        assert not sent.is_unchanged(kjt)


def test_a_write_by_data_is_counted() -> None:
    memory = torch.zeros(8)
    table = TableBatchedEmbeddingSlice(memory, 0, 8, 4, 2)
    table.data.add_(1)
    assert table._version == memory._version == 0  # PyTorch hides it
    model = torch.nn.Module()
    model.table = table
    watch_tables(model)
    assert isinstance(model.table, WatchedTable)
    before = memory._version
    table.data.add_(1)
    assert memory._version == before + 1
    assert memory.tolist() == [2.0] * 8
    assert not table.data.requires_grad
    copied = copy.deepcopy(table)
    assert torch.equal(copied.detach(), table.detach())
