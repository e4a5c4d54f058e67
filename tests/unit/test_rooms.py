"""The rooms of the package: imports point down only, and other packages' private names stay where they are listed."""

from __future__ import annotations

import ast
import importlib
import inspect
import sys
import textwrap
from collections.abc import Iterator, Mapping, Sequence
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap.plugin import checkpoint_links, evaluation_loops, fit_loop, processes, sigterm, strategy
from lightning_overlap.sparse import pipeline, sharded_module

PACKAGE = Path(pipeline.__file__).resolve().parent
ROOMS = ("plan", "run", "sparse", "plugin", "apps")
"""From the ground up: a room imports from itself and from those below."""

FILES = {
    "plan": ("versions", "stages", "schedule", "modes", "switched"),
    "run": (
        *(
            "agreement",
            "groups",
            "streams",
            "structure",
            "inflight",
            "clocks",
            "executor",
            "marks",
            "protocols",
            "syncs",
            "placed_copies",
            "receives_first",
        ),
        *("testing/recorded", "testing/fakes", "testing/trainer", "testing/schedule_laws"),
        *("testing/races", "testing/followed", "testing/tensor_races", "testing/pools"),
        *("timeline", "summary", "figures", "kineto", "kineto_names", "trace_file", "layout", "drawing", "page"),
    ),
    "sparse": (
        *("kinds", "sharded", "held", "input_dist", "sparse", "sharding", "optim", "table_state", "stash"),
        *("stale_rows", "lookup_threads", "released", "stand_ins", "columns", "unchanged", "mismatches", "copied"),
    ),
    "plugin": (
        "strategy",
        "steps",
        "loop",
        "evaluation",
        "signals",
        "processes",
        "checkpoint",
        "checkpoint_full",
        "checkpoint_dense",
        "atomic",
        "safe_metadata",
        "links",
        "saving",
        "callbacks",
        "timeline_callback",
        "refusals",
        "testing",
    ),
    "apps": (
        "data",
        "models",
        "train",
        "timeline_command",
        "launch",
        "rank",
        "recipe",
        "report",
        "command",
        "benchmark",
        "bench_rank",
        "bench_arms",
        "bench_wire",
        "bench_report",
        "conf",
        "choices",
    ),
}
LEAVES_ALONE = {
    "run": {"torchrec", "fbgemm_gpu", "lightning", "pytorch_lightning", "hydra", "omegaconf"},
    "sparse": {"lightning", "pytorch_lightning", "hydra", "omegaconf"},
    "plugin": {"hydra", "omegaconf"},
    "apps": set[str](),
}
LIGHTNING_FILES = {
    "loop": fit_loop,
    "evaluation": evaluation_loops,
    "signals": sigterm,
    "processes": processes,
    "links": checkpoint_links,
}
"""The files that may use Lightning's private names; each lists them."""

ROOM_OF = {file: room for room, files in FILES.items() for file in files}
SOURCES = sorted(path for path in PACKAGE.rglob("*.py") if path != PACKAGE / "__init__.py")


def name_of(path: Path) -> str:
    return path.relative_to(PACKAGE).as_posix()


def room_of(path: Path) -> str:
    parts = path.relative_to(PACKAGE).with_suffix("").parts
    found = room_key(parts)
    assert found in ROOM_OF, f"{parts[0]} has no room yet: give it one in STYLE and in {Path(__file__).name}"
    return ROOM_OF[found]


def room_key(parts: Sequence[str]) -> str:
    """Return the name that stands in FILES: of a file in a folder that has rooms of its own, or of the folder."""
    own = "/".join(parts[:2])
    return own if own in ROOM_OF else parts[0]


def imports(tree: ast.AST, path: Path) -> Iterator[tuple[str, str]]:
    """Yield (module, imported name or "") of every import, relative ones written out in full."""
    package = ["lightning_overlap", *path.relative_to(PACKAGE).parts[:-1]]
    for node in ast.walk(tree):
        if isinstance(node, ast.Import):
            yield from ((alias.name, "") for alias in node.names)
        elif isinstance(node, ast.ImportFrom):
            base = ".".join(package[: len(package) - node.level + 1]) if node.level else ""
            module = ".".join(filter(None, (base, node.module)))
            yield from ((module, alias.name) for alias in node.names)


