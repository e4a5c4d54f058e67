"""Watch one call of a staged method: which module state it reads, and whether it may be called early."""

import random
import sys
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager, nullcontext
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor, nn
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ..runtime import Path, leaves
from ..text import some

Parts: TypeAlias = "dict[Path, tuple[Any, Any]]"  # of a value: path -> (object, what changes with it: a write count)

CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, Enum)
_MANY = 1000  # a container in a module with more entries counts as one object

Reads: TypeAlias = "dict[tuple[nn.Module, str], None]"  # (module, attribute), in the order of the first read

_OF_EVERY_MODULE = frozenset(vars(nn.Module())) - {"training", "_parameters", "_buffers"}
_KINDS = ("_parameters", "_buffers", "_modules")  # dicts in which a module keeps other attributes
_OF_THE_STEP = {"trainer", "global_step", "log", "log_dict", "logger", "loggers", "optimizers", "lr_schedulers"}
"""Attributes of a LightningModule that belong to the current step, which is not the step of a staged batch."""
_FIXED = ("global_rank", "local_rank", "current_epoch")  # they read `trainer`, but are constant with batches in flight


class NotStagedError(RuntimeError):
    """A staged method's result would differ before its batch's step."""


def watch(call: Callable[[], Any], given: Any, owner: nn.Module, *, trains: bool) -> tuple[Any, Reads]:
    """Call a staged method; return its result and reads, or raise a NotStagedError if an early result could differ."""
    arguments, state, random_before = parts_of_batch(given), _state_of(owner), _random_states()
    is_compiling = "torch._dynamo" in sys.modules  # the compiler does not know the classes that `_reading` sets
    with _reading(owner) as reads, torch.compiler.set_stance("force_eager") if is_compiling else nullcontext():
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
    if trains and any(isinstance(part, Tensor) and part.requires_grad for part, _ in parts_of_batch(result).values()):
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
        if name in _OF_THE_STEP:
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


@contextmanager
def _reading(owner: nn.Module) -> Iterator[Reads]:
    """Note which attributes of a module and its submodules are read, while subclasses replace their classes."""
    reads: Reads = {}
    with ExitStack() as replaced:
        for module in _without_tables(owner).values():
            if not isinstance(module, torch.jit.ScriptModule):
                replaced.callback(object.__setattr__, module, "__class__", type(module))
                object.__setattr__(module, "__class__", _noting(type(module), reads))
        yield reads
    # TorchScript reads no attributes in Python: all parameters and buffers of a read TorchScript module count as read.
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
        if name not in _FIXED:
            return own(self, name)
        before = dict(reads)
        value = own(self, name)
        reads.clear()  # of what the property itself has read
        reads.update(before)
        return value

    return type(cls)(cls.__name__, (cls,), {"__getattribute__": noting, "__module__": cls.__module__})


def parts_of_batch(value: Any) -> Parts:
    """Return the parts of a batch, or of an object made from it."""
    return _parts(value, lambda node: isinstance(node, (KeyedJaggedTensor, JaggedTensor)))


def parts_of_state(value: Any) -> Parts:
    """Return the parts of a module's attribute; only lists, tuples and dicts have several."""
    return _parts(value, lambda node: not isinstance(node, (list, tuple, dict)) or len(node) > _MANY)


def differences(before: Parts, now: Parts) -> list[Path]:
    """Return the paths that differ."""

    def is_same(path: Path) -> bool:
        if path not in before or path not in now:
            return False
        (part, state), (part_now, state_now) = before[path], now[path]
        return _is_same_part(part, part_now) and bool(state == state_now)

    return [path for path in before | now if not is_same(path)]


def _parts(value: Any, is_leaf: Callable[[Any], bool]) -> Parts:
    found: Parts = {}
    for path, leaf in leaves(value, is_leaf):
        if isinstance(leaf, (KeyedJaggedTensor, JaggedTensor)):
            tensors = {"lengths": leaf.lengths(), "values": leaf.values(), "weights": leaf.weights_or_none()}
            found |= {(*path, ("attr", name)): (part, _state(part)) for name, part in tensors.items()}
        else:
            found[path] = leaf, _state(leaf)
    return found


def _state(part: Any) -> Any:
    if isinstance(part, Tensor):
        return -1 if part.is_inference() else part._version
    if isinstance(part, (list, tuple, dict, set, frozenset)):
        return len(part)
    if isinstance(part, torch.Generator):
        return part.get_state().numpy().tobytes()
    if isinstance(part, random.Random):
        return part.getstate()
    if isinstance(part, np.random.Generator):
        return str(part.bit_generator.state)
    return None


def _is_same_part(before: Any, now: Any) -> bool:
    return before is now or (type(before) is type(now) and isinstance(now, CONSTANTS) and bool(before == now))


def is_same(staged: Any, given: Any) -> bool:
    """Return whether arguments, in any nesting of lists, tuples and dicts, are the same parts."""
    if _is_same_part(staged, given):
        return True
    if type(staged) is not type(given) or type(given) not in (list, tuple, dict) or len(staged) != len(given):
        return False
    if isinstance(given, dict):
        return all(key in staged and is_same(staged[key], one) for key, one in given.items())
    return all(map(is_same, staged, given))
