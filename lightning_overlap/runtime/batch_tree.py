"""Walk a batch: dataclasses, NamedTuples, tuples, lists, mappings, plain objects, nested in any way."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch

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
    names = [name for name in _slots(type(node)) if hasattr(node, name)]
    if hasattr(node, "__dict__"):
        names += vars(node)
    return [(("attr", name), getattr(node, name)) for name in names] if names else None


_NOT_SEARCHED = (type, ModuleType, torch.nn.Module, FunctionType, BuiltinFunctionType, MethodType)


def _slots(cls: type) -> list[str]:
    """Return the names of a class's slots, those of its bases included."""
    own = [vars(base).get("__slots__", ()) for base in cls.__mro__]
    names = [name for slots in own for name in ((slots,) if isinstance(slots, str) else slots)]
    return [name for name in names if not name.startswith("__")]
