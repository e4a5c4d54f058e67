"""Files of the package, each statement that orders streams or hands memory over left out in turn."""

import ast
import inspect
from collections.abc import Callable, Iterable, Iterator
from contextlib import ExitStack, contextmanager
from types import CodeType, FunctionType, ModuleType
from typing import Any

from lightning_overlap.testing import RaceError

ORDERING = {
    *("wait", "use", "order", "record_stream", "give_to_caller", "take_from_caller"),
    *("wait_for_lookups", "note_update", "order_compute"),
}
NEED_MOST = ("fused_sparse_dist", "semi_sync_deferred", "prefetch")
"""Modes of which one or the other fails without almost any such statement: to be tried first."""


def statements(module: ModuleType, function: str = "") -> Iterator[tuple[int, str]]:
    """Yield the line and text of each such statement of a file, or of one function in it."""
    for outer in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(outer, ast.FunctionDef) and function in ("", outer.name):
            yield from ((node.lineno, ast.unparse(node)) for node in ast.walk(outer) if _orders(node))


@contextmanager
def without(module: ModuleType, line: int) -> Iterator[None]:
    """Let the functions of a file run without the statement of a line, wherever they are held; 0 leaves nothing out."""
    tree = ast.parse(inspect.getsource(module))
    for node in ast.walk(tree):
        if _orders(node) and node.lineno == line:  # type: ignore[attr-defined]
            node.value = ast.copy_location(ast.Constant(None), node)  # type: ignore[attr-defined]
    compiled = compile(tree, str(module.__file__), "exec")
    functions = {name: found for name in _codes(compiled) if (found := _function(module, name)) is not None}
    before = {name: function.__code__ for name, function in functions.items()}
    try:
        for name, function in functions.items():
            function.__code__ = _codes(compiled)[name]
        yield
    finally:
        for name, function in functions.items():
            function.__code__ = before[name]


@contextmanager
def unchanged(modules: Iterable[ModuleType]) -> Iterator[None]:
    with ExitStack() as stack:
        for module in modules:
            stack.enter_context(without(module, 0))
        yield


def races(run: Callable[[], object]) -> bool:
    try:
        run()
    except RaceError:
        return True
    return False


def _codes(code: CodeType) -> dict[str, CodeType]:
    found = {}
    for inner in code.co_consts:
        if isinstance(inner, CodeType):
            if not inner.co_flags & inspect.CO_NEWLOCALS:  # the body of a class
                found |= _codes(inner)
            elif inner.co_name.isidentifier():
                found[inner.co_qualname] = inner
    return found


def _function(module: ModuleType, name: str) -> FunctionType | None:
    found: Any = module
    for part in name.split("."):
        found = vars(found).get(part)
        found = found.fget if isinstance(found, property) else found
    found = inspect.unwrap(found) if callable(found) else None
    return found if isinstance(found, FunctionType) else None


def _orders(node: Any) -> bool:
    """Whether a node is a statement that calls such a method; awaitables have a `wait` too, without arguments."""
    if not (isinstance(node, ast.Expr) and isinstance(node.value, ast.Call)):
        return False
    call = node.value
    if not (isinstance(call.func, ast.Attribute) and call.func.attr in ORDERING):
        return False
    return call.func.attr != "wait" or bool(call.args)
