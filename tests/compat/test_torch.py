"""What PyTorch's private names have to mean."""

from typing import Any

import pytest
import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed._shard.metadata import ShardMetadata
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata, TensorProperties
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.overrides import TorchFunctionMode
from torch.utils._python_dispatch import TorchDispatchMode

from lightning_overlap.compat import torch as compat

from ..support.ranks import Ranks
from .meanings import Meanings

pytestmark = pytest.mark.smoke
meanings = Meanings()


@meanings.of("torch.Tensor._version")
def test_writes_are_counted() -> None:
    tensor = torch.zeros(4)
    view = tensor[1:]
    before = compat.num_writes(tensor)
    tensor.sum()
    assert compat.num_writes(tensor) == before
    view.add_(1)
    assert compat.num_writes(tensor) == compat.num_writes(view) == before + 1


@meanings.of("torch._C._current_graph_task_id", "torch.autograd.Variable._execution_engine")
def test_backwards() -> None:
    """Each has a number of its own, also within another one; what is to be called then is called at its end."""
    seen: list[Any] = []

    def inner(gradient: Tensor) -> None:
        seen.append(compat.current_backward())
        compat.call_after_backward(lambda: seen.append("end"))
        with torch.enable_grad():
            other = torch.ones(1, requires_grad=True)
            other.register_hook(lambda _: seen.append(compat.current_backward()))
            (other * 2).sum().backward()

    for _ in range(2):
        weight = torch.ones(1, requires_grad=True)
        product = weight * 2
        weight.register_hook(lambda _: seen.append("weight"))
        product.register_hook(inner)
        assert compat.current_backward() == -1
        (product * 3).sum().backward()
    assert compat.current_backward() == -1
    first, nested, *words = seen[:4]
    second, again = seen[4:6]
    assert words == seen[6:] == ["weight", "end"]
    assert len({-1, first, nested, second, again}) == 5


@meanings.of("torch._C._len_torch_dispatch_stack", "torch._C._len_torch_function_stack")
def test_modes_that_watch() -> None:
    assert not compat.modes_watch()
    for mode in (TorchFunctionMode(), TorchDispatchMode()):
        with mode:
            assert compat.modes_watch()
        assert not compat.modes_watch()


@meanings.of(
    "torch.distributed.distributed_c10d._get_default_store",
    "DistributedDataParallel._set_params_and_buffers_to_ignore_for_model",
    "ShardedTensor._init_from_local_shards_and_global_metadata",
)
def test_of_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(of_ranks) == [["0", "1"], ["0", "1"]]


def of_ranks() -> list[str]:
    rank, other = dist.get_rank(), 1 - dist.get_rank()
    store = compat.default_store()
    store.set(f"compat/{rank}", str(rank))
    module = nn.ModuleDict({"trained": nn.Linear(2, 1, bias=False), "left": nn.Linear(2, 1, bias=False)})
    compat.ignore_in_ddp(module, ["left.weight"])
    wrapped = nn.parallel.DistributedDataParallel(module)
    assert [name for name, _ in wrapped.module.named_parameters()] == ["trained.weight", "left.weight"]
    assert {"left.weight"} == set(wrapped.parameters_to_ignore)
    places = [ShardMetadata([2 * owner, 0], [2, 3], f"rank:{owner}/cpu") for owner in range(2)]
    metadata = ShardedTensorMetadata(places, torch.Size([4, 3]), TensorProperties(dtype=torch.float32))
    if rank == 0:  # no collective: the other rank makes none
        made = compat.sharded_tensor([Shard(torch.ones(2, 3), places[0])], metadata)
        assert made.size() == torch.Size([4, 3])
        assert [shard.tensor.sum().item() for shard in made.local_shards()] == [6.0]
    store.wait([f"compat/{other}"])
    return sorted(store.get(f"compat/{one}").decode() for one in (rank, other))


def test_each_listed_name_has_a_test() -> None:
    assert meanings.without_test(compat.PRIVATE_NAMES) == set()