def complaints(source: str, path: Path) -> list[str]:
    """Return what the imports of a file do that its room must not."""
    room = room_of(path)
    found = []
    for module, name in imports(ast.parse(source), path):
        top, *rest = module.split(".")
        if top == "lightning_overlap":
            target = room_key(rest or [name])
            if target in ROOM_OF and ROOMS.index(ROOM_OF[target]) > ROOMS.index(room):
                found.append(f"{room} imports {target}, which is up in {ROOM_OF[target]}")
            if name.startswith("_") and not name.startswith("__") and ROOM_OF.get(target) != room:
                found.append(f"{room} imports the private {target}.{name}")
        elif room == "plan" and top not in sys.stdlib_module_names:
            found.append(f"plan imports {top}, which is not of the standard library")
        elif top in LEAVES_ALONE.get(room, ()):
            found.append(f"{room} imports {top}")
        private = any(part.startswith("_") and not part.startswith("__") for part in (*rest, name))
        if top == "torchrec" and private and room != "sparse":
            found.append(f"{room} imports the private {module}.{name}")
        if top in ("lightning", "pytorch_lightning") and private and path.stem not in LIGHTNING_FILES:
            found.append(f"{path.name} imports the private {module}.{name}")
    return found


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_imports_point_down(path: Path) -> None:
    found = complaints(path.read_text(encoding="utf-8"), path)
    assert not found, f"{name_of(path)}: {'; '.join(found)}"


@pytest.mark.parametrize(
    ("file", "source", "complaint"),
    [
        ("schedule.py", "import torch", "plan imports torch"),
        ("schedule.py", "def f():\n    from .executor import Executor", "plan imports executor, which is up in run"),
        ("executor.py", "from . import sparse", "run imports sparse, which is up in sparse"),
        (
            "executor.py",
            "from lightning_overlap.plugin.strategy import X",
            "run imports strategy, which is up in plugin",
        ),
        ("executor.py", "from .schedule import _validate", "run imports the private schedule._validate"),
        ("executor.py", "import torchrec.sparse", "run imports torchrec"),
        ("sparse.py", "from lightning.pytorch import Trainer", "sparse imports lightning"),
        ("strategy.py", "import hydra", "plugin imports hydra"),
        ("strategy.py", "from torchrec.distributed.types import _Private", "plugin imports the private torchrec"),
        ("strategy.py", "from lightning.pytorch.loops.fit_loop import _FitLoop", "strategy.py imports the private"),
        ("testing/fakes.py", "from lightning.pytorch import Trainer", "run imports lightning"),
        ("testing/fakes.py", "from .module_laws import check_module", "run imports testing, which is up in plugin"),
        ("data/batch.py", "from ..sparse import _input_in", "apps imports the private sparse._input_in"),
    ],
)
def test_an_arrow_that_points_up_is_seen(file: str, source: str, complaint: str) -> None:
    found = complaints(source, PACKAGE / file)
    assert len(found) == 1
    assert found[0].startswith(complaint)


def test_the_package_gives_public_names_only() -> None:
    tree = ast.parse((PACKAGE / "__init__.py").read_text(encoding="utf-8"))
    for node in ast.walk(tree):
        if isinstance(node, (ast.Import, ast.ImportFrom)):
            for alias in node.names:
                assert alias.asname == alias.name, f"write `import {alias.name} as {alias.name}`"
                assert not alias.name.startswith("_")


# -- private names of other packages ----------------------------------------------------------------------------

LISTED = {
    "sparse": {name for names in sharded_module.PRIVATE_NAMES.values() for name in names},
    **{
        file: {name for names in module.PRIVATE_NAMES.values() for name in names}
        for file, module in LIGHTNING_FILES.items()
    },
}
STANDARD_LIBRARY = {"_fields", "_replace", "_exit"}
"""Documented, though they start with an underscore."""

