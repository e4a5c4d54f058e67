"""Functions that ranks run: fits whose updated rows are sent, with what the tables were after every step."""

from __future__ import annotations

import os
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec.distributed.types import ShardedTensor

from lightning_overlap import EmbeddingDeltas, OverlapEmbeddingStrategy
from lightning_overlap.deltas import PartName, decode
from lightning_overlap.deltas.recording import TouchedRows, cuts, touched_rows
from lightning_overlap.deltas.recording.copies import copy_on_host

from ..support.cases import Batches, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer

Windows = dict[tuple[str, int, int], Tensor]
"""A rank's shards: name of the table, first row, first column -> values."""


class Files:
    """The plainest sink: a file for each part.

    Args:
        folder: Where they go.
        delay_s: How long each write takes.
        fails_at: The step from which on the last rank cannot write.
        error: What it raises then.
    """

    def __init__(
        self, folder: str, delay_s: float = 0, fails_at: int | None = None, error: type[BaseException] = OSError
    ) -> None:
        self.folder, self.delay_s, self.fails_at, self.error = Path(folder), delay_s, fails_at, error

    def __str__(self) -> str:
        return f"Files({self.folder.name})"

    def write(self, name: str, part: bytes) -> None:
        found = PartName.parse(name)
        assert found is not None
        if self.fails_at is not None and found.step >= self.fails_at and found.rank == found.world_size - 1:
            raise self.error("no space left")
        time.sleep(self.delay_s)
        self.folder.mkdir(exist_ok=True)
        (self.folder / f".{name}").write_bytes(part)
        (self.folder / f".{name}").rename(self.folder / name)

    def names(self) -> Iterable[str]:
        return [path.name for path in self.folder.glob("g*.arrow")]

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)

    def close(self) -> None:
        pass


def shards_of(module: LightningModule) -> Windows:
    """This rank's shards as they are now; of data-parallel tables the whole."""
    found: Windows = {}
    for name, value in module.state_dict().items():
        if isinstance(value, ShardedTensor):
            for shard in value.local_shards():
                row, column = shard.metadata.shard_offsets
                found[name, row, column] = shard.tensor.detach().cpu().clone()
        elif value.dim() == 2 and ("embedding" in name):
            found[name, 0, 0] = value.detach().cpu().clone()
    return found


class TablesByStep(Callback):
    """Keeps the tables as they are at the end of every step, and in the end."""

    def __init__(self) -> None:
        self.tables: dict[int, Windows] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.tables[trainer.fit_loop.epoch_loop.total_batch_idx + 1] = shards_of(pl_module)


