"""The mutants of docs/laws.md change one place each, and the API page has every public name."""

import ast
import pkgutil
import re
from pathlib import Path
from types import ModuleType

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


@pytest.mark.parametrize("face", [lightning_overlap, lightning_overlap.testing], ids=lambda face: face.__name__)
def test_the_api_page_has_every_public_name(face: ModuleType) -> None:
    page = (ROOT / "docs" / "api.md").read_text(encoding="utf-8")
    paths = re.findall(r"^::: (?!lightning_overlap\.ray\.)(\S+)$", page, flags=re.MULTILINE)  # which needs Ray
    documented = [pkgutil.resolve_name(path) for path in paths]
    names = public_names(face)
    assert names >= ({"Mode", "Replica"} if face is lightning_overlap else {"check_module"})
    assert not sorted(name for name in names if not any(getattr(face, name) is one for one in documented))
