"""Walk a batch: dataclasses, NamedTuples, tuples, lists, mappings, plain objects, nested in any way."""

from __future__ import annotations

import copy
import dataclasses
import weakref
from collections import deque
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import numpy as np
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
        batch: As for `leaves`; nothing of it is changed. Arrays are leaves here, and of an object all attributes count.
        change: Returns what takes the place of a leaf, or the leaf itself. It is asked once for each object, and not
            for numbers and strings.

    Raises:
        TypeError: An object with such a leaf below it cannot be copied, or not changed.
    """
    return _Copy(change).of_batch(batch)


class _Copy:
    """One batch with other leaves."""

    def __init__(self, change: Callable[[Any], Any]) -> None:
        self._change = change
        self._memo: dict[int, tuple[Any, Any]] = {}
        self._open: set[int] = set()  # nodes above the one that is visited
        self._points_back = False

    def of_batch(self, batch: Any) -> Any:
        new_batch = self._of(batch)
        if self._points_back:
            for node, new_node in list(self._memo.values()):
                if new_node is not node and not isinstance(node, (*_LEAVES, tuple)):
                    _change_parts(new_node, [(step, self._new_end(child)) for step, child in _parts(new_node) or ()])
        return new_batch

    def _of(self, node: Any) -> Any:
        if id(node) in self._memo:
            self._points_back |= id(node) in self._open
            return self._memo[id(node)][1]
        self._memo[id(node)] = node, node
        parts = _parts(node)
        if parts is None:
            new = self._change(node)
            self._points_back |= type(node) is weakref.ref
        else:
            self._open.add(id(node))
            others = [
                (step, new)
                for step, child in parts
                if type(child) not in _ATOMS and (new := self._of(child)) is not child
            ]
            new = _with_parts(node, others) if others else node
            self._open.remove(id(node))
        self._memo[id(node)] = node, new
        return new

    def _new_end(self, child: Any) -> Any:
        """Return what a part of a copied object is to be: where it refers to one above it, to the copy of that."""
        if type(child) is weakref.ref:
            _, new = self._memo.get(id(end := child()), (end, end))
            return child if new is end else weakref.ref(new)
        return self._memo.get(id(child), (child, child))[1]


def _parts(node: Any) -> list[tuple[tuple[str, Any], Any]] | None:
    """Return all that an object holds itself: what a mapping of a user's own shows as items is in its attributes."""
    if type(node) in _ATOMS or isinstance(node, _LEAVES):
        return None
    if isinstance(node, tuple):
        return _children(node)
    attributes = [] if isinstance(node, _NOT_SEARCHED) else _attributes(node)
    if isinstance(node, _CONTAINERS) or not attributes:
        return [*attributes, *(_children(node) or ())] or None if isinstance(node, (Mapping, Sequence)) else None
    return attributes


def _with_parts(node: Any, changed: list[tuple[tuple[str, Any], Any]]) -> Any:
    if isinstance(node, tuple):
        children = list(node)
        for (kind, key), new in changed:
            children[type(node)._fields.index(key) if kind == "attr" else key] = new  # type: ignore[attr-defined]
        return type(node)(*children) if hasattr(node, "_fields") else type(node)(children)
    new_node = copy.copy(node)
    if new_node is node:
        raise TypeError(f"a copy of {type(node).__name__} is the object itself")
    _change_parts(new_node, changed)
    return new_node


def _change_parts(new_node: Any, changed: list[tuple[tuple[str, Any], Any]]) -> None:
    for (kind, key), new in changed:
        if kind == "item":
            new_node[key] = new
        elif key in getattr(new_node, "__dict__", ()):
            vars(new_node)[key] = new
        else:
            object.__setattr__(new_node, key, new)  # a frozen dataclass, too


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
    return _attributes(node) or None


def _attributes(node: Any) -> list[tuple[tuple[str, Any], Any]]:
    names = [name for name in _slots(type(node)) if hasattr(node, name)]  # type: ignore[arg-type]
    if hasattr(node, "__dict__"):
        names += vars(node)
    return [(("attr", name), getattr(node, name)) for name in names]


_NOT_SEARCHED = (
    *(type, ModuleType, FunctionType, BuiltinFunctionType, MethodType),
    *(torch.nn.Module, Dataset, DataLoader),
)

_LEAVES = (torch.Tensor, np.ndarray)
_CONTAINERS = (dict, list, deque)

_ATOMS = frozenset((type(None), bool, int, float, str, bytes))


@lru_cache(maxsize=256)
def _slots(cls: type) -> list[str]:
    """Return the names of a class's slots, those of its bases included."""
    found = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                found.append(name)
            elif not name.endswith("__"):
                found.append(f"_{base.__name__.lstrip('_')}{name}")  # as Python keeps a private name
    return found