TORCH_PRIVATE = {
    "_C",
    "_apply_optimizer_in_backward",
    "_autograd",
    "_cdata",
    "_current_autograd_node",
    "_current_graph_task_id",
    "_execution_engine",
    "_get_default_store",
    "_get_sequence_nr",
    "_init_from_local_shards_and_global_metadata",
    "_profiler_enabled",
    "_register_backend",
    "_schema",
    "_sequence_nr",
    "_set_params_and_buffers_to_ignore_for_model",
    "_to_copy",
}
"""PyTorch's own; TorchRec and Lightning use them too."""


def is_private(name: str) -> bool:
    return name.startswith("_") and not name.startswith("__") and name != "_"


def defined_names(tree: ast.AST) -> set[str]:
    """Return the names that a file defines: functions, classes, variables, fields, attributes it sets."""
    names = set()
    for node in ast.walk(tree):
        if isinstance(node, (ast.FunctionDef, ast.AsyncFunctionDef, ast.ClassDef)):
            names.add(node.name)
        elif isinstance(node, ast.Name) and isinstance(node.ctx, ast.Store):
            names.add(node.id)
        elif (
            isinstance(node, ast.Attribute)
            and isinstance(node.ctx, ast.Store)
            and isinstance(node.value, ast.Name)
            and node.value.id == "self"
        ):
            names.add(node.attr)
    return names


TREES = {path: ast.parse(path.read_text(encoding="utf-8")) for path in SOURCES}
OURS = {name for tree in TREES.values() for name in defined_names(tree)}


@pytest.mark.parametrize("path", SOURCES, ids=name_of)
def test_private_names_of_others_are_listed(path: Path) -> None:
    """A private attribute that this package does not define belongs to another one: it has to be in a list."""
    used = {node.attr for node in ast.walk(TREES[path]) if isinstance(node, ast.Attribute) and is_private(node.attr)}
    room = room_of(path)
    allowed = OURS | TORCH_PRIVATE | STANDARD_LIBRARY | (LISTED["sparse"] if room == "sparse" else set())
    allowed |= LISTED.get(path.stem, set())
    assert not used - allowed, f"{name_of(path)} uses {sorted(used - allowed)}: list them in PRIVATE_NAMES"


def _listed(names: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(owner, name) for owner, listed in names.items() for name in listed]


def _has(owner: object, name: str) -> bool:
    """Whether a module or class has a name; instance attributes are looked for in the source of the class."""
    if hasattr(owner, name) or name in getattr(owner, "__dataclass_fields__", ()):
        return True
    if not inspect.isclass(owner):
        return False
    return any(
        isinstance(node, ast.Attribute) and node.attr == name and isinstance(node.ctx, ast.Store)
        for base in owner.__mro__
        if base.__module__.split(".")[0] in ("torchrec", "lightning")
        for node in ast.walk(ast.parse(textwrap.dedent(inspect.getsource(base))))
    )


TORCHREC = {
    "ShardedFeatureProcessedEmbeddingBagCollection": "torchrec.distributed.fp_embeddingbag",
    "ShardedManagedCollisionEmbeddingBagCollection": "torchrec.distributed.mc_embeddingbag",
    "ShardedManagedCollisionEmbeddingCollection": "torchrec.distributed.mc_embedding",
    "EmbeddingFusedOptimizer": "torchrec.distributed.batched_embedding_kernel",
    "ShardedEmbeddingBagCollection": "torchrec.distributed.embeddingbag",
    "ShardedEmbeddingCollection": "torchrec.distributed.embedding",
    "FusedKJTListSplitsAwaitable": "torchrec.distributed.embedding_sharding",
    "KJTAllToAll": "torchrec.distributed.dist_data",
    "KeyedJaggedTensor": "torchrec.sparse.jagged_tensor",
    "KJTSplitsAllToAllMeta": "torchrec.distributed.embedding_sharding",
    "NoWait": "torchrec.distributed.types",
}
LIGHTNING = {
    "_FitLoop": "lightning.pytorch.loops.fit_loop",
    "_TrainingEpochLoop": "lightning.pytorch.loops.training_epoch_loop",
    "_EvaluationLoop": "lightning.pytorch.loops.evaluation_loop",
    "_PredictionLoop": "lightning.pytorch.loops.prediction_loop",
    "_DataLoaderIterDataFetcher": "lightning.pytorch.loops.fetchers",
    "_MultiProcessingLauncher": "lightning.pytorch.strategies.launchers.multiprocessing",
    "DDPStrategy": "lightning.pytorch.strategies",
    "LightningModule": "lightning.pytorch",
    "ModelCheckpoint": "lightning.pytorch.callbacks",
    "ModelPruning": "lightning.pytorch.callbacks",
    "Strategy": "lightning.pytorch.strategies.parallel",
    "Trainer": "lightning.pytorch",
    "CombinedLoader": "lightning.pytorch.utilities.combined_loader",
    "_SignalConnector": "lightning.pytorch.trainer.connectors.signal_connector",
}


