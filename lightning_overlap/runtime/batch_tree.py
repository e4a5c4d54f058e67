"""Walk a batch: dataclasses, NamedTuples, tuples, lists, mappings, plain objects, nested in any way."""

import dataclasses
from collections.abc import Callable, Mapping, Sequence
from functools import lru_cache
from operator import methodcaller
from types import BuiltinFunctionType, FunctionType, MethodType, ModuleType
from typing import Any

import torch
from torch.utils.data import DataLoader, Dataset

Path = tuple[tuple[str, Any], ...]  # steps from a batch to a leaf: `("attr", name)` or `("item", key)`


def leaves(batch: Any, is_leaf: Callable[[Any], bool]) -> list[tuple[Path, Any]]:
    """Return (path, leaf) for every leaf of a batch, in a fixed order; an object that occurs twice has both paths.

    `is_leaf` says whether an object is a leaf; tensors, modules, datasets and objects without parts are leaves anyway.
    """
    found: list[tuple[Path, Any]] = []
    _collect(batch, (), is_leaf, frozenset(), found)
    return found


def _collect(
    node: Any, path: Path, is_leaf: Callable[[Any], bool], above: frozenset[int], found: list[tuple[Path, Any]]
) -> None:
    """Add the leaves below a node to `found`; a nested function would be a cycle that holds the tensors."""
    children = None if isinstance(node, torch.Tensor) or is_leaf(node) else _children(node)
    if children is None:
        found.append((path, node))
    elif id(node) not in above:  # else an object that holds itself
        above = above | {id(node)}
        for step, child in children:
            if isinstance(child, torch.Tensor) or is_leaf(child):
                found.append(((*path, step), child))
            else:
                _collect(child, (*path, step), is_leaf, above, found)


def tensors_in(value: Any) -> list[torch.Tensor]:
    """Return all tensors in a nested value, each once, also those in attributes of its objects."""
    return search(value)[0]


def search(value: Any) -> tuple[list[torch.Tensor], bool]:
    """Return all tensors in a nested value, each once, and whether it surely holds no others.

    Others may be where only an object's own methods find them: in a closure, or in an object without attributes.
    Finds the tensors that `leaves` finds, without paths. A device's streams do this several times in a step, so it
    calls no Python function for a node.
    """
    tensors, is_whole = [], True
    found: dict[int, Any] = {}  # holds the nodes: a property's value could otherwise give its address to another one
    to_search = [value]
    while to_search:
        node = to_search.pop()
        cls = node.__class__
        if cls in _ATOMS or id(node) in found:
            continue
        found[id(node)] = node
        if isinstance(node, torch.Tensor):
            tensors.append(node)
            continue
        parts = _parts_of(cls)
        if callable(parts):
            children = node.values() if parts is _ITEMS else node
            if not _ATOMS.issuperset(map(type, children)):  # lists of names and numbers are long
                to_search += children
            is_whole = is_whole and (cls in _CONTAINERS or _is_known(cls))
            continue
        names = () if parts is None else parts
        children = [child for name in names if (child := getattr(node, name, None)) is not None]
        own = getattr(node, "__dict__", None)
        if isinstance(parts, list) and own:
            children += own.values()
        to_search += children
        is_whole = is_whole and (_is_known(cls) or (isinstance(parts, tuple) and (not own or own.keys() <= {*parts})))
    return tensors, is_whole


@lru_cache(maxsize=256)
def _is_known(cls: type) -> bool:
    """Whether objects of a class hold tensors in attributes only, or none at all."""
    return cls.__module__.partition(".")[0] in ("torch", "torchrec") and not issubclass(cls, _NOT_SEARCHED)


def resolve(batch: Any, path: Path) -> Any:
    """Follow a path of `leaves`; a LookupError if this batch has nothing there."""
    for kind, key in path:
        try:
            batch = getattr(batch, key) if kind == "attr" else batch[key]
        except (AttributeError, LookupError, TypeError) as err:
            raise LookupError(f"the batch has no {path_text(path)}") from err
    return batch


def path_text(path: Path) -> str:
    """Write a path as Python would: `batch.sparse['user']`."""
    return "batch" + "".join(f".{key}" if kind == "attr" else f"[{key!r}]" for kind, key in path)


def _children(node: Any) -> list[tuple[tuple[str, Any], Any]] | None:
    parts = _parts_of(node.__class__)
    if callable(parts):
        return [(("item", key), value) for key, value in parts(node)]
    if parts is None:
        return None
    names = [*parts]
    may_have_more = isinstance(parts, list)
    if may_have_more:
        names += getattr(node, "__dict__", ())
    found = []
    for name in names:
        value = getattr(node, name, _ABSENT)
        if value is not _ABSENT:  # a field or slot may not be set
            found.append((("attr", name), value))
    return None if may_have_more and not found else found


@lru_cache(maxsize=256)  # `isinstance` is slow for abstract classes
def _parts_of(cls: type) -> Callable[[Any], Any] | Sequence[str] | None:
    """Return a function that lists an object's items, or names of attributes; in a list, `__dict__` may have more."""
    if cls in _ATOMS:
        return None
    if issubclass(cls, Mapping):
        return _ITEMS
    if issubclass(cls, tuple) and hasattr(cls, "_fields"):
        return tuple(cls._fields)
    if issubclass(cls, Sequence) and not issubclass(cls, (str, bytes)):
        return enumerate
    if issubclass(cls, _NOT_SEARCHED):
        return None
    if dataclasses.is_dataclass(cls):
        return tuple(field.name for field in dataclasses.fields(cls))
    return _slots(cls)  # type: ignore[arg-type]


_FUNCTIONS = (FunctionType, BuiltinFunctionType, MethodType)
_NOT_SEARCHED = (type, ModuleType, *_FUNCTIONS, torch.nn.Module, Dataset, DataLoader)
_ABSENT = object()
_CONTAINERS = frozenset((list, tuple, dict))
_ITEMS = methodcaller("items")
_ATOMS = frozenset((type(None), bool, int, float, str, bytes))


@lru_cache(maxsize=256)
def _slots(cls: type) -> list[str]:
    found = []
    for base in cls.__mro__:
        slots = vars(base).get("__slots__", ())
        for name in (slots,) if isinstance(slots, str) else slots:
            if not name.startswith("__"):
                found.append(name)
            elif not name.endswith("__"):
                found.append(f"_{base.__name__.lstrip('_')}{name}")  # as Python keeps a private name
    return found
