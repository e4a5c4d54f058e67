"""Look at one call of a staged method: what it reads of its modules, and whether it may come before its turn."""

from __future__ import annotations

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import nn
from torchrec.distributed.types import ShardedModule

from ..text import some
from .unchanged import Parts, differences, parts_of_batch, parts_of_state

Reads: TypeAlias = "dict[tuple[nn.Module, str], None]"
"""Attributes by module and name, in the order in which they were read first."""

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers"}
_KINDS = ("_parameters", "_buffers", "_modules")
"""Where a module keeps what is no attribute."""
_OF_THE_STEP = frozenset(
    {"trainer", "global_step", "log", "log_dict", "logger", "loggers", "optimizers", "lr_schedulers"}
)
"""What a LightningModule offers that belongs to the step that runs, which is not that of a batch being staged."""
_FIXED = frozenset({"global_rank", "local_rank", "current_epoch"})
"""Its properties that read `trainer`, and stay what they are while batches are in flight."""


class NotStagedError(RuntimeError):
    """A staged method whose result would be another one before its batch's step."""


def watch(call: Callable[[], Any], given: Any, owner: nn.Module, *, trains: bool) -> tuple[Any, Reads]:
    """Make a call, and check that its result would be the same before its batch's step.

    Args:
        call: Calls the staged method.
        given: Its arguments.
        owner: The module that has the method.
        trains: Whether an optimizer steps between two batches.

    Returns:
        What the method returns, and the attributes of modules that it has read.

    Raises:
        NotStagedError: It draws random numbers, changes a module or its arguments, calls a sharded module, reads
            weights that are trained, or its result has a graph.
    """
    before, random_before = (parts_of_batch(given), _state_of(owner)), _random_states()
    with _reading(owner) as reads, _eager():
        result = call()
    if _random_states() != random_before:
        raise NotStagedError(
            "draws random numbers, which would come in another order. Draw them in the dataset, the collate function "
            "or on_after_batch_transfer"
        )
    if changed := differences(before[0], parts_of_batch(given)):
        raise NotStagedError(
            f"changes its arguments (at {some(map(_name, changed))}), which training_step would find changed early. "
            "Return new objects and leave the batch as it is"
        )
    if changed := differences(before[1], _state_of(owner)):
        raise NotStagedError(
            f"changes its module ({some(map(_name, changed))}) before earlier batches are trained. Do that in "
            "training_step, and return what is made of the batch only"
        )
    _check_reads(reads, trains=trains)
    if trains and any(isinstance(part, torch.Tensor) and part.requires_grad for _, part, _ in parts_of_batch(result)):
        raise NotStagedError("returns a tensor that requires grad. Do what is trained in training_step")
    return result, reads


def state_read(reads: Reads) -> Parts:
    """Return what these attributes are now."""
    return parts_of_state([_attribute(module, name) for module, name in reads])


def _check_reads(reads: Reads, *, trains: bool) -> None:
    for module, name in reads:
        value = _attribute(module, name)
        if isinstance(value, ShardedModule):
            raise NotStagedError(f"calls the sharded module {name!r}. Make its input only, call it in training_step")
        weights = value.values() if name == "_parameters" else [value]
        if trains and any(isinstance(weight, nn.Parameter) and weight.requires_grad for weight in weights):
            raise NotStagedError(
                f"reads {name!r} of {type(module).__name__}, which is trained: before its batch's turn it is that of "
                "an earlier step. Do this in training_step, or freeze it (requires_grad=False)"
            )
        if name in _OF_THE_STEP and not (name == "trainer" and any((module, one) in reads for one in _FIXED)):
            raise NotStagedError(f"uses self.{name}, which is at an earlier step then. Use it in training_step")


def _attribute(module: nn.Module, name: str) -> Any:
    """Return a module's own attribute, parameter, buffer or child; None for what its class has."""
    own = vars(module)
    if isinstance(module, torch.jit.ScriptModule):
        return getattr(module, name, None)
    if name in own:
        return own[name]
    return next((own[kind][name] for kind in _KINDS if name in own.get(kind, ())), None)


def _state_of(owner: nn.Module) -> Parts:
    """Return the attributes, parameters and buffers of a module and of those inside it."""
    return parts_of_state(
        {
            name or type(owner).__name__: {
                **{key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE},
                "children": list(module.children()),
            }
            for name, module in _without_tables(owner).items()
        }
    )


def _without_tables(owner: nn.Module) -> dict[str, nn.Module]:
    """Return a module and those inside it by name, but those that are sharded and what these hold."""
    sharded = [module for module in owner.modules() if isinstance(module, ShardedModule)]
    held = {id(inside) for module in sharded for inside in module.modules()}
    return {name: module for name, module in owner.named_modules() if id(module) not in held}


def _name(path: Any) -> str:
    return ".".join(str(key) for _, key in path)


def _random_states() -> list[Any]:
    on_device = [torch.cuda.get_rng_state().numpy().tobytes()] if torch.cuda.is_initialized() else []
    numpy_state: Any = np.random.get_state()
    return [
        torch.get_rng_state().numpy().tobytes(),
        random.getstate(),
        numpy_state[1].tobytes(),
        numpy_state[2],
        *on_device,
    ]


def _eager() -> AbstractContextManager[Any]:
    """Within this context compiled functions run as written, as their compiler does not know classes that watch."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _reading(owner: nn.Module) -> Iterator[Reads]:
    """Within this context note which attributes of a module, and of those inside it, are read.

    Their classes are replaced by subclasses for that time. Of TorchScript's modules, which do not read in Python, all
    parameters and buffers count as read once another module has read them.
    """
    reads: Reads = {}
    replaced: list[tuple[nn.Module, type]] = []
    try:
        for module in _without_tables(owner).values():
            if not isinstance(module, torch.jit.ScriptModule):
                replaced.append((module, type(module)))
                object.__setattr__(module, "__class__", _noting(type(module), reads))
        yield reads
    finally:
        for module, cls in replaced:
            object.__setattr__(module, "__class__", cls)
    used = [_attribute(module, name) for module, name in reads]
    scripted = [one for module in used if isinstance(module, torch.jit.ScriptModule) for one in module.modules()]
    for module in scripted:
        tensors = (*module.named_parameters(recurse=False), *module.named_buffers(recurse=False))
        reads |= {(module, name): None for name, _ in tensors}


def _noting(cls: type, reads: Reads) -> type:
    own: Any = cls.__getattribute__

    def noting(self: Any, name: str) -> Any:
        if name not in _OF_EVERY_MODULE and not name.startswith("__"):
            reads[self, name] = None
        return own(self, name)

    return type(cls)(cls.__name__, (cls,), {"__getattribute__": noting, "__module__": cls.__module__})
