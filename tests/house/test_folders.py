"""The folders of the package: imports point down and go by faces, files stay short, paths lead somewhere."""

import ast
import importlib
import importlib.util
import re
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path
from typing import Any

import pytest

import lightning_overlap
from lightning_overlap.profiling import host_syncs, trace_names
from lightning_overlap.schedules import Stage
from lightning_overlap.sparse.pipelined_forward import EarlyEmbeddings
from lightning_overlap.testing import check_module

PACKAGE = Path(lightning_overlap.__file__).resolve().parent
ROOT = PACKAGE.parent
FLOORS = (  # from the ground up; each file or folder imports from those on the floors below it
    ("text", "versions"),
    ("schedules", "distributed", "data"),
    ("models", "runtime", "dense"),
    ("profiling", "tables", "preprocessing"),
    ("sparse", "tuning"),
    ("checkpoint",),
    ("plugin",),
    ("callbacks", "deltas"),
    ("testing", "apps"),
    ("train", "benchmark", "conf"),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
FOLDERS = {name for name in FLOOR if (PACKAGE / name).is_dir()} - {"conf"}
MOST_FILES = 15
MOST_LINES = 450
_NO_CONFIGS = {"hydra", "omegaconf"}
_NO_LIGHTNING = {"lightning", *_NO_CONFIGS}
_NO_TORCHREC = {"torchrec", "fbgemm_gpu", *_NO_LIGHTNING}
LEAVES_ALONE = {
    **dict.fromkeys(("distributed", "runtime", "dense", "profiling", "tuning"), _NO_TORCHREC),
    **dict.fromkeys(("tables", "sparse", "checkpoint"), _NO_LIGHTNING),
    **dict.fromkeys(("plugin", "testing", "deltas"), _NO_CONFIGS),
}
WINGS: dict[str, set[str]] = {  # folders, and the only others that import them
    "deltas": set(),
    "data": {"models", "apps"},
    "models": {"apps"},
    "apps": {"train", "benchmark"},
}
ROOMS: dict[str, set[str]] = {  # of `deltas/`, and the rooms that each may import
    "parts": set(),
    "sinks": {"parts"},
    "serving": {"parts", "sinks"},
    "recording": {"parts", "sinks"},
}
TORCHREC_FOLDERS = ("tables", "sparse")  # may use TorchRec's private names, listed in `tables/sharded_module.py`
LIGHTNING_FOLDER = "plugin"  # may use Lightning's private names, listed in `plugin/private_names.py`
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def folder_of(path: Path) -> str:
    return path.relative_to(PACKAGE).with_suffix("").parts[0]


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, imported name or "") of every import, relative ones written out in full."""
    package = ["lightning_overlap", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = package[: len(package) - node.level + 1] if node.level else []
            module = ".".join([*base, *([node.module] if node.module else [])])
            yield from ((module, alias.name) for alias in node.names)


@cache
def face_of(folder: str) -> set[str]:
    """Return the public names of a folder: what its `__init__` imports, or lists."""
    tree = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
    listed = [node for node in tree.body if isinstance(node, ast.Assign)]
    names = {node.value for assigned in listed for node in ast.walk(assigned) if isinstance(node, ast.Constant)}
    return names | {
        alias.asname or alias.name for node in tree.body if isinstance(node, ast.ImportFrom) for alias in node.names
    }


def complaints(source: str, path: Path) -> Iterator[str]:
    folder = folder_of(path)
    for module, name in imports(ast.parse(source), path):
        top, *rest = module.split(".")
        if top == "lightning_overlap":
            if not rest and name not in FLOOR:
                continue  # `lightning_overlap` itself: its public names
            target, *inner = rest or [name]
            if target == folder:
                continue
            if target in WINGS and folder not in WINGS[target]:
                yield f"{folder} imports {target}, a wing"
            elif FLOOR[target] >= FLOOR[folder]:
                yield f"{folder} imports {target}, which is not below it"
            elif inner:
                yield f"{folder} imports {'.'.join([target, *inner])}, and not the face of {target}"
            elif rest and target in FOLDERS and name not in face_of(target):
                yield f"{folder} imports {name}, which is not in the face of {target}"
            continue
        if folder == "schedules" and top not in sys.stdlib_module_names:
            yield f"schedules imports {top}, which is not of the standard library"
        if top.replace("pytorch_lightning", "lightning") in LEAVES_ALONE.get(folder, ()):
            yield f"{folder} imports {top}"
        private = any(is_private(part) for part in (*rest, name))
        if top == "torchrec" and private and folder not in TORCHREC_FOLDERS:
            yield f"{folder} imports the private {module}.{name}"
        if top in ("lightning", "pytorch_lightning") and private and folder != LIGHTNING_FOLDER:
            yield f"{folder} imports the private {module}.{name}"


def test_imports_point_down_and_go_by_faces() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert not [(name_of(path), found) for path, text in texts.items() for found in complaints(text, path)]


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("schedules/schedule.py", "import torch", "schedules imports torch"),
        ("schedules/schedule.py", "def f():\n    from ..runtime import X", "schedules imports runtime, which is not"),
        ("runtime/executor.py", "from .. import sparse", "runtime imports sparse, which is not below it"),
        ("runtime/executor.py", "from lightning_overlap.plugin import X", "runtime imports plugin, which is not below"),
        ("runtime/executor.py", "from ..schedules.schedule import Step", "runtime imports schedules.schedule, and not"),
        ("runtime/executor.py", "from ..schedules import _validate", "runtime imports _validate, which is not in the"),
        ("runtime/executor.py", "import torchrec.sparse", "runtime imports torchrec"),
        ("sparse/pipeline.py", "from lightning.pytorch import Trainer", "sparse imports lightning"),
        ("plugin/strategy.py", "import hydra", "plugin imports hydra"),
        ("plugin/strategy.py", "from torchrec.distributed.types import _A", "plugin imports the private torchrec"),
        ("callbacks/lag.py", "from lightning.pytorch.loops.fit_loop import _A", "callbacks imports the private"),
        ("testing/x.py", "from ..deltas import Replica", "testing imports deltas, a wing"),
    ],
)  # fmt: skip
def test_an_arrow_that_points_up_is_seen(file: str, source: str, complaint: str) -> None:
    [found] = complaints(source, PACKAGE / file)
    assert found.startswith(complaint)


def complaints_of_room(source: str, path: Path) -> Iterator[str]:
    room = path.relative_to(PACKAGE / "deltas").parts[0]
    for module, name in imports(ast.parse(source), path):
        top, *rest = module.split(".")
        if top == "lightning_overlap" and (rest or [name])[0] == "deltas":
            target, *inner = rest[1:] or [name]
            if target == room:
                if "_sink" in path.stem and "resolve" in (*inner, name):
                    yield "a sink imports resolve"
            elif target not in ROOMS[room]:
                yield f"{room} imports {target}"
            elif inner:
                yield f"{room} imports {'.'.join([target, *inner])}, and not the face of {target}"
        elif room != "recording" and (top in _NO_TORCHREC or (top == "lightning_overlap" and rest != ["text"])):
            yield f"{room} imports {module}"


IN_ROOMS = [path for path in SOURCES if folder_of(path) == "deltas" and path.parent.name != "deltas"]


def test_rooms_of_deltas_import_in_one_direction() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in IN_ROOMS}
    assert not [(name_of(path), found) for path, text in texts.items() for found in complaints_of_room(text, path)]


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("sinks/folder_sink.py", "def f():\n    from .resolve import X", "a sink imports resolve"),
        ("serving/replica.py", "from ..recording import CutWriter", "serving imports recording"),
        ("serving/replica.py", "from ..parts.form import Rows", "serving imports parts.form, and not the face of"),
        ("serving/replica.py", "from ...plugin import X", "serving imports lightning_overlap.plugin"),
        ("serving/replica.py", "from lightning.pytorch import X", "serving imports lightning.pytorch"),
    ],
)
def test_an_import_that_a_room_must_not_make_is_seen(file: str, source: str, complaint: str) -> None:
    [found] = complaints_of_room(source, PACKAGE / "deltas" / file)
    assert found.startswith(complaint)


def test_every_file_has_its_place() -> None:
    assert {folder_of(path) for path in SOURCES} | {"conf"} == set(FLOOR)
    assert {path.parent.name for path in IN_ROOMS} == set(ROOMS)
    for folder in [*FOLDERS, *(f"deltas/{room}" for room in ROOMS)]:
        files = [path for path in (PACKAGE / folder).glob("*.py") if path.stem != "__init__"]
        assert len(files) <= MOST_FILES, folder
        face = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
        assert len(ast.get_docstring(face) or "") > 60, f"{folder} does not say what it is"


def test_a_file_is_read_in_one_sitting() -> None:
    files = [path for folder in (PACKAGE, ROOT / "tests", ROOT / "benchmarks") for path in folder.rglob("*.py")]
    lines = {path.relative_to(ROOT).as_posix(): len(path.read_text(encoding="utf-8").splitlines()) for path in files}
    assert {name: num for name, num in lines.items() if num > MOST_LINES} == {}


def test_tests_mirror_the_package() -> None:
    of_their_own = {"house", "laws", "support", "gpu", "benchmarks"}
    folders = {path.parent.name for path in (ROOT / "tests").glob("*/test_*.py")}
    assert folders <= FOLDERS | of_their_own


# Faces that users import: type checkers take a name from them only if it is written twice.
FOR_USERS = {"", "callbacks", "data", "deltas", "distributed", "models", "profiling", "schedules", "testing", "tuning"}


@pytest.mark.parametrize("folder", ["", *sorted(FOLDERS)])
def test_a_face_gives_public_names_only(folder: str) -> None:
    tree = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                assert folder not in FOR_USERS or alias.asname == alias.name, f"write `{alias.name} as {alias.name}`"
                assert not alias.name.startswith("_")


# Source paths spelled in code: they break without an error when a file moves.
SPELLED = re.compile(r"/?lightning_overlap/([a-z_]+/)*[a-z_]+\.py|lightning_overlap(\.[a-z_]+)+")
PLACES = [
    path
    for folder in ("lightning_overlap", "tests", "benchmarks", "conf", "docs", "examples")
    for path in sorted((ROOT / folder).rglob("*"))
    if path.suffix in (".py", ".md", ".yaml", ".sh")
    and path.name not in (Path(__file__).name, "test_package.py")  # they spell what is not there
] + [ROOT / name for name in ("pyproject.toml", "README.md", "CONTRIBUTING.md", "Makefile")]


def resolves(spelled: str) -> bool:
    """Whether a path or a dotted name leads to a file, a folder, or a name that one of them has."""
    if spelled.endswith(".py"):
        return (ROOT / spelled.lstrip("/")).is_file()
    prefix, _, last = spelled.rpartition(".")
    if importlib.util.find_spec(prefix) is not None and hasattr(importlib.import_module(prefix), last):
        return True  # also where a name of the face hides the file
    thing: Any = lightning_overlap
    parts = spelled.split(".")
    for number, part in enumerate(parts[1:], start=1):
        if not hasattr(thing, part):  # a function may have the name of its file, which is the one that is meant then
            thing = sys.modules.get(".".join(parts[:number]), thing)
        if not hasattr(thing, part):
            try:
                importlib.import_module(f"{thing.__name__}.{part}")
            except (ImportError, AttributeError):
                return part in getattr(thing, "__annotations__", {})
        thing = getattr(thing, part)
    return True


def test_source_paths_lead_somewhere() -> None:
    spelled = {(match.group(), path) for path in PLACES for match in SPELLED.finditer(path.read_text(encoding="utf-8"))}
    assert len(spelled) > 100
    assert not [(one, path) for one, path in sorted(spelled) if not resolves(one)]


def test_what_the_host_sync_predictor_takes_for_reads_of_the_host_exists() -> None:
    ours = [entry for entry in host_syncs._READERS_OF_HOST_MEMORY if "lightning_overlap" in entry[0]]
    assert len(ours) == 5
    for file, function in ours:
        tree = ast.parse((ROOT / file.lstrip("/")).read_text(encoding="utf-8"))
        assert not function or function in {node.name for node in ast.walk(tree) if isinstance(node, ast.FunctionDef)}


def test_the_host_sync_predictor_knows_all_folders_for_this_packages() -> None:
    assert not any(host_syncs._is_users(str(path)) for path in SOURCES)
    assert host_syncs._is_users(str(ROOT / "examples" / "existing_module" / "train.py"))


def test_the_trace_reader_knows_the_wait_for_early_embeddings() -> None:
    """TorchRec names the range of an awaitable's wait after its class."""
    assert trace_names.of_annotation(f"## {EarlyEmbeddings.__name__} wait() ##") is Stage.EMBEDDING_LOOKUP


def test_the_law_checker_knows_the_read_of_sizes() -> None:
    file = sys.modules[check_module.__module__]._SIZES
    assert (ROOT / file.lstrip("/")).is_file()
    assert "tolist()" in (ROOT / file.lstrip("/")).read_text(encoding="utf-8")
