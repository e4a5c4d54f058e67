"""Private names of other libraries occur in `compat/` alone, where each is listed, and is still there."""

import ast
import importlib
import importlib.util
import inspect
import pkgutil
import sys
import textwrap
from collections.abc import Iterator
from functools import cache
from typing import Any

import pytest

import lightning_overlap
from lightning_overlap.compat import fbgemm, lightning, torch, torchrec

from .test_folders import PACKAGE, PRIVATE, SOURCES, folder_of, is_private, name_of

LISTS = {library.__name__.rpartition(".")[2]: library.PRIVATE_NAMES for library in (fbgemm, lightning, torch, torchrec)}
LISTED = {library: {name for names in lists.values() for name in names} for library, lists in LISTS.items()}
EVERY = set().union(*LISTED.values())
PUBLIC = {  # in the standard library, in spite of their underscore
    *("_asdict", "_fields", "_replace"),  # of named tuples
    "_exit",  # of `os`
}
WORDS = {"_target_", "_partial_", "_convert_"}  # keys of Hydra's configs; no names of Python objects
TORCHS_MODULES = {"_C", "_autograd", "_dynamo", "_functorch"}
OURS = "lightning_overlap"


def defined_names(tree: ast.AST) -> set[str]:
    """Return the names that a file or class defines: functions, classes, variables, fields, attributes it sets."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif isinstance(node, ast.Attribute) and isinstance(node.ctx, ast.Store) and is_own(node.value):
            names.add(node.attr)
    return names


def is_own(node: ast.AST) -> bool:
    """Whether an expression is an object of the class that it stands in."""
    return ast.unparse(node) in ("self", "cls", "super()")


def names_of_others(tree: ast.AST) -> Iterator[str]:
    """Yield the private names in a file that are not its own: attributes, strings, keywords. `self` is left out."""
    known = (defined_names(tree) - EVERY) | PUBLIC | WORDS
    endings = set()  # a string that ends another one is no name: `name + "_ms"`, `f"{name}_ms"`, `endswith("_ms")`
    for node in ast.walk(tree):
        if isinstance(node, ast.BinOp) and isinstance(node.op, ast.Add):
            endings.add(id(node.right))
        elif isinstance(node, ast.JoinedStr):
            endings |= {id(value) for value in node.values[1:]}
        elif isinstance(node, ast.Call) and getattr(node.func, "attr", "") in ("endswith", "removesuffix"):
            endings |= set(map(id, node.args))
    for node in ast.walk(tree):
        found = ""
        if isinstance(node, ast.Attribute) and not is_own(node.value):
            found = node.attr
        elif isinstance(node, ast.Constant) and isinstance(node.value, str) and id(node) not in endings:
            found = node.value if node.value.isidentifier() else ""
        elif isinstance(node, ast.keyword):
            found = node.arg or ""
        if is_private(found) and found not in known:
            yield found


OUTSIDE = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES if folder_of(path) != PRIVATE}
DEFINED = set().union(*map(defined_names, OUTSIDE.values()))


def internals_in(tree: ast.AST, libraries: tuple[str, ...] = ("fbgemm", "torch", "torchrec")) -> Iterator[str]:
    """Yield listed names without an underscore that a file reads from other objects, and that nobody here defines."""
    names = {name for library in libraries for name in LISTED[library] if not is_private(name)} - DEFINED
    for node in ast.walk(tree):
        if isinstance(node, ast.Attribute) and node.attr in names and not is_own(node.value):
            yield node.attr


def test_private_names_of_others_occur_in_compat_only() -> None:
    found = {name_of(path): sorted({*names_of_others(tree), *internals_in(tree)}) for path, tree in OUTSIDE.items()}
    assert not {file: names for file, names in found.items() if names}, "give them a plain name in compat/"


@pytest.mark.parametrize(
    "source",
    [
        "kjt._values",
        "def f(kjt): kjt._lengths = 0",
        "self.module._lookups",
        "getattr(kjt, '_weights', None)",
        "setattr(module, '_lookups', [])",
        "vars(parameter)['_optimizer_kwargs']",
        "vars(parameter).pop('_anything', None)",
        "for name in ('_indices', '_offsets'): getattr(kernel, name)",
        "getattr(parameter, f'_optimizer_{what}')",
        "Meta(_input=kjt)",
        "class Ours:\n    def f(self, kjt):\n        self._values = kjt._values",
        "kernel.lxu_cache_locations",
        "request.dummy_tensor",
    ],
)
def test_a_private_name_is_seen(source: str) -> None:
    assert [*names_of_others(ast.parse(source)), *internals_in(ast.parse(source))]


@pytest.mark.parametrize(
    "source",
    [
        "self._values",
        "class Ours:\n    _held = 0\n    def equals(self, other): return self._held == other._held",
        "position._replace(step=1)",
        "{'_target_': path}",
        "names = [name + '_ms' for name in names] + [f'{name}_ms']",
    ],
)
def test_names_of_our_own_are_left_alone(source: str) -> None:
    assert not [*names_of_others(ast.parse(source)), *internals_in(ast.parse(source))]


def test_a_file_in_compat_uses_the_names_in_its_list() -> None:
    unlisted = {}
    for path in SOURCES:
        if folder_of(path) == PRIVATE and (library := path.relative_to(PACKAGE).with_suffix("").parts[1]) in LISTED:
            tree = ast.parse(path.read_text(encoding="utf-8"))
            used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
            unlisted[name_of(path)] = (
                used - LISTED[library] - defined_names(tree) - {"_C", "_autograd", "_dynamo", "_functorch"}
            )
    assert set(LISTED) == {file.split("/")[1].removesuffix(".py") for file in unlisted}
    assert not {file: names for file, names in unlisted.items() if names}, "list them, each with a test of its meaning"


# -- classes of this package that derive from others' -----------------------------------------------------------------


def modules() -> Iterator[Any]:
    for info in pkgutil.walk_packages(lightning_overlap.__path__, f"{OURS}."):
        needs_ray = info.name == f"{OURS}.ray"  # which `make smoke-ray` installs
        if not info.name.startswith(f"{OURS}.conf") and (not needs_ray or importlib.util.find_spec("ray")):
            yield importlib.import_module(info.name)


DERIVED = {
    cls
    for module in modules()
    for cls in vars(module).values()
    if isinstance(cls, type) and cls.__module__ == module.__name__
    if not all(base.__module__.split(".")[0] in {OURS, *sys.stdlib_module_names} for base in cls.__mro__)
}


@cache
def tree_of(cls: type) -> ast.AST:
    try:
        return ast.parse(textwrap.dedent(inspect.getsource(cls)))
    except (OSError, TypeError):  # a class that is made without a source, as torch's in C++
        return ast.Module([], [])


@cache
def private_names_of(base: type) -> frozenset[str]:
    return frozenset(filter(is_private, {*vars(base), *defined_names(tree_of(base))}))


@pytest.mark.smoke
@pytest.mark.parametrize("cls", sorted(DERIVED, key=str), ids=lambda cls: cls.__name__)
def test_what_our_classes_share_with_others_is_listed(cls: type) -> None:
    """A private name of a class above ours is used in `compat/` alone; in `compat/` it is in the list."""
    bases = [base for base in cls.__mro__ if base.__module__.split(".")[0] not in {OURS, *sys.stdlib_module_names}]
    theirs = frozenset[str]().union(*map(private_names_of, bases))
    tree = tree_of(cls)
    used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_own(node.value)}
    _, folder, library, *_ = [*cls.__module__.split("."), ""]
    listed = LISTED[library] if folder == PRIVATE else set()
    assert not (used | defined_names(tree)) & theirs - listed - PUBLIC, "compat/ has to stand between"


# -- what is listed is there ------------------------------------------------------------------------------------------

PACKAGES = {"torchrec": "torchrec", "lightning": "lightning.pytorch"}
OTHER_NAMES = {  # of owners in the lists
    "SparseFeaturesDist": ("TwSparseFeaturesDist", "RwSparseFeaturesDist"),  # several classes, one per sharding
    "Strategy": ("ParallelStrategy",),  # sets what strategies of several ranks have
}


def _has(owner: object, name: str) -> bool:
    """Whether a module or class has a name; instance attributes are looked for in the source of the class."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    return inspect.isclass(owner) and any(
        name in defined_names(tree_of(base))
        for base in owner.__mro__
        if base.__module__.split(".")[0] in ("torchrec", "lightning", "torchmetrics")
    )


def _owners(package: str, owner: str) -> list[Any]:
    """Return the module, or the classes with a name in the package's modules."""
    if owner.startswith(package):
        return [importlib.import_module(owner)]
    modules = [vars(module) for name, module in sys.modules.items() if name.startswith(f"{package}.")]
    return [members[name] for name in OTHER_NAMES.get(owner, (owner,)) for members in modules if name in members]


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("library", "owner", "name"),
    [(one, owner, name) for one in PACKAGES for owner, names in LISTS[one].items() for name in names],
)
def test_a_private_name_is_still_there(library: str, owner: str, name: str) -> None:
    owners = _owners(PACKAGES[library], owner)
    assert owners
    for found in owners:
        assert _has(found, name), f"{found} has no {name} any more; PRIVATE_NAMES of compat/{library} lists it"
