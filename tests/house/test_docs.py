"""The API page has every public name, and is what `docs/make_api.py` makes of the docstrings."""

import ast
import importlib
import importlib.util
import inspect
import re
import sys
from pathlib import Path
from types import ModuleType
from typing import Any

import pytest

import lightning_overlap
import lightning_overlap.testing

ROOT = Path(__file__).resolve().parents[2]


def public_names(face: ModuleType) -> set[str]:
    """Return the names that an `__init__` offers; also those that it imports for type checkers only and makes later."""
    tree = ast.parse(Path(str(face.__file__)).read_text(encoding="utf-8"))
    imports = [alias for node in ast.walk(tree) if isinstance(node, ast.ImportFrom) for alias in node.names]
    names = {alias.asname for alias in imports if alias.asname is not None}
    return {name for name in names if not isinstance(getattr(face, name), ModuleType)}


@pytest.fixture(scope="module")
def make_api() -> Any:
    spec = importlib.util.spec_from_file_location("make_api", ROOT / "docs" / "make_api.py")
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    sys.modules[spec.name] = module  # where dataclasses look
    spec.loader.exec_module(module)
    return module


@pytest.mark.parametrize("face", [lightning_overlap, lightning_overlap.testing], ids=lambda face: face.__name__)
def test_the_api_page_has_every_public_name(face: ModuleType, make_api: Any) -> None:
    names = public_names(face)
    assert names >= ({"Mode", "Replica"} if face is lightning_overlap else {"check_module"})
    assert names == {one.name for one in make_api.MODULES[face.__name__][1]}
    if face is lightning_overlap:
        assert names == set(lightning_overlap.__all__)


def test_the_api_page_is_made_of_the_docstrings(make_api: Any) -> None:
    assert make_api.PAGE.read_text(encoding="utf-8") == make_api.page(), "run python docs/make_api.py"


def test_the_api_page_reads_the_files_that_define_its_names(make_api: Any) -> None:
    """And each has a signature, a text, and every argument that the function takes."""
    page = make_api.PAGE.read_text(encoding="utf-8")
    for module, (_, names) in make_api.MODULES.items():
        for one in names if module != "lightning_overlap.ray" else []:  # which needs Ray
            found = getattr(importlib.import_module(module), one.name)
            block = page.split(f"### {one.name}\n")[1].split("\n### ")[0].split("\n#### ")[0]
            assert len(block.split()) > 3, one.name
            if inspect.isfunction(found) or (inspect.isclass(found) and "**Arguments**" in block):
                assert inspect.getfile(found) == str(ROOT / "lightning_overlap" / one.file)
                for name in inspect.signature(found).parameters:
                    assert f"{name}: " in block.split("```")[1], (one.name, name)


def test_a_docstring_becomes_paragraphs_code_and_lists(make_api: Any) -> None:
    text = """Say one thing.

    And another:

        with code() as it:
            runs(it)

    Args:
        first, second: Two that
            go on.
        **others: Any.

    Returns:
        A number, or
        nothing.
    """
    assert list(make_api._docstring(inspect.cleandoc(text))) == [
        "Say one thing.",
        "And another:",
        "```text\nwith code() as it:\n    runs(it)\n```",
        "**Arguments**\n\n- `first, second`: Two that go on.\n- `**others`: Any.",
        "**Returns**\n\n- A number, or nothing.",
    ]


def test_each_lightning_feature_names_the_tests_that_try_it() -> None:
    """The files are there, and one of them, or a file beside it that its ranks run, has a name of the feature."""
    rows = [
        line for line in (ROOT / "docs" / "lightning.md").read_text(encoding="utf-8").splitlines() if line[:2] == "| "
    ]
    rows = [line for line in rows if not line.startswith("| feature | ")]
    assert len(rows) > 70
    for row in rows:
        feature, *_, tried = [cell.strip() for cell in row.strip().strip("|").split(" | ")]
        files = [ROOT / name for name in re.findall(r"`(tests/\S+\.py)`", tried)]
        assert files, f"no test is named: {feature}"
        assert all(path.is_file() for path in files), tried
        beside = {path for file in files for path in file.parent.glob("*.py")}
        texts = "".join(path.read_text(encoding="utf-8") for path in beside)
        codes = re.findall(r"`([^`(=]+)", feature)
        names = [name for name in (code.rpartition(".")[2].strip() for code in codes) if name.isidentifier()]
        assert not names or any(name in texts for name in names), f"{tried} does not mention {feature}"
