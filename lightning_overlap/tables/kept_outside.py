"""Weights and collections that a module keeps in plain containers, where sharding does not replace them."""

import inspect
from collections.abc import Iterator, Mapping
from functools import partial
from types import FunctionType, MethodType
from typing import Any

from torch import nn

from ..compat.torch import attributes_of
from ..text import some
from .table import Table

_DEPTH, _MOST = 4, 10_000  # of containers within each other, and of what is in one: vocabularies are longer


def refuse_kept_outside(model: nn.Module, tables: list[Table]) -> None:
    """Raise a ValueError if an attribute of a module has a table's weight, or a module with it, in a plain container.

    The attribute would go on with the unsharded table, with its initial values: nothing trains it. Searched are lists,
    tuples, sets, dicts, closures and defaults of functions, bound methods and `functools.partial`.
    """
    wanted: dict[int, str] = {}
    for name in {table.module for table in tables}:
        for path, part in model.get_submodule(name).named_modules(prefix=name):
            wanted[id(part)] = path
    wanted |= {id(table.parameter): f"the weight of {table.path}" for table in tables}
    found = []
    for path, module in model.named_modules():
        for attribute, value in attributes_of(module).items():
            if id(module) not in wanted:
                found += [
                    f"{path}.{attribute}".lstrip(".") + f" has {what}"
                    for what in sorted({wanted[id(one)] for one in _within(value, _DEPTH) if id(one) in wanted})
                ]
    if found:
        raise ValueError(
            f"{some(found, 3)}, outside of parameters and submodules. Sharding replaces the collection, and this "
            "attribute would go on with the unsharded table and its initial values. Use collections as submodules, and "
            "read whole tables by trainer.strategy.table. In a loss look up the rows, for scores of all items a "
            "feature with every id. A copy (weight.detach().clone()) may be kept."
        )


def _within(value: Any, depth: int) -> Iterator[Any]:
    """Yield a value, and what it has if it is a container or a function."""
    yield value
    if depth == 0:
        return
    inside: list[Any] = []
    if isinstance(value, Mapping):
        inside = [*value.values()]
    elif isinstance(value, list | tuple | set | frozenset):
        inside = [*value]
    elif isinstance(value, FunctionType):
        variables = inspect.getclosurevars(value).nonlocals.values()
        inside = [*variables, *(value.__defaults__ or ()), *(value.__kwdefaults__ or {}).values()]
    elif isinstance(value, MethodType):
        inside = [value.__self__]
    elif isinstance(value, partial):
        inside = [value.func, *value.args, *value.keywords.values()]
    for one in inside if len(inside) <= _MOST else []:
        yield from _within(one, depth - 1)
