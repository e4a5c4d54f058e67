"""What becomes of tables where a module is deep-copied, pickled, or sent to a spawned process."""

from __future__ import annotations

import copyreg
import warnings
from collections.abc import Mapping
from typing import Any, NoReturn

from torch import nn
from typing_extensions import override

from .supported_modules import sharded_modules
from .table import AppliedOptimizer, find_tables


class ShardsLeftBehind(nn.Module):
    """Takes the place of a sharded module, of a `kind`, in a copy: shards stay with their process and its ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind

    @override
    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(
            f"this module is a copy, in which nothing stands in the place of a {self.kind}: shards stay with their "
            "process. Make the module anew, and load a checkpoint of the one that was copied."
        )


def leave_shards_behind(model: nn.Module) -> None:
    """Let copies of a sharded module be made, without its shards; each copy warns of it.

    TorchRec's sharded modules hold process groups and hooks that nobody can copy or pickle.
    """
    for module in sharded_modules(model).values():
        copyreg.pickle(type(module), _left_behind)


def _left_behind(module: nn.Module) -> tuple[type[ShardsLeftBehind], tuple[str]]:
    warnings.warn(
        f"a copy of a {type(module).__name__} leaves its shards behind: save a checkpoint to keep the tables, and pass "
        "a module to fit() and the like of a copied trainer.",
        UserWarning,
        stacklevel=3,
    )
    return ShardsLeftBehind, (type(module).__name__,)


def table_optimizers(model: nn.Module) -> dict[str, AppliedOptimizer]:
    """Return what is applied in backward to the tables of an unsharded model, by their paths.

    A parameter keeps it in attributes, which neither `copy.deepcopy` nor the pickler of `torch.multiprocessing` copies.
    """
    return {table.path: table.fused_optimizer for table in find_tables(model) if table.fused_optimizer}


def apply_table_optimizers(model: nn.Module, recorded: Mapping[str, AppliedOptimizer]) -> None:
    """Apply to the tables of a copy what was applied to those of the original, where the copy has lost it."""
    for table in find_tables(model):
        if table.path in recorded:
            table.apply_fused_optimizer(*recorded[table.path])
