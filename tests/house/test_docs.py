"""The tables of docs/: each row has a status, says why where it has to, and names a test that exists."""

import ast
import pkgutil
import re
from functools import cache
from pathlib import Path
from types import ModuleType

import pytest

import lightning_overlap
import lightning_overlap.testing

from ..laws import mutants

ROOT = Path(__file__).resolve().parents[2]
FEATURES = ["feature", "status", "remark or reason", "test"]
MODULES = ["module or feature", "looked up", "after which writer", "remark or reason", "test"]
PAGES = {"lightning.md": FEATURES, "processes.md": FEATURES, "modules.md": MODULES}
TEST = re.compile(r"`(?P<file>test_\w+\.py)::(?P<test>test_\w+)(?:\[(?P<id>[^\]`]+)\])?`")
FILES = list((ROOT / "tests").rglob("*.py"))


def cells_of(path: Path, head: list[str]) -> list[list[str]]:
    """Return the rows of all tables of a page that have this head."""
    rows, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        inside = cells == head or (inside and bool(cells))
        if inside and cells != head and set(line) - set("|- "):
            rows.append(cells)
    return rows


@cache
def text_of(path: Path) -> str:
    return path.read_text(encoding="utf-8")


def check(reference: str) -> None:
    """Check that there is such a test, by reading its file."""
    match = TEST.fullmatch(reference.strip())
    assert match is not None, f"{reference!r} is not `file.py::test` or `file.py::test[id]`"
    [file] = [path for path in FILES if path.name == match["file"]]
    assert f"def {match['test']}(" in text_of(file), f"{file} has no {match['test']}"
    # An id is a string of the test's file, or of another one, whose table it runs through.
    assert match["id"] is None or any(f'"{match["id"]}"' in text_of(path) for path in (file, *FILES)), match["id"]


ROWS = {
    page: [dict(zip(["name", *head[1:]], cells, strict=True)) for cells in cells_of(ROOT / "docs" / page, head)]
    for page, head in PAGES.items()
}


@pytest.mark.parametrize("row", [row for rows in ROWS.values() for row in rows], ids=lambda row: row["name"])
def test_a_row_says_what_to_expect_and_names_its_tests(row: dict[str, str]) -> None:
    remark = row["remark or reason"]
    if "status" in row:
        assert row["status"] in {"works", "with a remark", "refused"}
        assert remark or row["status"] == "works"
    else:
        assert row["looked up"] in {"early", "ids early", "unpipelined", "refused"}
        assert row["after which writer"] if "early" in row["looked up"] else remark or "twice" in row["name"]
    for reference in row["test"].split(", "):
        check(reference)


@pytest.mark.parametrize("page", PAGES)
def test_all_rows_are_read_and_none_comes_twice(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    num_lines, num_tables = len(re.findall(r"^\|", text, flags=re.MULTILINE)), text.count(" | ".join(PAGES[page]))
    assert len({row["name"] for row in ROWS[page]}) == len(ROWS[page]) == num_lines - 2 * num_tables


def test_laws_md_lists_all_mutants() -> None:
    assert mutants.BREAKS.keys() <= {mutant.what for mutant in mutants.MUTANTS}
    assert {mutant.law for mutant in mutants.MUTANTS} == {*range(1, 14), 16}


@pytest.mark.parametrize("mutant", mutants.MUTANTS, ids=lambda mutant: mutant.what)
def test_a_mutant_changes_one_place_and_names_its_tests(mutant: mutants.Mutant) -> None:
    """`make mutants` then sees these tests fail."""
    if mutant.file:
        text = (ROOT / mutants.PACKAGE / mutant.file).read_text(encoding="utf-8")
        assert text.count(mutant.text) == 1
        ast.parse(text.replace(mutant.text, mutant.instead))
    for test in mutant.tests:
        file, _, name = test.partition("::")
        assert f"def {name.partition('[')[0]}(" in (ROOT / "tests" / file).read_text(encoding="utf-8") or not name


def public_names(face: ModuleType) -> set[str]:
    """Return the names that an `__init__` offers; also those that it imports for type checkers only and makes later."""
    tree = ast.parse(Path(str(face.__file__)).read_text(encoding="utf-8"))
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = {alias.asname for alias in imports if alias.asname is not None}
    return {name for name in names if not isinstance(getattr(face, name), ModuleType)}


@pytest.mark.parametrize("face", [lightning_overlap, lightning_overlap.testing], ids=lambda face: face.__name__)
def test_the_api_page_has_every_public_name(face: ModuleType) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    documented = [pkgutil.resolve_name(path) for path in re.findall(r"^::: (\S+)$", page, flags=re.MULTILINE)]
    names = public_names(face)
    assert names >= ({"Mode", "Replica"} if face is lightning_overlap else {"check_module"})
    assert not sorted(name for name in names if not any(getattr(face, name) is one for one in documented))
