"""Check names and types of a config's values against the signature of what takes them."""

from __future__ import annotations

import inspect
import types
import typing
from collections.abc import Callable, Mapping
from typing import Any, Literal, Union

from ..text import unknown_name_message
from .config_checks import Config


def check_arguments(where: str, node: Config, target: Callable[..., Any]) -> None:
    """Check a group of a config, called `where`; what an annotation says beyond plain types is left to the callee.

    Raises:
        ValueError: A name that it does not take.
        TypeError: A value is of another type.
    """
    parameters = inspect.signature(target).parameters
    takes_any = any(parameter.kind is inspect.Parameter.VAR_KEYWORD for parameter in parameters.values())
    for name in () if takes_any else node:
        if name not in parameters and not (name.startswith("_") and name.endswith("_")):
            raise ValueError(unknown_name_message(f"option of {where}", name, parameters))
    try:
        hints = typing.get_type_hints(vars(target).get("__init__", target) if isinstance(target, type) else target)
    except Exception:  # a name that is imported for type checkers alone
        return
    for name, value in node.items():
        if name in hints and not _fits(value, hints[name]):
            raise TypeError(f"{where}.{name} is {_words(hints[name])}, got {value!r}.")


_PLAIN: Mapping[type, tuple[type, ...]] = {bool: (bool,), int: (int,), float: (int, float), str: (str,)}


def _fits(value: Any, hint: Any) -> bool:
    """Whether a value can be what is annotated; where that is not plain, it can."""
    origin = typing.get_origin(hint)
    if origin in (Union, types.UnionType):
        return any(_fits(value, one) for one in typing.get_args(hint))
    if origin is Literal:
        return value in typing.get_args(hint)
    if hint is None or hint is type(None):
        return value is None
    kind = origin or hint
    if kind in _PLAIN:
        return isinstance(value, _PLAIN[kind]) and (kind is bool or not isinstance(value, bool))
    if isinstance(value, bool | int | float) or value is None:  # a number where a list, a mapping or an object goes
        return kind in (Any, object) or not isinstance(kind, type) or isinstance(value, kind)
    return True


def _words(hint: Any) -> str:
    if typing.get_origin(hint) in (Union, types.UnionType):
        return " or ".join(_words(one) for one in typing.get_args(hint))
    if typing.get_origin(hint) is Literal:
        return " or ".join(map(repr, typing.get_args(hint)))
    known = {bool: "true or false", int: "an integer", float: "a number", str: "a text", type(None): "null"}
    return known.get(hint) or str(getattr(hint, "__name__", hint))
