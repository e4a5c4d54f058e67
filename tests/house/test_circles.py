"""The files of `sparse/` import each other in one direction, and for good: not only for type checkers."""

import ast
from collections.abc import Iterator, Mapping
from graphlib import CycleError, TopologicalSorter
from pathlib import Path

import pytest

from .test_folders import PACKAGE, imports, name_of

FOLDER = PACKAGE / "sparse"
TEXTS = {path: path.read_text(encoding="utf-8") for path in sorted(FOLDER.rglob("*.py")) if path.name != "__init__.py"}


def imported(text: str, path: Path) -> Iterator[Path]:
    """Yield the files of the folder that a file imports, wherever in it."""
    for module, name in imports(ast.parse(text), path):
        inside = Path(PACKAGE.parent, *module.split("."))
        for file in (inside.with_suffix(".py"), (inside / name).with_suffix(".py")):
            if file in TEXTS:
                yield file


def circle(texts: Mapping[Path, str]) -> list[str]:
    """Return the files of a circle of imports, the first one again at its end; none without a circle."""
    try:
        TopologicalSorter({path: set(imported(text, path)) for path, text in texts.items()}).prepare()
    except CycleError as err:
        return [name_of(path) for path in err.args[1]]
    return []


def for_type_checkers(texts: Mapping[Path, str]) -> list[str]:
    """Return the files with imports that only type checkers see."""
    return [name_of(path) for path, text in texts.items() if "TYPE_CHECKING" in text]


def test_no_circle() -> None:
    assert circle(TEXTS) == []


def test_no_import_for_type_checkers() -> None:
    assert for_type_checkers(TEXTS) == []


@pytest.mark.parametrize(
    ("file", "wrong", "files"),
    [
        ("module_flight.py", "from .pipeline import SparsePipeline", {"sparse/module_flight.py", "sparse/pipeline.py"}),
        ("shared.py", "def late():\n    from . import flight", {"sparse/shared.py", "sparse/flight.py"}),
        ("options.py", "from .watchers import gradient_watch", {"sparse/watchers/gradient_watch.py"}),
        ("watchers/watcher.py", "from ..sparse_batch import SparseBatch", {"sparse/watchers/watcher.py"}),
    ],
)
def test_a_circle_is_found(file: str, wrong: str, files: set[str]) -> None:
    found = circle({**TEXTS, FOLDER / file: f"{TEXTS[FOLDER / file]}\n{wrong}\n"})
    assert found[0] == found[-1]
    assert files <= set(found)


@pytest.mark.parametrize("wrong", ["from typing import TYPE_CHECKING", "import typing\nif typing.TYPE_CHECKING: pass"])
def test_an_import_for_type_checkers_is_found(wrong: str) -> None:
    file = FOLDER / "flight.py"
    assert for_type_checkers({**TEXTS, file: f"{TEXTS[file]}\n{wrong}\n"}) == ["sparse/flight.py"]
