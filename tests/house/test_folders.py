"""The folders of the package: imports point down and go by faces, files stay short, paths lead somewhere."""

import ast
import sys
from collections.abc import Iterator
from functools import cache
from pathlib import Path

import pytest

import lightning_overlap

PACKAGE = Path(lightning_overlap.__file__).resolve().parent
ROOT = PACKAGE.parent
FLOORS = (  # from the ground up; each file or folder imports from those on the floors below it
    ("text", "versions", "compat"),
    ("schedules", "distributed", "data", "storage"),
    ("models", "runtime", "dense", "row_log"),
    ("profiling", "tables", "balance"),
    ("sparse", "tuning", "updated_rows"),
    ("checkpoint",),
    ("plugin",),
    ("callbacks", "deltas", "ray"),
    ("testing", "apps"),
    ("train", "benchmark", "consolidate", "conf"),
)
FLOOR = {name: floor for floor, names in enumerate(FLOORS) for name in names}
FOLDERS = {name for name in FLOOR if (PACKAGE / name).is_dir()} - {"conf"}
_NO_CONFIGS = {"hydra", "omegaconf"}
_NO_LIGHTNING = {"lightning", "pytorch_lightning", *_NO_CONFIGS}
_NO_TORCHREC = {"torchrec", "fbgemm", "fbgemm_gpu", *_NO_LIGHTNING}  # "fbgemm" is the file of `compat/`
LEAVES_ALONE = {
    **dict.fromkeys(("storage", "distributed", "runtime", "dense", "profiling", "tuning", "row_log"), _NO_TORCHREC),
    **dict.fromkeys(("balance", "tables", "sparse", "updated_rows", "checkpoint"), _NO_LIGHTNING),
    **dict.fromkeys(("plugin", "testing", "deltas"), _NO_CONFIGS),
}
# Folders, and the only others that import them; rooms of `deltas/`, and those that each may import.
WINGS = {"ray": [], "deltas": [], "data": ["models", "apps"], "models": ["apps"], "apps": ["train", "benchmark"]}
ROOMS = {
    "files": [],
    "serving": ["files"],
    "recording": ["files"],
    "restoring": ["files", "serving", "recording"],
}
OF_TRAININGS = {"recording", "restoring"}  # rooms that import Lightning, TorchRec and other folders
PRIVATE = "compat"  # a file for each library, with its private names; each file is a face of its own
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
    if path.parent.parent.name == "deltas":
        yield from complaints_of_room(source, path)
    for module, name in imports(ast.parse(source), path):
        top, *rest = module.split(".")
        if top == "lightning_overlap":
            if not rest and name not in FLOOR:
                continue  # `lightning_overlap` itself: its public names
            target, *inner = rest or [name]
            if target == PRIVATE:
                library = (*inner, name)[0]
                if folder == PRIVATE and library == path.relative_to(PACKAGE).parts[1]:
                    continue
                if library in LEAVES_ALONE.get(folder, ()):
                    yield f"{folder} imports {library}, by compat"
                if len(inner) > 1 or is_private(name):
                    yield f"{folder} imports the private {module}.{name}"
                continue
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
        if top in LEAVES_ALONE.get(folder, ()):
            yield f"{folder} imports {top}"
        if folder != PRIVATE and any(is_private(part) for part in (*rest, name)):
            yield f"{folder} imports the private {module}.{name}"


def complaints_of_room(source: str, path: Path) -> Iterator[str]:
    room = path.relative_to(PACKAGE / "deltas").parts[0]
    for module, name in imports(ast.parse(source), path):
        top, *rest = module.split(".")
        if top == "lightning_overlap" and (rest or [name])[0] == "deltas":
            target, *inner = rest[1:] or [name]
            if target == room:
                continue
            if target not in ROOMS[room]:
                yield f"{room} imports {target}"
            elif inner:
                yield f"{room} imports {'.'.join([target, *inner])}, and not the face of {target}"
        elif room not in OF_TRAININGS and (
            top in _NO_TORCHREC or (top == "lightning_overlap" and rest not in (["text"], ["storage"], ["row_log"]))
        ):
            yield f"{room} imports {module}"


def test_imports_point_down_and_go_by_faces() -> None:
    texts = {path: path.read_text(encoding="utf-8") for path in SOURCES}
    assert not [(name_of(path), found) for path, text in texts.items() for found in complaints(text, path)]
    for file, wrong in (
        ("runtime/walker.py", "from .. import sparse"),
        ("plugin/strategy.py", "import hydra"),
        ("plugin/strategy.py", "from lightning.pytorch.loops.fetchers import _DataFetcher"),
        ("plugin/strategy.py", "from ..compat.lightning import _DataFetcher"),
        ("tables/names.py", "from torchrec.distributed.embedding_sharding import _set_sharding_context_intra_a2a"),
        ("tables/names.py", "from torch.utils._pytree import tree_leaves"),
        ("tables/names.py", "from ..compat.torchrec.inputs import set_values"),
        ("runtime/walker.py", "from ..compat.fbgemm import has_cache"),
        ("runtime/walker.py", "from ..compat.lightning import DataFetcher"),
        ("runtime/walker.py", "from ..compat import lightning"),
    ):
        assert len([*complaints(wrong, PACKAGE / file)]) == 1, wrong


def test_every_file_has_its_place() -> None:
    assert {folder_of(path) for path in SOURCES} | {"conf"} == set(FLOOR)
    assert {path.parent.name for path in SOURCES if path.parent.parent.name == "deltas"} == set(ROOMS)
    for folder in [*FOLDERS, *(f"deltas/{room}" for room in ROOMS)]:
        face = ast.parse((PACKAGE / folder / "__init__.py").read_text(encoding="utf-8"))
        assert len(ast.get_docstring(face) or "") > 60, f"{folder} does not say what it is"


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
