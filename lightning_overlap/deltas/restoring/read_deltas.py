"""Make Lightning's checkpoint from the newest whole cut in a sink; say what it lacks."""

import os
from collections.abc import Callable, Iterable
from functools import partial
from typing import Any, TypeVar

import lightning
from lightning.pytorch import Trainer
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor

from ...checkpoint import ENTRIES, FUSED
from ...compat.lightning import fit_loop_state
from ...distributed import gather_objects, together
from ...plugin import OverlapEmbeddingStrategy, first_words
from ...storage import Store, close_store
from ...tables import has_tables
from ...text import some, without_secrets
from ..files import CutError, Header, as_store, as_words, parse_names
from ..recording import EmbeddingDeltas, state_after
from ..serving import Replica
from .shard_tables import ShardTables

T = TypeVar("T")

_KINDS = (ValueError, OSError, ImportError, RuntimeError)  # errors that keep their type on all ranks


class _Listed:
    """A sink whose listing is that of rank 0, so that all ranks read the same cuts."""

    def __init__(self, sink: Store, names: list[str]) -> None:
        self._names, self.read, self.put, self.remove = names, sink.read, sink.put, sink.remove
        self.close = partial(close_store, sink)

    def names(self) -> Iterable[str]:
        """Return rank 0's listing."""
        return self._names


def read_deltas(address: str, trainer: Trainer) -> dict[str, Any]:
    """Load the newest whole cut of a sink into the trainer's sharded module; return Lightning's checkpoint.

    All ranks call this. A fit gets tables, optimizer state and dense part as far as they were sent, and the counts of
    steps and epochs; rank 0 logs what is missing. An evaluation gets tables and dense part.

    Raises:
        ValueError: The address names no sink of this module's training: no whole cut, damaged or missing files, other
            tables.
        RuntimeError: The tables have another fused optimizer.
        OSError: The sink cannot be read.
        ImportError: The sink needs a package that is not installed.
    """
    strategy, module = trainer.strategy, trainer.lightning_module
    assert isinstance(strategy, OverlapEmbeddingStrategy)
    shown = f"deltas://{without_secrets(address)}"
    if not has_tables(module):
        raise ValueError(f"ckpt_path={shown!r} has tables, {type(module).__name__} has no TorchRec tables.")
    if not address:
        raise ValueError(
            "ckpt_path='deltas://' lacks the address of a sink: deltas:///folder, deltas://s3://bucket/folder, "
            "deltas://redis://host:6379/0?key=name."
        )
    fits, group = trainer.state.fn == TrainerFn.FITTING, strategy.checkpoint_group

    def on_all_ranks(do: Callable[[], T]) -> T:
        try:
            return together(do, group, alike=_KINDS)
        except Exception as err:
            err.add_note(f"Nothing can begin from ckpt_path={shown!r}. All ranks read this sink.")
            raise

    def list_files() -> list[str]:
        return [] if strategy.global_rank else list(map(str, parse_names(as_store(address).names())))

    def read(names: list[str]) -> ShardTables:
        tables = ShardTables(module, states=fits, strict=module.strict_loading)
        with Replica(tables, _Listed(as_store(address), names)) as replica:
            replica.update()
        if replica.position is None:
            raise CutError("the sink has no whole cut, and no base of every rank: its first cut was not finished.")
        return tables

    names = gather_objects(on_all_ranks(list_files), group)[0]
    if not names:
        raise ValueError(
            f"ckpt_path={shown!r} has no files of embedding deltas{_where(address)}. Pass the address that "
            "EmbeddingDeltas had, after deltas://."
        )
    tables = on_all_ranks(partial(read, names))
    tables.place_ids(group)
    on_all_ranks(tables.finish)
    header = tables.header
    assert header is not None
    without_state = set().union(*gather_objects(tables.without_state, group))
    checkpoint = {
        "pytorch-lightning_version": lightning.__version__,
        "epoch": header.epoch,
        "global_step": header.global_step,
        "state_dict": tables.state_dict,
        ENTRIES[FUSED]: None,  # already loaded
    }
    if not fits:
        return checkpoint
    if trainer.is_global_zero:
        first_words.tell(_what_is_there(shown, header, tables, without_state, trainer))
    state = state_after(header, sends_dense=bool(tables.sent_dense))
    senders = [one for one in trainer.callbacks if isinstance(one, EmbeddingDeltas)]  # type: ignore[attr-defined]
    return {
        **checkpoint,
        "loops": {
            "fit_loop": fit_loop_state(
                epochs=header.epoch,
                batches=header.step,
                steps=header.global_step,
                is_automatic=module.automatic_optimization,
            )
        },
        "callbacks": {one.state_key: state for one in senders},
        "optimizer_states": [],
        "lr_schedulers": [],
    }


def _where(address: str) -> str:
    """Return where a local folder was looked for, as an end of a sentence: a relative path depends on the process."""
    if "://" in address or "::" in address:
        return ""
    path = os.path.abspath(address)
    return f": {path!r} " + ("is an empty folder or has other files" if os.path.isdir(path) else "is no folder here")


def _what_is_there(shown: str, header: Header, tables: ShardTables, without_state: set[str], trainer: Trainer) -> str:
    """Return what a fit has and lacks, as a text for the log."""
    has = ["tables"] + ["state of their fused optimizers"] * (header.row_wise is not None)
    has += ["dense part"] * bool(tables.sent_dense)
    lacks = [
        f"the position of the data loaders: epoch {header.epoch} begins at its first batch"
        + f", {header.batch} batches of it are trained again" * bool(header.batch)
    ]
    if not tables.sent_dense:
        lacks.append("the dense part (EmbeddingDeltas(dense=True) sends it): the dense weights are the module's own")
    if objects := sorted(name for name, value in tables.state_dict.items() if not isinstance(value, Tensor)):
        lacks.append(f"state of modules that is no tensor, which begins anew: {some(objects)}")
    if without_state:
        lacks.append(
            "the fused optimizer's state, which begins anew (EmbeddingDeltas(optimizer_state=True) sends it), of "
            f"{some(sorted(without_state))}"
        )
    if header.raw_ids is not None:
        lacks.append(
            "what eviction policies know of ids, and the ids seen since the last eviction: each known id counts as "
            f"seen once, now ({some(sorted(one.module for one in header.raw_ids.values()))})"
        )
    if header.num_pending:
        lacks.append(f"the updates of the tables by the last {header.num_pending} batches")
    lacks.append("state of dense optimizers, schedulers, callbacks and data modules, which begins anew")
    return (
        f"lightning_overlap: begins from {shown}, {as_words(header.name.cut)} (global step {header.global_step}), with "
        f"{', '.join(has)}. It lacks:\n  " + "\n  ".join(lacks)
    )
