"""What an example, or a name of the package, says if an optional package is not installed."""

import ast
import runpy
import sys
from pathlib import Path
from unittest import mock

import pytest

import lightning_overlap

from .pages import ROOT

OPTIONAL = ("ray", "matplotlib", "pyarrow", "redis", "isal")  # of the extras in pyproject.toml, and of the examples


def imported(script: Path) -> set[str]:
    """Return the optional packages that a script imports."""
    found = set()
    for node in ast.walk(ast.parse(script.read_text())):
        if isinstance(node, ast.Import):
            found |= {alias.name.partition(".")[0] for alias in node.names}
        elif isinstance(node, ast.ImportFrom) and node.module and not node.level:
            found.add(node.module.partition(".")[0])
    return found & set(OPTIONAL)


NEEDS = [(script, name) for script in sorted((ROOT / "examples").rglob("*.py")) for name in sorted(imported(script))]


@pytest.mark.parametrize(
    ("script", "package"), [pytest.param(*one, id=f"{one[0].relative_to(ROOT)} {one[1]}") for one in NEEDS]
)
def test_an_example_says_what_to_install(script: Path, package: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.syspath_prepend(script.parent)
    with mock.patch.dict(sys.modules):
        for name in [name for name in sys.modules if name.partition(".")[0] == package]:
            del sys.modules[name]
        sys.modules.pop("lightning_overlap.ray", None)
        monkeypatch.setitem(sys.modules, package, None)
        with pytest.raises(ImportError, match=f"needs? .*pip install '?({package}|lightning_overlap\\[)"):
            runpy.run_path(str(script), run_name="not_main")


def test_names_of_an_extra_are_names_of_the_package_and_say_what_to_install(monkeypatch: pytest.MonkeyPatch) -> None:
    assert {"EmbeddingDeltas", "Replica"} <= {*lightning_overlap.__all__} <= {*dir(lightning_overlap)}
    assert lightning_overlap.EmbeddingDeltas.__name__ == "EmbeddingDeltas"
    assert lightning_overlap.Replica is lightning_overlap.deltas.Replica
    for name in ("EmbeddingDeltas", "Replica"):
        with mock.patch.dict(sys.modules):
            of_deltas = ("lightning_overlap.deltas", "lightning_overlap.row_log")
            for loaded in [one for one in sys.modules if one.startswith(of_deltas)]:
                del sys.modules[loaded]
            monkeypatch.setitem(sys.modules, "pyarrow", None)
            with pytest.raises(ImportError, match="pip install pyarrow"):
                getattr(lightning_overlap, name)
    with pytest.raises(AttributeError, match="no attribute 'replica'"):
        lightning_overlap.replica  # noqa: B018
