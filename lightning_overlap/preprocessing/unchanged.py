"""Detect changes of objects that a call has read: by identity, and for tensors by write count."""

from __future__ import annotations

import random
from collections.abc import Callable
from enum import Enum
from typing import Any, TypeAlias

import numpy as np
import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor

from ..runtime import Path, leaves

Parts: TypeAlias = "list[tuple[Path, Any, Any]]"
"""(path, object, a value that changes with the object) for all parts of a value."""

CONSTANTS = (type(None), bool, int, float, str, bytes, torch.dtype, torch.device, Enum)
_MANY = 1000  # a container in a module with more entries counts as one object


def parts_of_batch(value: Any) -> Parts:
    """Return the parts of a batch, or of an object made from it."""
    return _parts(value, lambda node: isinstance(node, (KeyedJaggedTensor, JaggedTensor)))


def parts_of_state(value: Any) -> Parts:
    """Return the parts of a module's attribute; only lists, tuples and dicts have several."""
    return _parts(value, lambda node: not isinstance(node, (list, tuple, dict)) or len(node) > _MANY)


def differences(before: Parts, now: Parts) -> list[Path]:
    """Return the paths that differ."""
    old, new = ({path: (part, state) for path, part, state in parts} for parts in (before, now))
    return [path for path in old | new if path not in old or path not in new or not _same(old[path], new[path])]


def _parts(value: Any, is_leaf: Callable[[Any], bool]) -> Parts:
    found: Parts = []
    for path, leaf in leaves(value, is_leaf):
        if isinstance(leaf, (KeyedJaggedTensor, JaggedTensor)):
            tensors = {"lengths": leaf.lengths(), "values": leaf.values(), "weights": leaf.weights_or_none()}
            found += [((*path, ("attr", name)), part, _state(part)) for name, part in tensors.items()]
        else:
            found.append((path, leaf, _state(leaf)))
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


def _same(before: tuple[Any, Any], now: tuple[Any, Any]) -> bool:
    return is_same_part(before[0], now[0]) and bool(before[1] == now[1])


def is_same_part(before: Any, now: Any) -> bool:
    """Return whether two parts are the same object, or equal constants."""
    return before is now or (type(before) is type(now) and isinstance(now, CONSTANTS) and bool(before == now))
