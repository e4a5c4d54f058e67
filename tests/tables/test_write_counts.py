"""Whether what an early lookup was made from is still what it was: inputs, and tables that somebody writes."""

import copy
from typing import Any

import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice

from lightning_overlap.tables.write_counts import SentInput, count_writes, watch_tables


def make() -> KeyedJaggedTensor:
    return KeyedJaggedTensor(["f"], torch.arange(3), weights=torch.rand(3), lengths=torch.tensor([1, 2]))


@pytest.mark.parametrize("part", ["_values", "_lengths", "_weights"])
@pytest.mark.parametrize("change", [lambda tensor: tensor.add_(0), torch.clone], ids=["write", "other_tensor"])
def test_a_write_or_another_tensor_is_a_change_and_a_read_is_none(part: str, change: Any) -> None:
    kjt = make()
    sent = SentInput(kjt)
    kjt.values() + kjt.lengths().sum()
    assert sent.is_unchanged(copy.copy(kjt))
    setattr(kjt, part, change(getattr(kjt, part)))
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
    table = model.table
    before = memory._version
    table.data.add_(1)
    assert memory._version == before + 1
    assert memory.tolist() == [2.0] * 8
    assert not table.data.requires_grad
    assert torch.equal(copy.deepcopy(table).detach(), table.detach())
