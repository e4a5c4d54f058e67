"""Private names of TorchRec, Lightning and PyTorch: each is listed where it is used, and is still there."""

import ast
import importlib
import inspect
import sys
import textwrap
from functools import cache
from typing import Any

import pytest

from lightning_overlap.compat import lightning, torch, torchrec
from lightning_overlap.tables import sharded_module

from .test_folders import PRIVATE, SOURCES, TORCHREC_FOLDERS, folder_of, is_private, name_of

TORCHREC_PRIVATE = {name for names in sharded_module.PRIVATE_NAMES.values() for name in names}
LIGHTNING_PRIVATE = {name for names in lightning.PRIVATE_NAMES.values() for name in names}
IN_COMPAT = {  # file -> private names that it may use
    f"{PRIVATE}/{library.__name__.rpartition('.')[2]}.py": {
        name for names in library.PRIVATE_NAMES.values() for name in names
    }
    for library in (lightning, torch, torchrec)
}
STANDARD_LIBRARY = {"_asdict", "_fields", "_replace", "_exit"}  # documented, though they start with an underscore
TORCH_PRIVATE = {  # PyTorch's own; TorchRec and Lightning use them too
    *("_C", "_Options", "_apply", "_apply_optimizer_in_backward", "_autograd", "_backward_hooks"),
    *("_backward_pre_hooks", "_cdata", "_comm_hooks", "_compiled_call_impl", "_current_autograd_node"),
    *("_current_graph_task_id", "_current_level", "_devices", "_dynamo", "_execution_engine", "_forward_hooks"),
    *("_forward_pre_hooks", "_get_backend", "_get_sequence_nr"),
    *("_profiler_enabled", "_register_backend", "_schema", "_sequence_nr", "_set_default_backend"),
    *("_timeout", "_to_copy"),
}


def defined_names(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, variables, fields, attributes it sets."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and ast.unparse(node.value) == "self":
            names.add(node.attr)
    return names


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
OURS = {name for path, tree in TREES.items() if folder_of(path) != PRIVATE for name in defined_names(tree)}


def test_private_names_of_others_are_listed() -> None:
    """A private attribute that this package does not define belongs to another one: it has to be in a list."""
    unlisted = {}
    for path, tree in TREES.items():
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
        used -= OURS | TORCH_PRIVATE | STANDARD_LIBRARY
        used -= TORCHREC_PRIVATE if folder_of(path) in TORCHREC_FOLDERS else set()
        used -= IN_COMPAT[name_of(path)] | defined_names(tree) if name_of(path) in IN_COMPAT else set()
        unlisted[name_of(path)] = used
    assert not {name: used for name, used in unlisted.items() if used}, "give them a name in compat/, or list them"


def _has(owner: object, name: str) -> bool:
    """Whether a module or class has a name; instance attributes are looked for in the source of the class."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    return inspect.isclass(owner) and any(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
        for base in owner.__mro__
        if base.__module__.split(".")[0] in ("torchrec", "lightning", "torchmetrics")
        for node in ast.walk(tree_of(base))
    )


@cache
def tree_of(cls: type) -> ast.Module:
    return ast.parse(textwrap.dedent(inspect.getsource(cls)))


LISTED = {
    "torchrec": {**sharded_module.PRIVATE_NAMES, **torchrec.PRIVATE_NAMES},
    "lightning.pytorch": lightning.PRIVATE_NAMES,
}
OTHER_NAMES = {  # of owners in the lists
    "SparseFeaturesDist": ("TwSparseFeaturesDist", "RwSparseFeaturesDist"),  # several classes, one per sharding
    "Strategy": ("ParallelStrategy",),  # sets what strategies of several ranks have
}


def _owners(package: str, owner: str) -> list[Any]:
    """Return the module, or the classes with a name in the package's modules."""
    if owner.startswith(package):
        return [importlib.import_module(owner)]
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    return [members[name] for name in OTHER_NAMES.get(owner, (owner,)) for members in modules if name in members]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("package", "owner", "name"),
    [(package, owner, name) for package, lists in LISTED.items() for owner, names in lists.items() for name in names],
)
def test_a_private_name_is_still_there(package: str, owner: str, name: str) -> None:
    owners = _owners(package, owner)
    assert owners
    for found in owners:
        assert _has(found, name), f"{found} has no {name} any more; PRIVATE_NAMES of tables/ or compat/ lists it"


OVERRIDING = {
    cls
    for name, module in list(sys.modules.items())
    for cls in vars(module).values()
    if name.startswith(("lightning_overlap.plugin.", "lightning_overlap.compat."))
    if isinstance(cls, type) and cls.__module__ == name
    if any(base.__module__.startswith("lightning.") for base in cls.__mro__)
}


@pytest.mark.smoke
@pytest.mark.parametrize("cls", sorted(OVERRIDING, key=str), ids=lambda cls: cls.__name__)
def test_what_our_classes_share_with_lightnings_is_listed(cls: type) -> None:
    """A private name that is ours in a subclass and Lightning's above it is either listed, or there by mistake."""
    bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "lightning"]
    theirs = {name for base in bases for name in defined_names(tree_of(base)) if is_private(name)}
    assert theirs
    listed = LIGHTNING_PRIVATE if cls.__module__ == lightning.__name__ else set()
    assert not defined_names(tree_of(cls)) & theirs - listed
