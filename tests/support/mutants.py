"""Files of the package, each statement that orders streams or hands memory over left out in turn."""

from __future__ import annotations

import ast
import inspect
from collections.abc import Iterator
from types import ModuleType
from typing import Any

ORDERING = {"wait", "record_stream", "hand_to_caller", "_acquire", "wait_for_lookups"}


def statements(module: ModuleType, function: str = "") -> Iterator[tuple[int, str]]:
    """Yield the line and text of each such statement of a file, or of one function in it."""
    for outer in ast.walk(ast.parse(inspect.getsource(module))):
        if isinstance(outer, ast.FunctionDef) and function in ("", outer.name):
            yield from ((node.lineno, ast.unparse(node)) for node in ast.walk(outer) if _orders(node))


def without(module: ModuleType, line: int, name: str) -> Any:
    """Return what a file names, made without the statement of a line; 0 leaves nothing out."""
    tree = _LeaveOut(line).visit(ast.parse(inspect.getsource(module)))
    names: dict[str, Any] = {"__name__": module.__name__, "__package__": module.__package__}
    exec(compile(tree, str(module.__file__), "exec"), names)
    return names[name]


class _LeaveOut(ast.NodeTransformer):
    def __init__(self, line: int) -> None:
        self._line = line

    def visit_Expr(self, node: ast.Expr) -> ast.stmt:
        return ast.copy_location(ast.Pass(), node) if node.lineno == self._line and _orders(node) else node


def _orders(node: Any) -> bool:
    return (
        isinstance(node, ast.Expr)
        and isinstance(node.value, ast.Call)
        and isinstance(node.value.func, ast.Attribute)
        and node.value.func.attr in ORDERING
        and ast.unparse(node.value.func.value) in ("self", "self._streams")
    )
