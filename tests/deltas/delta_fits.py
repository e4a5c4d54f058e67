"""Functions that ranks run: fits whose updated rows are sent, with what the tables were after every step."""

import time
from collections.abc import Callable, Iterable, Sequence
from contextlib import suppress
from itertools import groupby
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torchrec.distributed.types import ShardedTensor

from lightning_overlap import EmbeddingDeltas
from lightning_overlap.deltas import FileName, Replica, parse_names
from lightning_overlap.storage import Piece, joined

from ..support.cases import Batches, Case, Model
from ..support.fits import make_strategy, make_trainer
from .histories import CutId, MemorySink

Windows = dict[tuple[str, int, int], Tensor]  # a rank's shards: table, first row, first column -> values
Fit = tuple[dict[int, Windows], Windows]  # a rank's tables after each step of a fit, and in the end


class Files:
    """The plainest sink: a folder; from step `fails_at` on the last rank raises `error` in each write."""

    def __init__(self, folder: str, delay_s: float = 0, fails_at: int | None = None, error: Any = OSError) -> None:
        self.folder, self.delay_s, self.fails_at, self.error = Path(folder), delay_s, fails_at, error

    def __str__(self) -> str:
        return f"Files({self.folder.name})"

    def put(self, name: str, pieces: Sequence[Piece]) -> None:
        found = FileName.parse(name)
        assert found is not None
        if self.fails_at is not None and found.step >= self.fails_at and found.rank == found.world_size - 1:
            raise self.error("no space left")
        time.sleep(self.delay_s)
        self.folder.mkdir(exist_ok=True)
        (self.folder / f".{name}").write_bytes(joined(pieces))
        (self.folder / f".{name}").rename(self.folder / name)

    def names(self) -> Iterable[str]:
        return [path.name for path in self.folder.glob("g*.arrow")]

    def read(self, name: str) -> bytes:
        return (self.folder / name).read_bytes()

    def remove(self, names: Iterable[str]) -> None:
        for name in names:
            (self.folder / name).unlink(missing_ok=True)


def shards_of(module: LightningModule) -> Windows:
    """Return this rank's shards as they are now; data-parallel tables as a whole."""
    found: Windows = {}
    for name, value in module.state_dict().items():
        if isinstance(value, ShardedTensor):
            if value.dim() != 2:
                continue  # a buffer of managed collisions
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


def halve(trainer: Trainer, module: LightningModule) -> None:
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "embedding" in name:
                weight.mul_(0.5)
    trainer.strategy.tables_changed()


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
    callbacks: Sequence[Callback] = (),
    after: Sequence[Callback] = (),
    ckpt_path: str | None = None,
    saves_in: str | None = None,
    device_type: str = "cpu",
    model: type[Model] = Model,
    data: type[Batches] = Batches,
    **kwargs: Any,
) -> Fit:
    """Train with files in a folder or with `sinks` by name; return this rank's tables by step, and in the end.

    `callbacks` go before those that send, `after` behind them.
    """
    module = model(case)
    if pipeline == "async_lookup":
        options = {"staleness": 2, **(options or {})}
    strategy = make_strategy(module, pipeline, device_type, **(options or {}))
    seen = TablesByStep()
    sinks = sinks or {None: Files(folder, **(sink or {}))}
    senders = [EmbeddingDeltas(one, every_n_steps, name=name, **(deltas or {})) for name, one in sinks.items()]
    found = [*callbacks, *senders, *after, seen]
    if saves_in is not None:
        kwargs["enable_checkpointing"] = True
        found.append(ModelCheckpoint(saves_in, "{step}", every_n_train_steps=4, save_top_k=-1))
    trainer = make_trainer(strategy, device_type, callbacks=found, **kwargs)
    with suppress(SIGTERMException):
        trainer.fit(module, datamodule=data(case, num_steps), ckpt_path=ckpt_path)
    return seen.tables, shards_of(module)


def fit_expecting(error: type[Exception], *args: Any, **kwargs: Any) -> tuple[str, dict[int, Windows]]:
    """Train as above; return what was raised, and this rank's tables by step."""
    seen = TablesByStep()
    with pytest.raises(error) as caught:
        fit_with_deltas(*args, after=(seen,), **kwargs)
    return str(caught.value), seen.tables


def apply_in_order(folder: str | Path) -> dict[CutId, dict[str, Tensor]]:
    """Let a replica follow the cuts of a folder one by one; return its tables after each cut that it applied."""
    sink, after = MemorySink(), {}
    replica = Replica(None, sink)
    for cut, names in groupby(parse_names(path.name for path in Path(folder).iterdir()), key=lambda name: name.cut):
        sink.files |= {str(name): Path(folder, str(name)).read_bytes() for name in names}
        replica.update()
        if replica.position is not None and replica.position.cut == cut:
            after[cut] = {name: table.clone() for name, table in replica.state_dict().items()}
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


def stragglers(folder: Path, of_ranks: list[Windows]) -> dict[object, object]:
    """Return the replicas, stopped at any cut or begun now, that do not end as the tables."""
    files = {name: (folder / str(name)).read_bytes() for name in parse_names(path.name for path in folder.iterdir())}
    wrong: dict[object, object] = {}
    for cut in [(0, 0), *sorted({name.cut for name in files})]:
        sink = MemorySink()
        replica = Replica(None, sink)
        for last in (cut, max(files).cut):
            sink.files |= {str(name): file for name, file in files.items() if name.cut <= last}
            replica.update()
        wrong[cut] = differences(replica.state_dict(), of_ranks)
    return {cut: names for cut, names in wrong.items() if names}
