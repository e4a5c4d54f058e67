"""PyTorch's private names."""

from collections.abc import Callable, Iterable, Mapping

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.nn.parallel import DistributedDataParallel

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "torch.Tensor": ("_version",),
    "torch.autograd.Variable": ("_execution_engine",),
    "torch._C": ("_current_graph_task_id", "_len_torch_dispatch_stack", "_len_torch_function_stack"),
    "torch.distributed.distributed_c10d": ("_get_default_store",),
    "DistributedDataParallel": ("_set_params_and_buffers_to_ignore_for_model",),
    "ShardedTensor": ("_init_from_local_shards_and_global_metadata",),
}
"""By the module or class that has them."""


def default_store() -> Store:
    """Return the store of the default process group, which is initialized."""
    return dist.distributed_c10d._get_default_store()


def ignore_in_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Let DistributedDataParallel leave parameters and buffers of a module alone; `names` is kept, not copied."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def current_backward() -> int:
    """Return the number of the backward that this thread is in; -1 outside of a backward."""
    return torch._C._current_graph_task_id()


def call_after_backward(call: Callable[[], None]) -> None:
    """Call a function once the backward that this thread is in has run all its nodes."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


def modes_watch() -> bool:
    """Whether a `TorchFunctionMode` or `TorchDispatchMode` sees the operators of this thread."""
    return torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0


def num_writes(tensor: Tensor) -> int:
    """Return how often a tensor, or another one of the same memory, was written in place; no inference tensor."""
    return tensor._version


def sharded_tensor(shards: list[Shard], metadata: ShardedTensorMetadata) -> ShardedTensor:
    """Return a ShardedTensor of this rank's shards, without a question to the other ranks."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, sharded_tensor_metadata=metadata)
