"""Functions that ranks run: fits whose updated rows are sent, with what the tables were after every step."""

import os
import shutil
import signal
import time
import warnings
from collections.abc import Callable, Iterable
from contextlib import suppress
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec.distributed.types import ShardedTensor

from lightning_overlap import EmbeddingDeltas, OverlapEmbeddingStrategy
from lightning_overlap.deltas import PartName, Replica, decode, parse_names
from lightning_overlap.deltas.recording import cuts, touched_rows
from lightning_overlap.deltas.recording.copies import copy_on_host
from lightning_overlap.deltas.recording.touched_rows import TouchedRows

from ..support.cases import Batches, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer

Windows = dict[tuple[str, int, int], Tensor]  # a rank's shards: table, first row, first column -> values


class Files:
    """The plainest sink: a file for each part; from step `fails_at` on the last rank raises `error` in each write."""

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
    """Return this rank's shards as they are now; data-parallel tables as a whole."""
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
    def __init__(self) -> None:
        self.tables: dict[int, Windows] = {}

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, *_: Any) -> None:
        self.tables[trainer.fit_loop.epoch_loop.total_batch_idx + 1] = shards_of(pl_module)


class At(Callback):
    """Calls `do` with trainer and module, in a hook at a step or several; on one rank if told so."""

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
    os.kill(os.getpid(), signal.SIGKILL)


def halve(trainer: Trainer, module: LightningModule) -> None:
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "embedding" in name:
                weight.mul_(0.5)
    trainer.strategy.tables_changed()


class Validated(Batches):
    def val_dataloader(self) -> DataLoader:
        return DataLoader([make_batch(self.case, 100 + i, 0) for i in range(3)], batch_size=None)


def fit_with_deltas(
    case: Case,
    pipeline: str,
    folder: str = "",
    *,
    sinks: dict[str | None, Any] | None = None,
    every_n_steps: int = 1,
    num_steps: int = 12,
    sink: dict[str, Any] | None = None,
    deltas: dict[str, Any] | None = None,
    options: dict[str, Any] | None = None,
    callbacks: tuple[Callback, ...] = (),
    ckpt_path: str | None = None,
    saves_in: str | None = None,
    device_type: str = "cpu",
    model: type[Model] = Model,
    data: type[Batches] = Batches,
    **kwargs: Any,
) -> tuple[dict[int, Windows], Windows]:
    """Train with files in a folder or with `sinks` by name; return this rank's tables by step, and in the end."""
    module = model(case)
    if pipeline == "async_lookup":
        options = {"staleness": 2, **(options or {})}
    strategy = make_strategy(module, pipeline, device_type, **(options or {}))
    seen = TablesByStep()
    sinks = sinks or {None: Files(folder, **(sink or {}))}
    senders = [EmbeddingDeltas(one, every_n_steps, name=name, **(deltas or {})) for name, one in sinks.items()]
    found = [*callbacks, *senders, seen]
    if saves_in is not None:
        kwargs["enable_checkpointing"] = True
        found.append(ModelCheckpoint(saves_in, "{step}", every_n_train_steps=4, save_top_k=-1))
    trainer = make_trainer(strategy, device_type, callbacks=found, **kwargs)
    with suppress(SIGTERMException):
        trainer.fit(module, datamodule=data(case, num_steps), ckpt_path=ckpt_path)
    return seen.tables, shards_of(module)


def fit_expecting(error: type[Exception], *args: Any, **kwargs: Any) -> str:
    """Train as above; return what was raised, and how many steps there were."""
    seen = TablesByStep()
    kwargs["callbacks"] = (seen,)
    with pytest.raises(error) as caught:
        fit_with_deltas(*args, **kwargs)
    return f"{caught.value} steps: {len(seen.tables)}"


def fit_warned(*args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """Train as above; return its result, and what was warned of."""
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        found = fit_with_deltas(*args, **kwargs)
    return found, [str(one.message) for one in caught]


def fit_managed(folder: str) -> str:
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
    with mock.patch.object(cuts, "CHUNK_BYTES", 300):
        return fit_with_deltas(*args, **kwargs)


def fit_marking_lookups(*args: Any, **kwargs: Any) -> Any:

    def watch(self: TouchedRows, kernel: int) -> Any:
        def looked_up(module: Any, args: Any, kwargs: Any, answer: Any) -> None:
            if answer.requires_grad:
                self._marks[kernel].add(kwargs["indices"].clone(), kwargs["offsets"], None)
                answer.register_hook(lambda _: self.wait_copied())

        return looked_up

    with mock.patch.object(TouchedRows, "_watch", watch):
        return fit_with_deltas(*args, **kwargs)


def apply_in_order(folder: str | Path) -> dict[tuple[int, int], dict[str, Tensor]]:
    """Apply the whole cuts of a folder in their order, without the package's replicas; return the tables after each."""
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


def stragglers(folder: Path, of_ranks: list[Windows], elsewhere: Path) -> dict[object, object]:
    """Return the replicas, stopped at any cut or begun now, that do not end as the tables."""
    names = parse_names(path.name for path in folder.iterdir())
    wrong: dict[object, object] = {}
    for number, cut in enumerate([(0, 0), *sorted({name.cut for name in names})]):
        sink = elsewhere / str(number)
        sink.mkdir(parents=True)
        replica = Replica(None, sink)
        for some in ([name for name in names if name.cut <= cut], names):
            for name in some:
                shutil.copy(folder / str(name), sink)
            replica.update()
        wrong[cut] = differences(dict(replica.state_dict()), of_ranks)
    return {cut: names for cut, names in wrong.items() if names}
