"""Private names of TorchRec, Lightning and PyTorch: each is listed where it is used, and is still there."""

import ast
import importlib
import inspect
import textwrap
from collections.abc import Mapping
from functools import cache
from typing import Any

import pytest

from lightning_overlap.plugin import (
    checkpoint_hooks,
    failure_hooks,
    private_names,
    processes,
    run,
    step_hooks,
    strategy,
)
from lightning_overlap.plugin.loops import evaluation_loops, fetcher, fit_loop
from lightning_overlap.tables import sharded_module

from .test_folders import LIGHTNING_FOLDER, SOURCES, TORCHREC_FOLDERS, folder_of, is_private, name_of

TORCHREC_PRIVATE = {name for names in sharded_module.PRIVATE_NAMES.values() for name in names}
LIGHTNING_PRIVATE = {name for names in private_names.PRIVATE_NAMES.values() for name in names}
STANDARD_LIBRARY = {"_asdict", "_fields", "_replace", "_exit"}  # documented, though they start with an underscore
TORCH_PRIVATE = {  # PyTorch's own; TorchRec and Lightning use them too
    "_C",
    "_Options",
    "_apply",
    "_apply_optimizer_in_backward",
    "_autograd",
    "_backward_hooks",
    "_backward_pre_hooks",
    "_cdata",
    "_compiled_call_impl",
    "_current_autograd_node",
    "_comm_hooks",
    "_current_graph_task_id",
    "_current_level",
    "_devices",
    "_dynamo",
    "_execution_engine",
    "_forward_hooks",
    "_forward_pre_hooks",
    "_get_backend",
    "_get_default_store",
    "_get_sequence_nr",
    "_init_from_local_shards_and_global_metadata",
    "_len_torch_dispatch_stack",
    "_len_torch_function_stack",
    "_profiler_enabled",
    "_register_backend",
    "_schema",
    "_sequence_nr",
    "_set_default_backend",
    "_set_params_and_buffers_to_ignore_for_model",
    "_timeout",
    "_to_copy",
}


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


def test_private_names_of_others_are_listed() -> None:
    """A private attribute that this package does not define belongs to another one: it has to be in a list."""
    unlisted = {}
    for path, tree in TREES.items():
        used = {node.attr for node in ast.walk(tree) if isinstance(node, ast.Attribute) and is_private(node.attr)}
        used -= OURS | TORCH_PRIVATE | STANDARD_LIBRARY
        used -= TORCHREC_PRIVATE if folder_of(path) in TORCHREC_FOLDERS else set()
        unlisted[name_of(path)] = used - (LIGHTNING_PRIVATE if folder_of(path) == LIGHTNING_FOLDER else set())
    assert not {name: used for name, used in unlisted.items() if used}, "list them in PRIVATE_NAMES"


def _listed(names: Mapping[str, tuple[str, ...]]) -> list[tuple[str, str]]:
    return [(owner, name) for owner, listed in names.items() for name in listed]


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


TORCHREC = {
    "GroupedPooledEmbeddingsLookup": "torchrec.distributed.embedding_lookup",
    "GroupedEmbeddingsLookup": "torchrec.distributed.embedding_lookup",
    "ShardedFeatureProcessedEmbeddingBagCollection": "torchrec.distributed.fp_embeddingbag",
    "ShardedManagedCollisionEmbeddingBagCollection": "torchrec.distributed.mc_embeddingbag",
    "ShardedManagedCollisionEmbeddingCollection": "torchrec.distributed.mc_embedding",
    "EmbeddingFusedOptimizer": "torchrec.distributed.batched_embedding_kernel",
    "ShardedEmbeddingBagCollection": "torchrec.distributed.embeddingbag",
    "ShardedEmbeddingCollection": "torchrec.distributed.embedding",
    "KJTAllToAll": "torchrec.distributed.dist_data",
    "KJTAllToAllTensorsAwaitable": "torchrec.distributed.dist_data",
    "KeyedJaggedTensor": "torchrec.sparse.jagged_tensor",
    "KJTSplitsAllToAllMeta": "torchrec.distributed.embedding_sharding",
    "NoWait": "torchrec.distributed.types",
}
LIGHTNING = {
    "_AutomaticOptimization": "lightning.pytorch.loops.optimization.automatic",
    "_FitLoop": "lightning.pytorch.loops.fit_loop",
    "_TrainingEpochLoop": "lightning.pytorch.loops.training_epoch_loop",
    "_ResultMetric": "lightning.pytorch.trainer.connectors.logger_connector.result",
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
        assert _has(kind, name), f"TorchRec's {kind.__name__} has no {name} any more; tables/sharded_module.py lists it"


@pytest.mark.smoke
@pytest.mark.parametrize(("owner", "name"), _listed(private_names.PRIVATE_NAMES))
def test_lightning_still_has(owner: str, name: str) -> None:
    home = importlib.import_module(owner if owner.startswith("lightning.") else LIGHTNING[owner])
    owner = "ParallelStrategy" if owner == "Strategy" else owner  # sets what strategies of several ranks have
    thing = home if owner.startswith("lightning.") else getattr(home, owner)
    assert _has(thing, name), f"Lightning's {owner} has no {name} any more; plugin/private_names.py lists it"


def _private_names_in_lightning(cls: type) -> set[str]:
    """Return the private names that Lightning's classes above `cls` define or set."""
    sources = [base for base in cls.__mro__ if base.__module__.split(".")[0] == "lightning"]
    return {name for base in sources for name in defined_names(tree_of(base)) if is_private(name)}


@pytest.mark.smoke
@pytest.mark.parametrize(
    "cls",
    [
        strategy.OverlapEmbeddingStrategy,
        run.HasRun,
        step_hooks.WalksSteps,
        checkpoint_hooks.SavesShards,
        failure_hooks.FailsTogether,
        processes.StartsProcesses,
        processes.Launcher,
        fit_loop._FitLoopMixin,
        fit_loop._EpochLoopMixin,
        fetcher.LookaheadFetcher,
        evaluation_loops._EvaluationLoopMixin,
        evaluation_loops._PredictionLoopMixin,
    ],
    ids=lambda cls: cls.__name__,
)
def test_what_our_classes_share_with_lightnings_is_listed(cls: type) -> None:
    """A private name that is ours in a subclass and Lightning's above it is either listed, or there by mistake."""
    ours = {name for name in defined_names(tree_of(cls)) if is_private(name)}
    assert _private_names_in_lightning(cls)  # there is something to compare with
    assert not ours & _private_names_in_lightning(cls) - LIGHTNING_PRIVATE


def test_a_name_that_is_gone_is_seen() -> None:
    from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection

    assert not _has(ShardedEmbeddingBagCollection, "_lookups_of_yore")
    assert not _has(importlib.import_module("lightning.pytorch.loops.fit_loop"), "_FitLoopOfYore")
