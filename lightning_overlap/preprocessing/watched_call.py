"""Watch one call of a staged method: which module state it reads, and whether it may be called early."""

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

Reads: TypeAlias = "dict[tuple[nn.Module, str], None]"  # (module, attribute), in the order of the first read

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers"}
_KINDS = ("_parameters", "_buffers", "_modules")  # dicts in which a module keeps other attributes
_OF_THE_STEP = {"trainer", "global_step", "log", "log_dict", "logger", "loggers", "optimizers", "lr_schedulers"}
"""Attributes of a LightningModule that belong to the current step, which is not the step of a staged batch."""
_FIXED = ("global_rank", "local_rank", "current_epoch")
"""Properties that read `trainer`, but do not change while batches are in flight."""


class NotStagedError(RuntimeError):
    """A staged method's result would differ before its batch's step."""


def watch(call: Callable[[], Any], given: Any, owner: nn.Module, *, trains: bool) -> tuple[Any, Reads]:
    """Call a staged method of `owner` with arguments `given`; return its result and the attributes that it read.

    Raises:
        NotStagedError: The method draws random numbers, changes a module or its arguments, calls a sharded module,
            reads trained weights, or its result requires grad.
    """
    arguments, state, random_before = parts_of_batch(given), _state_of(owner), _random_states()
    with _reading(owner) as reads, _eager():
        result = call()
    if _random_states() != random_before:
        raise NotStagedError(
            "draws random numbers, so that their order would change. Draw them in the dataset, the collate function or "
            "on_after_batch_transfer"
        )
    if changed := differences(arguments, parts_of_batch(given)):
        raise NotStagedError(
            f"changes its arguments (at {some(map(_name, changed))}), so that training_step would see the changes too "
            "early. Return new objects and do not change the batch"
        )
    if changed := differences(state, _state_of(owner)):
        raise NotStagedError(
            f"changes its module ({some(map(_name, changed))}) before earlier batches are trained. Change modules in "
            "training_step"
        )
    _check_reads(reads, trains=trains)
    if trains and any(isinstance(part, torch.Tensor) and part.requires_grad for _, part, _ in parts_of_batch(result)):
        raise NotStagedError("returns a tensor that requires grad. Use trained weights in training_step")
    return result, reads


def state_read(reads: Reads) -> Parts:
    """Return the current parts of these attributes."""
    return parts_of_state([_attribute(module, name) for module, name in reads])


def _check_reads(reads: Reads, *, trains: bool) -> None:
    for module, name in reads:
        value = _attribute(module, name)
        if isinstance(value, ShardedModule):
            raise NotStagedError(
                f"calls the sharded module {name!r}. Only make its input, and call it in training_step"
            )
        weights = value.values() if name == "_parameters" else [value]
        if trains and any(isinstance(weight, nn.Parameter) and weight.requires_grad for weight in weights):
            raise NotStagedError(
                f"reads {name!r} of {type(module).__name__}, which is trained: an early call would read the weights of "
                "an earlier step. Read it in training_step, or freeze it (requires_grad=False)"
            )
        if name in _OF_THE_STEP and not (name == "trainer" and any((module, one) in reads for one in _FIXED)):
            raise NotStagedError(f"uses self.{name}, which belongs to an earlier step then. Use it in training_step")


def _attribute(module: nn.Module, name: str) -> Any:
    if isinstance(module, torch.jit.ScriptModule):
        return getattr(module, name, None)
    own = vars(module)
    if name in own:
        return own[name]
    return next((own[kind][name] for kind in _KINDS if name in own.get(kind, ())), None)


def _state_of(owner: nn.Module) -> Parts:
    states = {}
    for name, module in _without_tables(owner).items():
        own = {key: value for key, value in vars(module).items() if key not in _OF_EVERY_MODULE}
        states[name or type(owner).__name__] = {**own, "children": list(module.children())}
    return parts_of_state(states)


def _without_tables(owner: nn.Module) -> dict[str, nn.Module]:
    """Return a module and its submodules by name, without sharded modules and their submodules."""
    sharded = [module for module in owner.modules() if isinstance(module, ShardedModule)]
    held = {id(inside) for module in sharded for inside in module.modules()}
    return {name: module for name, module in owner.named_modules() if id(module) not in held}


def _name(path: Any) -> str:
    return ".".join(str(key) for _, key in path)


def _random_states() -> list[Any]:
    on_device = [torch.cuda.get_rng_state().tolist()] if torch.cuda.is_initialized() else []
    numpy_state: Any = np.random.get_state()
    return [torch.get_rng_state().tolist(), random.getstate(), numpy_state[1].tolist(), numpy_state[2], *on_device]


def _eager() -> AbstractContextManager[Any]:
    """Run compiled functions eagerly, since the compiler does not know the watching classes."""
    return torch.compiler.set_stance("force_eager") if "torch._dynamo" in sys.modules else nullcontext()


@contextmanager
def _reading(owner: nn.Module) -> Iterator[Reads]:
    """Note which attributes of a module and its submodules are read in this context.

    Temporarily replaces their classes by subclasses. TorchScript modules do not read attributes in Python: all their
    parameters and buffers count as read if another module reads the TorchScript module.
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