@pytest.mark.smoke
@pytest.mark.parametrize(("owner", "name"), _listed(sharded_module.PRIVATE_NAMES))
def test_torchrec_still_has(owner: str, name: str) -> None:
    if owner == "SparseFeaturesDist":  # the name of several classes, one per sharding
        from torchrec.distributed.sharding.rw_sharding import RwSparseFeaturesDist
        from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist

        kinds: list[Any] = [TwSparseFeaturesDist, RwSparseFeaturesDist]
    elif owner.startswith("torchrec."):
        kinds = [importlib.import_module(owner)]
    else:
        kinds = [getattr(importlib.import_module(TORCHREC[owner]), owner)]
    for kind in kinds:
        assert _has(kind, name), f"TorchRec's {kind.__name__} has no {name} any more; sharded.py reads it"


@pytest.mark.smoke
@pytest.mark.parametrize(
    ("file", "owner", "name"),
    [(file, *listed) for file, module in LIGHTNING_FILES.items() for listed in _listed(module.PRIVATE_NAMES)],
)
def test_lightning_still_has(file: str, owner: str, name: str) -> None:
    home = importlib.import_module(owner if owner.startswith("lightning.") else LIGHTNING[owner])
    owner = "ParallelStrategy" if owner == "Strategy" else owner  # sets what strategies of several ranks have
    thing = home if owner.startswith("lightning.") else getattr(home, owner)
    assert _has(thing, name), f"Lightning's {owner} has no {name} any more; {file}.py uses it"


def _private_names_in_lightning(cls: type) -> set[str]:
    """Return the private names that Lightning's classes above `cls` define or set."""
    sources = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "lightning"]
    trees = [ast.parse(textwrap.dedent(inspect.getsource(base))) for base in sources]
    return {name for tree in trees for name in defined_names(tree) if is_private(name)}


@pytest.mark.smoke
@pytest.mark.parametrize(
    "cls",
    [
        strategy.OverlapEmbeddingStrategy,
        processes.StartsProcesses,
        processes.Launcher,
        fit_loop._FitLoopMixin,
        fit_loop._EpochLoopMixin,
        fit_loop.LookaheadFetcher,
        evaluation_loops._EvaluationLoopMixin,
        evaluation_loops._PredictionLoopMixin,
        evaluation_loops.EvaluationFetcher,
    ],
    ids=lambda cls: cls.__name__,
)
def test_what_our_classes_share_with_lightnings_is_listed(cls: type) -> None:
    """A private name that is ours in a subclass and Lightning's above it is either listed, or there by mistake."""
    ours = {name for name in defined_names(ast.parse(inspect.getsource(cls))) if is_private(name)}
    assert _private_names_in_lightning(cls)  # there is something to compare with
    listed = set().union(*(LISTED[file] for file in LIGHTNING_FILES))
    assert not ours & _private_names_in_lightning(cls) - listed


def test_a_name_that_is_gone_is_seen() -> None:
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    assert not _has(ShardedEmbeddingBagCollection, "_lookups_of_yore")
    assert not _has(importlib.import_module("lightning.pytorch.loops.fit_loop"), "_FitLoopOfYore")
