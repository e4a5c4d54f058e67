"""Walk a batch: dataclasses, NamedTuples, tuples, lists, mappings, plain objects, nested in any way."""

from __future__ import annotations

import copy
import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

Path = tuple[tuple[str, Any], ...]
"""Steps from a batch to a leaf: `("attr", name)` or `("item", key)`."""


def leaves(batch: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[Path, Any]]:
    """Return every leaf of a batch with the path that leads to it, in a fixed order.

    Args:
        batch: Any nesting of dataclasses, NamedTuples, tuples, lists, mappings and plain objects.
        is_leaf: Objects that are not descended into (tensors never are).
    """
    found: list[tuple[Path, Any]] = []
    _collect(batch, (), is_leaf, frozenset(), found)
    return found


def resolve(batch: Any, path: Path) -> Any:
    """Follow a path of `leaves`.

    Raises:
        LookupError: This batch has nothing at that path.
    """
    for kind, key in path:
        try:
            batch = getattr(batch, key) if kind == "attr" else batch[key]
        except (AttributeError, LookupError, TypeError) as err:
            raise LookupError(f"the batch has no {path_text(path)}") from err
    return batch


def path_text(path: Path) -> str:
    """Write a path as Python would: `batch.sparse['user']`."""
    return "batch" + "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in path)


def with_leaves(batch: Any, change: Callable[[Any], Any]) -> Any:
    """Return a batch with other leaves; what holds none of them stays the object that it was.

    Args:
        batch: As for `leaves`; nothing of it is changed.
        change: Returns what takes the place of a leaf, or the leaf itself. It is asked once for each object, and not
            for numbers and strings.

    Raises:
        TypeError: An object with such a leaf below it cannot be copied, or not changed.
    """
    return _with_leaves(batch, change, {})


def _with_leaves(node: Any, change: Callable[[Any], Any], memo: dict[int, tuple[Any, Any]]) -> Any:
    if id(node) in memo:
        return memo[id(node)][1]
    memo[id(node)] = node, node  # an object that holds itself
    children = None if isinstance(node, torch.Tensor) else _children(node)
    if children is None:
        new = change(node)
    else:
        others = [
            (step, new)
            for step, child in children
            if type(child) not in _ATOMS and (new := _with_leaves(child, change, memo)) is not child
        ]
        new = _with_children(node, others) if others else node
    memo[id(node)] = node, new
    return new


def _with_children(node: Any, changed: list[tuple[tuple[str, Any], Any]]) -> Any:
    if isinstance(node, tuple):
        children = list(node)
        for (kind, key), new in changed:
            children[type(node)._fields.index(key) if kind == "attr" else key] = new  # type: ignore[attr-defined]
        return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
    new_node = copy.copy(node)
    if new_node is node:
        raise TypeError(f"a copy of {type(node).__name__} is the object itself")
    for (kind, key), new in changed:
        if kind == "attr":
            object.__setattr__(new_node, key, new)  # a frozen dataclass, too
        else:
            new_node[key] = new
    return new_node


def _collect(
    node: Any, path: Path, is_leaf: Callable[[Any], bool], above: frozenset[int], found: list[tuple[Path, Any]]
) -> None:
    children = None if isinstance(node, torch.Tensor) or is_leaf(node) else _children(node)
    if children is None:
        found.append((path, node))
    elif id(node) not in above:  # else an object that holds itself
        above = above | {id(node)}
        for step, child in children:
            if isinstance(child, torch.Tensor):  # most are
                found.append(((*path, step), child))
            else:
                _collect(child, (*path, step), is_leaf, above, found)


def _children(node: Any) -> list[tuple[tuple[str, Any], Any]] | None:
    if type(node) in _ATOMS:
        return None
    if isinstance(node, Mapping):
        return [(("item", key), value) for key, value in node.items()]
    if isinstance(node, tuple) and hasattr(node, "_fields"):
        return [(("attr", name), getattr(node, name)) for name in node._fields]
    if isinstance(node, Sequence) and not isinstance(node, (str, bytes)):
        return [(("item", index), value) for index, value in enumerate(node)]
    if isinstance(node, _NOT_SEARCHED):
        return None
    if dataclasses.is_dataclass(node):
        return [(("attr", field.name), getattr(node, field.name)) for field in dataclasses.fields(node)]
    names = [name for name in _slots(type(node)) if hasattr(node, name)]  # type: ignore[arg-type]
    if hasattr(node, "__dict__"):
        names += vars(node)
    return [(("attr", name), getattr(node, name)) for name in names] if names else None


_NOT_SEARCHED = (
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
    *(torch.nn.Module, Dataset, DataLoader),
)

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))


@lru_cache(maxsize=256)
def _slots(cls: type) -> list[str]:
    """Return the names of a class's slots, those of its bases included."""
    own = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for slots in own for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]
