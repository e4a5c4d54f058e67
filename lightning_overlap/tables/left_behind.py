"""What copies of a model and torch.ao.quantization find at a sharded module, whose shards stay with their process."""

import warnings
from functools import partial
from typing import Any, NoReturn

from torch import nn
from typing_extensions import override

from .supported_modules import sharded_modules, table_modules


def leave_shards_behind(model: nn.Module) -> None:
    """Let copies and pickles of a model have no shards, and let torch.ao.quantization raise an error for its tables."""
    for module in table_modules(model).values():
        module.qconfig = NoQuantization(type(module).__name__)
    sharded: dict[str, Any] = {**sharded_modules(model)}
    for module in sharded.values():  # it has process groups and hooks, which cannot be pickled
        # `copy` and `pickle` look this method up on the object. The class belongs to TorchRec.
        module.__reduce_ex__ = partial(_as_left_behind, type(module).__name__)


class NoQuantization:
    """The `qconfig` of tables: reading any of its settings raises an error, as there is no form of quantized shards.

    torch.ao.quantization takes a module's `qconfig`, if there is one, and reads it. Without an error it would leave
    sharded tables as they are. With `qconfig = None` it leaves a module as it is by the user's own wish.
    """

    def __init__(self, kind: str) -> None:
        self._kind = kind  # name of the sharded module's class

    def __getattr__(self, name: str) -> NoReturn:
        if name.startswith("__"):  # what `copy` and `pickle` look for
            raise AttributeError(name)
        raise RuntimeError(
            f"the tables of a {self._kind} are sharded, and quantization would leave them as they are. Save a "
            "checkpoint with checkpoint_format='full', make the module anew without a Trainer, load the checkpoint "
            "there, and quantize that one (docs/migration.md, 'Out again, to serving'). Dense parts can be quantized "
            "by themselves: quantize_dynamic(module.top)."
        )


class ShardsLeftBehind(nn.Module):
    """Replaces a sharded module of class `kind` in a copy of a model: shards belong to a process and its ranks."""

    def __init__(self, kind: str) -> None:
        super().__init__()
        self.kind = kind
        self.qconfig = NoQuantization(kind)

    @override
    def forward(self, *_: Any, **__: Any) -> NoReturn:
        raise RuntimeError(self._text())

    @override
    def __getattr__(self, name: str) -> Any:
        try:
            return super().__getattr__(name)
        except AttributeError:
            if name.startswith("_"):  # what `copy`, `pickle` and torch look for
                raise
            raise AttributeError(f"{name}: {self._text()}") from None

    def _text(self) -> str:
        return (
            f"this module is a copy, and its {self.kind} has no shards: shards stay with their process. Make a new "
            "module, and load a checkpoint of the copied module."
        )


def _as_left_behind(kind: str, _: int) -> tuple[type[ShardsLeftBehind], tuple[str]]:
    warnings.warn(
        f"a copy of a {kind} has no shards: save a checkpoint to keep the tables, and pass a module to fit() and the "
        "other methods of a copied trainer.",
        stacklevel=3,
    )
    return ShardsLeftBehind, (kind,)
