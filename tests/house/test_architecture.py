"""docs/architecture.md, its picture and CONTRIBUTING's table of folders: they name what is there."""

from __future__ import annotations

import hashlib
import re
from pathlib import Path

import pytest

from .test_folders import FLOOR, PACKAGE, ROOT

PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "draw_architecture.py"
FILE = re.compile(r"(?<![\w/.])(?:[a-z_]+/)+(?:[a-z_]+\.py)?")


def cells_of(path: Path, head: str) -> list[list[str]]:
    """Return the rows of the one table that has this head."""
    lines = path.read_text(encoding="utf-8").splitlines()
    rows = lines[lines.index(head) + 2 :]
    table = rows[: next((number for number, line in enumerate(rows) if not line.startswith("|")), len(rows))]
    return [[cell.strip() for cell in line.strip("|").split("|")] for line in table]


def names_in(cell: str) -> list[str]:
    return [name.rstrip("/").removesuffix(".py") for name in re.findall(r"`([\w./]+)`", cell)]


@pytest.mark.parametrize("path", [PAGE, PICTURE], ids=lambda path: path.name)
def test_the_files_it_names_exist(path: Path) -> None:
    named = set(FILE.findall(path.read_text(encoding="utf-8").replace("\\n", " ")))
    assert len(named) > 10
    assert not sorted(name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists()))


def test_its_floors_are_those_of_the_imports() -> None:
    rows = cells_of(PAGE, "| floor | folder or file | what it is |")
    assert {name: int(floor) for floor, names, _ in rows for name in names_in(names)} == FLOOR


def test_contributing_has_the_same_floors() -> None:
    rows = cells_of(ROOT / "CONTRIBUTING.md", "| floor | folders and files |")
    assert {name: int(floor) for floor, names in rows for name in names_in(names)} == FLOOR


def test_the_picture_was_drawn_after_the_last_change_of_its_script() -> None:
    """The script writes its own digest into the picture: run it again, and look at what it draws."""
    digest = hashlib.sha256(PICTURE.read_bytes()).hexdigest()
    assert digest.encode() in (PAGE.parent / "architecture.png").read_bytes()
