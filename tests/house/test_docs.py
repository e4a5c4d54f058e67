"""The tables of docs/: each row has a status, says why where it has to, and names a test that exists."""

import ast
import re
from functools import cache
from pathlib import Path

import pytest

from ..laws import mutants

ROOT = Path(__file__).resolve().parents[2]
FEATURES = ["feature", "status", "remark or reason", "test"]
MODULES = ["module or feature", "looked up", "after which writer", "remark or reason", "test"]
PAGES = {"lightning.md": FEATURES, "processes.md": FEATURES, "modules.md": MODULES}
TEST = re.compile(r"`(?P<file>test_\w+\.py)::(?P<test>test_\w+)(?:\[(?P<id>[^\]`]+)\])?`")
TESTS = list((ROOT / "tests").rglob("test_*.py"))


def rows_of(page: str) -> list[dict[str, str]]:
    rows, inside = [], False
    for line in (ROOT / "docs" / page).read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        if cells == PAGES[page]:
            inside = True
        elif not cells:
            inside = False
        elif inside and set(line) - set("|- "):
            rows.append(dict(zip(["name", *PAGES[page][1:]], cells, strict=True)))
    return rows


@cache
def tree_of(path: Path) -> ast.Module:
    return ast.parse(path.read_text(encoding="utf-8"))


def problem_of(reference: str) -> str | None:
    """Return why there is no such test, by reading its file; None if there is one."""
    match = TEST.fullmatch(reference.strip())
    if match is None:
        return f"{reference!r} is not `file.py::test` or `file.py::test[id]`"
    paths = [path for path in TESTS if path.name == match["file"]]
    if len(paths) != 1:
        return f"{len(paths)} files are named {match['file']}"
    tree = tree_of(paths[0])
    functions = {node.name: node for node in tree.body if isinstance(node, ast.FunctionDef)}
    if match["test"] not in functions:
        return f"{match['file']} has no {match['test']}"
    if match["id"] is None:
        return None
    if not any("parametrize" in ast.unparse(decorator) for decorator in functions[match["test"]].decorator_list):
        return f"{match['test']} has no parameters"
    # The ids are strings of the test's file, or of the module whose table it runs through.
    sources = [tree, *_imported(tree, paths[0])]
    words = {node.value for source in sources for node in ast.walk(source) if isinstance(node, ast.Constant)}
    return None if match["id"] in words else f"{match['test']} has no {match['id']!r} among its parameters"


def _imported(tree: ast.Module, path: Path) -> list[ast.Module]:
    imported = [node for node in tree.body if isinstance(node, ast.ImportFrom) and node.level]
    files = [
        (path.parents[node.level - 1] / (node.module or "").replace(".", "/") / name).with_suffix(".py")
        for node in imported
        for name in ("", *(alias.name for alias in node.names))
        if name or node.module
    ]
    return [tree_of(file) for file in files if file.is_file()]


ROWS = {page: rows_of(page) for page in PAGES}


@pytest.mark.parametrize("row", [row for rows in ROWS.values() for row in rows], ids=lambda row: row["name"])
def test_a_row_says_what_to_expect_and_names_its_tests(row: dict[str, str]) -> None:
    remark = row["remark or reason"]
    if "status" in row:
        assert row["status"] in {"works", "with a remark", "refused"}
        assert remark or row["status"] == "works"
    else:
        assert row["looked up"] in {"early", "ids early", "unpipelined", "refused"}
        assert row["after which writer"] if "early" in row["looked up"] else remark or "twice" in row["name"]
    problems = [problem_of(reference) for reference in row["test"].split(", ")]
    assert problems == [None] * len(problems)


@pytest.mark.parametrize("page", PAGES)
def test_all_rows_are_read_and_none_comes_twice(page: str) -> None:
    text = (ROOT / "docs" / page).read_text(encoding="utf-8")
    num_lines, num_tables = len(re.findall(r"^\|", text, flags=re.MULTILINE)), text.count(" | ".join(PAGES[page]))
    assert len({row["name"] for row in ROWS[page]}) == len(ROWS[page]) == num_lines - 2 * num_tables


@pytest.mark.parametrize(
    ("reference", "problem"),
    [
        ("`test_features.py::test_same_as_ddp[max_time]`", None),
        ("`test_tools.py::test_profilers_see_the_same_actions[advanced]`", None),
        ("`test_of_yore.py::test_it`", "0 files"),
        ("`test_features.py::test_of_yore`", "has no test_of_yore"),
        ("`test_features.py::test_same_as_ddp[of_yore]`", "has no 'of_yore'"),
        ("`test_strategy.py::test_registry_name[max_time]`", "has no parameters"),
        ("test_features.py", "is not `file.py::test`"),
    ],
)
def test_a_test_that_is_gone_is_seen(reference: str, problem: str | None) -> None:
    found = problem_of(reference)
    assert (found is None) == (problem is None)
    assert problem is None or problem in str(found)


def test_laws_md_lists_all_mutants() -> None:
    assert mutants.BREAKS.keys() <= {mutant.what for mutant in mutants.MUTANTS}
    assert {mutant.law for mutant in mutants.MUTANTS} == set(range(1, 14))


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