class At(Callback):
    """Does something with the trainer, the module and more, in a hook at a step or several; on one rank if told so."""

    def __init__(
        self, hook: str, steps: int | range, do: Callable[..., object], *args: Any, rank: int | None = None
    ) -> None:
        setattr(self, hook, self._do)
        self.steps = range(steps, steps + 1) if isinstance(steps, int) else steps
        self.do, self.args, self.rank = do, args, rank

    def _do(self, trainer: Trainer, pl_module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 in self.steps and self.rank in (None, trainer.global_rank):
            self.do(trainer, pl_module, *self.args)


def kill(*_: object) -> None:
    """End the process, as the system does that runs out of memory."""
    os.kill(os.getpid(), signal.SIGKILL)


def halve(trainer: Trainer, module: LightningModule) -> None:
    """Halve all tables, as regularizers by hand do."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "embedding" in name:
                weight.mul_(0.5)
    trainer.strategy.tables_changed()


class LoadsTables(Callback):
    """Loads the first tables again, in mid-run."""

    def __init__(self, at: int) -> None:
        self.at = at

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.first = {name: value.detach().clone() for name, value in pl_module.named_parameters()}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 == self.at:
            with torch.no_grad():
                for name, value in pl_module.named_parameters():
                    value.copy_(self.first[name])
            trainer.strategy.tables_changed()


class Validated(Batches):
    """Validates on other batches."""

    def val_dataloader(self) -> DataLoader:
        return DataLoader([make_batch(self.case, 100 + i, 0) for i in range(3)], batch_size=None)


def fit_with_deltas(
    case: Case,
    pipeline: str,
    folder: str,
    *,
    every_n_steps: int = 1,
    num_steps: int = 12,
    sink: dict[str, Any] | None = None,
    deltas: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    callbacks: tuple[Callback, ...] = (),
    ckpt_path: str | None = None,
    saves_in: str | None = None,
    validates: bool = False,
    device_type: str = "cpu",
    **kwargs: Any,
) -> tuple[dict[int, Windows], Windows]:
    """Train a case; return the tables of this rank by step, and in the end."""
    model = Model(case)
    if pipeline == "async_lookup":
        options = {"staleness": 2, **(options or {})}
    strategy = make_strategy(model, pipeline, device_type, **(options or {}))
    seen = TablesByStep()
    sender = EmbeddingDeltas(Files(folder, **(sink or {})), every_n_steps, **(deltas or {}))
    found = [*callbacks, sender, seen]
    if saves_in is not None:
        kwargs["enable_checkpointing"] = True
        found.append(ModelCheckpoint(saves_in, "{step}", every_n_train_steps=4, save_top_k=-1))
    trainer = make_trainer(strategy, device_type, callbacks=found, **kwargs)
    data = (Validated if validates else Batches)(case, num_steps)
    trainer.fit(model, datamodule=data, ckpt_path=ckpt_path)
    return seen.tables, shards_of(model)


def fit_expecting(error: type[Exception], *args: Any, **kwargs: Any) -> str:
    """Train as above; return what was raised, and how many steps there were."""
    seen = TablesByStep()
    kwargs["callbacks"] = (seen,)
    with pytest.raises(error) as caught:
        fit_with_deltas(*args, **kwargs)
    return f"{caught.value} steps: {len(seen.tables)}"


def fit_warning(*args: Any, **kwargs: Any) -> list[str]:
    """Train as above; return what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        fit_with_deltas(*args, **kwargs)
    return [str(one.message) for one in caught]


def fit_managed(folder: str) -> str:
    """Try to send the rows of a managed collision module; return the error."""
    from tests.tables import supported_modules as kinds

    module = kinds.KindModel("managed_bags")
    strategy = OverlapEmbeddingStrategy(sharding=kinds.make_plan(module))
    trainer = make_trainer(strategy, callbacks=[EmbeddingDeltas(Files(folder))], limit_val_batches=0)
    with pytest.raises(ValueError, match="assigns") as caught:
        trainer.fit(module, datamodule=kinds.Batches(module.case, 2))
    return str(caught.value)


def fit_copying_slowly(*args: Any, **kwargs: Any) -> Any:
    """Train with copies of rows that take until the next forward is over, so that the user's hooks write meanwhile."""

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return copy_on_host(*args, **kwargs)

    with mock.patch.object(touched_rows, "copy_on_host", late):
        return fit_with_deltas(*args, **kwargs)


def fit_in_small_chunks(*args: Any, **kwargs: Any) -> Any:
    """Train with cuts in chunks of a few rows."""
    with mock.patch.object(cuts, "CHUNK_BYTES", 300):
        return fit_with_deltas(*args, **kwargs)


def fit_marking_lookups(*args: Any, **kwargs: Any) -> Any:
    """Train with rows that are marked when they are looked up, and not when they are updated."""

    def watch(self: TouchedRows, kernel: int) -> Any:
        def looked_up(module: Any, args: Any, kwargs: Any, answer: Any) -> None:
            if answer.requires_grad:
                self._marks[kernel].add(kwargs["indices"].clone(), kwargs["offsets"], None)
                answer.register_hook(lambda _: self.wait_copied())

        return looked_up

    with mock.patch.object(TouchedRows, "_watch", watch):
        return fit_with_deltas(*args, **kwargs)


def apply_in_order(folder: str | Path) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Apply the whole cuts of a folder in their order, as a replica does; return the tables after each.

    Independent of the package's own replicas.
    """
    cuts: dict[tuple[int, int], list[Any]] = {}
    for path in sorted(Path(folder).glob("g*.arrow")):
        part = decode(path.read_bytes(), path.name)
        cuts.setdefault((part.header.generation, part.header.step), []).append(part)
    tables: dict[str, Tensor] = {}
    after: dict[tuple[int, int], dict[str, Tensor]] = {}
    applied: tuple[int, int] | None = None
    for cut, parts in sorted(cuts.items()):
        header = parts[0].header
        by_rank = {rank: [part for part in parts if part.header.rank == rank] for rank in range(header.world_size)}
        if any(not chunks or len(chunks) < chunks[0].header.num_chunks for chunks in by_rank.values()):
            continue
        if any(part.header.is_void for part in parts):
            applied = None
            continue
        if applied is None and any(not part.header.is_base for part in parts):
            continue
        followed = {part.header.after for part in parts} - {None}
        if followed:
            [before] = followed
            assert applied == before if before[0] == cut[0] else applied >= before, (applied, before, cut)
        for part in parts:
            for rows in part.rows:
                if rows.field == "weight":
                    table = tables.setdefault(rows.table, torch.full(rows.shape, torch.nan))
                    table[rows.rows, rows.first_column : rows.first_column + rows.values.shape[1]] = rows.values
        applied = cut
        after[cut] = {name: table.clone() for name, table in tables.items()}
    return after


def differences(tables: dict[str, Tensor], of_ranks: Iterable[Windows]) -> list[str]:
    """Name every shard that is not what tables have in its place, bit for bit."""
    found = []
    for windows in of_ranks:
        for (name, row, column), values in windows.items():
            mine = tables[name][row : row + values.shape[0], column : column + values.shape[1]]
            if not torch.equal(mine, values):
                found.append(f"{name}[{row}:, {column}:]")
    return found
