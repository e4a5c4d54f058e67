"""PyTorch's private names."""

import functools
import inspect
import os
from collections import OrderedDict
from collections.abc import Callable, Generator, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from operator import attrgetter
from typing import Any, TypeAlias, TypeVar

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch._functorch import pyfunctorch
from torch.distributed import Store  # type: ignore[attr-defined]
from torch.distributed._shard.sharded_tensor.api import ShardedTensor
from torch.distributed._shard.sharded_tensor.metadata import ShardedTensorMetadata
from torch.distributed._shard.sharded_tensor.shard import Shard
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.optim import apply_optimizer_in_backward as in_backward
from torch.nn.parallel import DistributedDataParallel
from torch.utils._python_dispatch import TorchDispatchMode as TorchDispatchMode
from torch.utils._pytree import register_pytree_node as register_pytree_node
from torch.utils._pytree import tree_leaves as tree_leaves
from torch.utils._pytree import tree_map_only as tree_map_only

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "torch.Tensor": ("_make_wrapper_subclass", "_version"),
    "torch.UntypedStorage": ("_cdata",),
    "torch.OpOverload": ("_schema",),
    "torch.ops.aten": ("_local_scalar_dense", "_to_copy", "_unique2"),
    "torch.optim.optimizer": ("_get_value",),
    "torch": ("_has_compatible_shallow_copy_type",),
    "torch.autograd": ("_get_sequence_nr",),
    "torch.autograd.forward_ad": ("_current_level",),
    "torch.autograd.Variable": ("_execution_engine",),
    "torch.autograd.graph.Node": ("_sequence_nr",),
    "torch._C": (
        *("DisableTorchFunctionSubclass", "_current_autograd_node", "_current_graph_task_id"),
        *("_len_torch_dispatch_stack", "_len_torch_function_stack"),
    ),
    "torch._C._functorch": ("peek_interpreter_stack",),
    "torch._functorch.pyfunctorch": ("temporarily_clear_interpreter_stack",),
    "torch._C._autograd": ("_profiler_enabled", "_top_saved_tensors_default_hooks"),
    "torch._dynamo": ("OptimizedModule",),
    "torch.nn.Module": (
        *("_backward_hooks", "_backward_pre_hooks", "_call_impl", "_compiled_call_impl", "_forward_hooks"),
        *("_buffers", "_forward_pre_hooks", "_load_from_state_dict", "_modules", "_parameters"),
    ),
    "torch.nn.Module.state_dict": ("_metadata",),
    "torch.nn.Parameter": ("_in_backward_optimizers", "_optimizer_classes", "_optimizer_kwargs"),
    "torch.distributed.optim.apply_optimizer_in_backward": (
        *("_apply_optimizer_in_backward", "param_to_acc_grad_map", "param_to_optim_hook_handle_map"),
    ),
    "torch.distributed.distributed_c10d": ("_get_default_store",),
    "torch.distributed.ProcessGroup": (
        *("_allgather_base", "_get_backend_name", "_reduce_scatter_base", "_register_backend"),
    ),
    "torch.distributed.checkpoint.metadata": ("_MEM_FORMAT_ENCODING",),
    "torch.serialization": ("_get_layout",),
    "DistributedDataParallel": ("_comm_hooks", "_set_params_and_buffers_to_ignore_for_model"),
    "ShardedTensor": ("_init_from_local_shards_and_global_metadata",),
}
"""By the module or class that has them. A name that this file imports is not listed: the import itself fails."""


# -- autograd --------------------------------------------------------------------------------------------------------


current_backward: Callable[[], int] = torch._C._current_graph_task_id
"""Return the number of the backward that this thread is in; -1 outside of a backward."""


def call_after_backward(call: Callable[[], None]) -> None:
    """Call a function once the backward that this thread is in has run all its nodes."""
    torch.autograd.Variable._execution_engine.queue_callback(call)


current_node: Callable[[], Any] = torch._C._current_autograd_node
"""Return the node of a graph that this thread runs in a backward; None outside of one."""

next_sequence_number: Callable[[], int] = torch.autograd._get_sequence_nr  # type: ignore[attr-defined]
"""Return the number that the next node gets that this thread makes."""


def sequence_number(node: Any) -> int:
    """Return the number of a node, in the order in which a thread makes them; of a leaf's node the largest number."""
    number: int = node._sequence_nr()
    return number


