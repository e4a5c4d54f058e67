"""Whether what an early lookup was made from is still what it was: inputs, and tables that somebody writes."""

import copy
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import nn
from torchrec import KeyedJaggedTensor
from torchrec.distributed.composable.table_batched_embedding_slice import TableBatchedEmbeddingSlice
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import data_parallel
from torchrec.distributed.types import ShardingEnv

from lightning_overlap.tables import check_dense_optimizers
from lightning_overlap.tables.write_counts import SentInput, count_writes, watch_tables

from ..support import modules
from ..support.ranks import Ranks


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


def watched_in(grad_mode: str, kernel_needs_gradient: bool) -> bool:
    """Return whether a table needs a gradient that is watched in a grad mode."""
    model = nn.Module()
    model.table = TableBatchedEmbeddingSlice(torch.zeros(8, requires_grad=kernel_needs_gradient), 0, 8, 4, 2)
    with getattr(torch, grad_mode)():
        watch_tables(model)
    return bool(model.table.requires_grad)


@pytest.mark.parametrize("grad_mode", ["enable_grad", "no_grad", "inference_mode"])
def test_a_table_needs_a_gradient_as_its_kernel_does(grad_mode: str) -> None:
    assert [watched_in(grad_mode, needs) for needs in (True, False)] == [True, False]


@pytest.mark.parametrize(
    "change", [nn.Module.requires_grad_, lambda model, value: setattr(model.table, "requires_grad", value)]
)
@pytest.mark.parametrize("needs", [True, False])
def test_a_table_stays_trained_or_frozen(change: Callable[[Any, bool], Any], needs: bool) -> None:
    model = nn.Module()
    model.table = TableBatchedEmbeddingSlice(torch.zeros(8, requires_grad=needs), 0, 8, 4, 2)
    watch_tables(model)
    change(model, needs)
    with pytest.raises(RuntimeError, match=rf"^table cannot be {'frozen' if needs else 'unfrozen'} "):
        change(model, not needs)
    assert model.table.requires_grad == needs


def trained_by_an_optimizer(made_before: bool) -> str:
    """Return the error of an optimizer that has the data-parallel tables of a module that its user has sharded."""
    model = nn.Module()
    model.ebc = modules.bags(2)
    plan = modules.plan_by_place(model, lambda _: lambda _: data_parallel())
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    DistributedModelParallel(model, env, torch.device("cpu"), plan, init_data_parallel=False)
    early = torch.optim.SGD(model.parameters(), 0.1)
    watch_tables(model)
    try:
        check_dense_optimizers(model, [early if made_before else torch.optim.SGD(model.parameters(), 0.1)])
    except ValueError as err:
        return str(err)
    return ""


def test_an_optimizer_that_was_made_before_is_told_to_be_made_later(get_ranks: Callable[..., Ranks]) -> None:
    [message] = get_ranks(1).run(trained_by_an_optimizer, True)
    assert "SGD was made before the tables were sharded: it has weights of these names" in message
    assert "Make it in configure_optimizers" in message
    assert get_ranks(1).run(trained_by_an_optimizer, False) == [""]