def saving_is_hooked() -> bool:
    """Whether hooks on saved tensors are active: a non-reentrant `checkpoint()` uses them to drop saved tensors."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def in_forward_ad() -> bool:
    """Whether this is within a level of forward-mode differentiation."""
    return torch.autograd.forward_ad._current_level >= 0


num_writes: Callable[[Tensor], int] = attrgetter("_version")
"""Return how often a tensor, or another one of the same memory, was written in place; no inference tensor."""


# -- compiled code ---------------------------------------------------------------------------------------------------

_Callable = TypeVar("_Callable", bound=Callable[..., Any])


_NEVER_COMPILED = (
    "lightning_overlap sends and receives embeddings outside of compiled code. Compile with fullgraph=False, or read "
    "the tensors of the collection's output (by values() or to_dict()) before the compiled code."
)


def never_compiled(call: _Callable) -> _Callable:
    """Return a function that `torch.compile` calls and never looks into, nor into what it calls.

    What is first used inside of a trace is traced: collectives, hooks and leaves that were made there would be parts of
    the user's graph. Code compiled with `fullgraph=True` gets Dynamo's error with this reason.
    """
    found: _Callable = torch.compiler.disable(call, reason=_NEVER_COMPILED)
    return found


def never_compile_methods(cls: type) -> type:
    """Apply `never_compiled` to the public methods and properties that a class defines, and to its generators' steps.

    They alone call the private methods. Generators may be private: what returns one has ended before it runs.
    """
    for name, found in list(vars(cls).items()):
        if inspect.isgeneratorfunction(found):
            setattr(cls, name, _never_compiled_steps(found))
        elif callable(found) and inspect.isgeneratorfunction(inspect.unwrap(found)):
            setattr(cls, name, contextmanager(_never_compiled_steps(inspect.unwrap(found))))
        elif name.startswith("_"):
            continue
        elif isinstance(found, property) and found.fget is not None:
            setattr(cls, name, found.getter(never_compiled(found.fget)))
        elif inspect.isfunction(found):
            setattr(cls, name, never_compiled(found))
    return cls


def _never_compiled_steps(call: Callable[..., Generator[Any, Any, Any]]) -> Callable[..., Any]:
    @functools.wraps(call)
    def make(*args: Any, **kwargs: Any) -> _Steps:
        return _Steps(call(*args, **kwargs))

    return make


class _Steps(Iterator[Any]):
    """A generator whose steps are `never_compiled`: Dynamo never traces a generator, but what it calls."""

    def __init__(self, generator: Generator[Any, Any, Any]) -> None:
        self._generator = generator

    @never_compiled
    def __next__(self) -> Any:
        return next(self._generator)

    @never_compiled
    def throw(self, *error: Any) -> Any:  # contextlib of Python 3.11 passes three arguments
        return self._generator.throw(*error)

    @never_compiled
    def close(self) -> None:
        self._generator.close()


def in_function_transform() -> bool:
    """Whether a transformation of functions runs (`torch.func.grad`, `vmap`, ...), which takes tensors for its own."""
    return torch._C._functorch.peek_interpreter_stack() is not None


def outside_function_transforms() -> AbstractContextManager[Any]:
    """Within this context no transformation of functions runs: tensors that are made belong to none."""
    found: AbstractContextManager[Any] = (
        pyfunctorch.temporarily_clear_interpreter_stack() if in_function_transform() else nullcontext()
    )
    return found


# -- operators, and who watches them ---------------------------------------------------------------------------------


def modes_watch() -> bool:
    """Whether a `TorchFunctionMode` or `TorchDispatchMode` sees the operators of this thread."""
    return torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0


is_profiled: Callable[[], bool] = torch._C._autograd._profiler_enabled
"""Whether a profiler may see this thread now."""
if "KINETO_USE_DAEMON" in os.environ:  # a daemon may start a profiler unseen by this thread
    is_profiled = functools.partial(bool, True)

as_plain_tensors: Callable[[], AbstractContextManager[None]] = torch._C.DisableTorchFunctionSubclass
"""Return a context in which subclasses of tensors are tensors like others: their `__torch_function__` is not called."""

_Wrapper = TypeVar("_Wrapper", bound=Tensor)


def wrapper_of(cls: type[_Wrapper], own: Tensor) -> _Wrapper:
    """Return a tensor of a subclass with another tensor's shape, dtype and device, and without memory.

    Its layout is another one, so that no dense tensor takes it for its `data`. Operators that do not ask the subclass's
    `__torch_function__` ask its `__torch_dispatch__`.
    """
    made: _Wrapper = Tensor._make_wrapper_subclass(
        cls, own.shape, dtype=own.dtype, device=own.device, layout=torch.sparse_coo
    )
    return made


ASKED_BY_APPLY = torch._has_compatible_shallow_copy_type.__name__
"""Name of the function that `nn.Module.to()` and the like ask whether a weight can be set by its `data`."""

DYNAMO = "torch._dynamo"
"""Name of the package that traces compiled code."""

COPY: Any = torch.ops.aten._to_copy.default
"""The operator that copies a tensor to another device or type."""

SYNCING_OPERATORS = frozenset({torch.ops.aten._local_scalar_dense.__name__, torch.ops.aten._unique2.__name__})
"""The operators with private names whose result the host waits for: `item()`, and `unique()` without dimension."""

READER_OF_STEPS = "/torch/optim/optimizer.py", "_get_value"
"""(end of the file's path, name) of the function that reads an optimizer's count of steps, which is on the host."""


def arguments_of(operator: Any) -> list[Any]:
    """Return the arguments of an operator's schema: each has `name`, and `alias_info.is_write` if it is written."""
    arguments: list[Any] = operator._schema.arguments
    return arguments


def address_of(storage: torch.UntypedStorage) -> int:
    """Return a number of a storage that no other one has while it lives."""
    address: int = storage._cdata
    return address


# -- modules ---------------------------------------------------------------------------------------------------------


def children_of(module: nn.Module) -> dict[str, Any]:
    """Return the children of a module by name: a dict that may be written, also with what is no module."""
    children: dict[str, Any] = module._modules
    return children


def buffers_of(module: nn.Module) -> dict[str, Tensor | None]:
    """Return a module's own buffers by name, a dict that is kept up to date."""
    buffers: dict[str, Tensor | None] = module._buffers
    return buffers


def attributes_of(module: nn.Module) -> dict[str, Any]:
    """Return a module's attributes by name, without its parameters, buffers and children."""
    registered = map(id, (module._parameters, module._buffers, module._modules))
    without = {*registered}
    return {name: value for name, value in vars(module).items() if id(value) not in without}


def num_forward_hooks(module: nn.Module) -> int:
    """Return how many hooks a call of a module runs before and after its forward."""
    return len(module._forward_hooks) + len(module._forward_pre_hooks)


def changes_output(module: nn.Module) -> bool:
    """Whether a module has hooks that may replace what its forward returns."""
    return bool(module._forward_hooks)


def has_backward_hooks(module: nn.Module) -> bool:
    """Whether a module has hooks on its backward."""
    return bool(module._backward_hooks or module._backward_pre_hooks)


def is_compiled(module: nn.Module) -> bool:
    """Whether a module's calls run compiled code, by `torch.compile(module)` or `module.compile()`."""
    return isinstance(module, torch._dynamo.OptimizedModule) or module._compiled_call_impl is not None


def compiled_modules(model: nn.Module) -> dict[str, nn.Module]:
    """Return the modules within a model that `torch.compile(module)` has wrapped, by the names of their wrappers."""
    wrappers = {name: one for name, one in model.named_modules() if isinstance(one, torch._dynamo.OptimizedModule)}
    return {name: next(wrapper.children()) for name, wrapper in wrappers.items()}


def replace_calls(module: nn.Module, call: Callable[..., Any]) -> None:
    """Let calls of a module run `call`, unless it is compiled. Calls that Dynamo traces still run its own forward."""
    vars(module).setdefault("_compiled_call_impl", call)


def restore_calls(module: nn.Module, call: Callable[..., Any]) -> None:
    """Undo `replace_calls`."""
    if vars(module).get("_compiled_call_impl") is call:
        del vars(module)["_compiled_call_impl"]


def call_with_hooks(module: nn.Module, *args: Any, **kwargs: Any) -> Any:
    """Call a module's present forward with its hooks, which a call from `replace_calls` has left out."""
    return module._call_impl(*args, **kwargs)


LoadOwn: TypeAlias = Callable[[dict[str, Any], str], None]  # takes a state_dict and the prefix of the module's names


def load_around(module: nn.Module, around: Callable[[dict[str, Any], str, LoadOwn], None]) -> None:
    """Let `around` load a module's own part of a `state_dict`, hooks first; children take what it leaves in there.

    It is called as `around(state_dict, prefix, load_own)`, and has to call `load_own(state_dict, prefix)`. A hook of
    torch's would not do: those that a module has already come first.
    """

    def load(state_dict: dict[str, Any], prefix: str, *rest: Any) -> None:
        around(state_dict, prefix, lambda given, at: type(module)._load_from_state_dict(module, given, at, *rest))

    vars(module)["_load_from_state_dict"] = load


def take_versions(state_dict: OrderedDict[str, Any], like: Mapping[str, Any]) -> None:
    """Give a `state_dict` the versions of modules of another, which `load_state_dict` hands to the modules."""
    if (versions := getattr(like, "_metadata", None)) is not None:
        vars(state_dict)["_metadata"] = versions


# -- optimizers in the backward (`apply_optimizer_in_backward`): what torch and TorchRec keep at a parameter ----------

AppliedOptimizer: TypeAlias = tuple[type[torch.optim.Optimizer], Mapping[str, Any]]  # class and arguments


def applied_in_backward(parameter: Tensor) -> AppliedOptimizer | None:
    """Return the optimizer that a parameter's backward is to apply, or None; the first of several."""
    classes, kwargs = getattr(parameter, "_optimizer_classes", ()), getattr(parameter, "_optimizer_kwargs", ())
    return next(zip(classes, kwargs, strict=True), None)


def note_in_backward(parameter: Tensor, applied: AppliedOptimizer) -> None:
    """Note an optimizer for TorchRec to fuse; unlike torch's function, make no optimizer and no state."""
    optimizer_class, kwargs = applied
    vars(parameter).update(
        _optimizer_classes=[optimizer_class], _optimizer_kwargs=[dict(kwargs)], _in_backward_optimizers=[]
    )


def tell_in_backward(parameter: Tensor, arguments: Mapping[str, Any]) -> None:
    """Note other arguments of the optimizer that is noted, in a dict of the parameter's own.

    TorchRec hands them on to the kernel, and writes its kind of optimizer there. Parameters may share what was noted.
    """
    _, *further = vars(parameter)["_optimizer_kwargs"]  # TorchRec refuses several
    vars(parameter)["_optimizer_kwargs"] = [dict(arguments), *further]


def apply_in_backward(parameter: Tensor, applied: AppliedOptimizer) -> None:
    """Let torch make an optimizer, and step it in each backward that reaches the parameter."""
    optimizer_class, kwargs = applied
    in_backward._apply_optimizer_in_backward(optimizer_class, [parameter], dict(kwargs))


def mark_in_backward(parameter: Tensor, optimizers: list[Any]) -> None:
    """Mark a parameter as one of these optimizers in the backward (for `in_backward_optimizer_filter`)."""
    vars(parameter)["_in_backward_optimizers"] = optimizers


def forget_in_backward(parameter: Tensor) -> None:
    """Forget the optimizers of a parameter that is replaced: torch's maps of them never forget one."""
    for hook in in_backward.param_to_optim_hook_handle_map.pop(parameter, ()):
        hook.remove()
    in_backward.param_to_acc_grad_map.pop(parameter, None)
    vars(parameter).pop("_in_backward_optimizers", None)


# -- processes -------------------------------------------------------------------------------------------------------


def default_store() -> Store:
    """Return the store of the default process group, which is initialized."""
    return dist.distributed_c10d._get_default_store()


def ignore_in_ddp(module: nn.Module, names: Iterable[str]) -> None:
    """Let DistributedDataParallel leave parameters and buffers of a module alone; `names` is kept, not copied."""
    DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(module, names)


def has_comm_hook(model: DistributedDataParallel) -> bool:
    """Whether somebody has registered a hook for the all-reduce of gradients."""
    return bool(model._comm_hooks)


def sharded_tensor(shards: list[Shard], metadata: ShardedTensorMetadata) -> ShardedTensor:
    """Return a ShardedTensor of this rank's shards, without a question to the other ranks."""
    return ShardedTensor._init_from_local_shards_and_global_metadata(shards, sharded_tensor_metadata=metadata)


class OverGloo(dist.ProcessGroup):
    """A process group for host memory that hands on to gloo every collective that a subclass does not define.

    It calls gloo directly and not through the base class: that would hold Python's lock, for which a gloo thread with
    its own lock may wait.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self.gloo: Any = gloo  # torch's annotations lack methods that every backend has
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def _get_backend_name(self) -> str:
        return "gloo"  # PyTorch's sharded tensors take this name for host memory, and any other name for a device's


_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "alltoall", "barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("send", "recv", "recv_anysource", "gather_single"),
)
_OLDER = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
"""Process group method in torch 2.13 and 2.14 -> gloo's older name for it."""


def _hand_on(group: type, gloo: type) -> None:
    def handed_on(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self.gloo, name)(*args, **kwargs)

    for name in (*_COLLECTIVES, *_OLDER):
        method = name if hasattr(gloo, name) else _OLDER.get(name, name)
        if hasattr(gloo, method):
            setattr(group, name, handed_on(method))


_hand_on(OverGloo, dist.ProcessGroupGloo)


# -- checkpoints -----------------------------------------------------------------------------------------------------

StoragePlace: TypeAlias = _StorageInfo  # in which file of a folder a tensor is, and where in it

NAMES_IN_METADATA = (
    ("torch.distributed.checkpoint.metadata", "_MEM_FORMAT_ENCODING"),
    ("torch.serialization", "_get_layout"),
)
"""(module, name) of the private names that the `.metadata` of a `torch.distributed.checkpoint` contains."""
