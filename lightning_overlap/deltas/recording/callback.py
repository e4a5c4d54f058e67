"""`EmbeddingDeltas`: streams updated rows to serving during training."""

import os
import time
import uuid
import warnings
from collections.abc import Callable, Iterable, Iterator, Sequence
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ...distributed import Lowest
from ...plugin import OverlapEmbeddingStrategy, logged_step
from ...storage import Store, check_store, close_store
from ...tables import ShardedStateNames, num_fused_writes, sharded_modules
from ...updated_rows import TouchedRows
from ..files import (
    PLAIN,
    SCHEMA,
    WEIGHT,
    Columns,
    FileError,
    FileName,
    Header,
    RawIds,
    as_store,
    decode,
    encode_pieces,
    parse_names,
    read_header,
)
from .cuts import Cut, DenseSource, base_files, columns_of_states, merged_rows
from .raw_ids import IdSource
from .writer import CutWriter

FAILED, BUSY, READY = range(3)  # states of a rank's writer; all ranks act on the lowest state
CLOSE_S = 10.0  # seconds to wait for a running write after a fit fails


class EmbeddingDeltas(Callback):
    """Sends updated rows to a sink, in cuts; a replica that has applied a cut equals the trainer at that step.

    A cut has the rows that were updated since the last cut: all ranks copy them during the next forward, and a thread
    writes them. A slow sink leads to fewer, larger cuts. A fit first sends all rows, or, resumed from a checkpoint, the
    rows that replicas may have with other values. Training waits for this first write, and for the last write.

    Args:
        sink: A folder (or fsspec URL), `redis://...`, or a `Store`.
        every_n_steps: Batches between cuts; longer while two cuts are being written.
        max_lag_steps: Number of batches that the newest written cut may lag behind the training; None: unlimited.
        on_lag: What a larger lag does: `warn` once, or `stop` the training after the step.
        dense: Whether rank 0 sends the dense part with each cut: all parameters and buffers that are not sharded. A fit
            cannot resume a run without it if the run has sent it.
        optimizer_state: Whether to also send the rows' fused optimizer state.
        sink_timeout_s: Seconds that one call of the sink may take, at most half of the strategy's `timeout`; a longer
            call ends the fit on all ranks with an error.
        name: Name of this callback in checkpoints and logs, if a Trainer has several.

    Raises:
        ValueError: An argument is out of its range.
    """

    reads_tables = False  # between the backward and the step, so the order of a step need not change

    def __init__(
        self,
        sink: str | os.PathLike[str] | Store,
        every_n_steps: int = 10,
        max_lag_steps: int | None = None,
        *,
        on_lag: str = "warn",
        dense: bool = True,
        optimizer_state: bool = False,
        sink_timeout_s: float = 300.0,
        name: str | None = None,
    ) -> None:
        if sink is None:
            raise ValueError("EmbeddingDeltas needs a folder or sink, got None (overlap-train: deltas.path=FOLDER).")
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        if max_lag_steps is not None and max_lag_steps < every_n_steps:
            raise ValueError(
                f"max_lag_steps must be at least every_n_steps={every_n_steps}, got {max_lag_steps}: replicas always "
                "lag by every_n_steps before the next cut."
            )
        if on_lag not in ("warn", "stop"):
            raise ValueError(f"on_lag must be 'warn' or 'stop', got {on_lag!r}.")
        if sink_timeout_s <= 0:
            raise ValueError(f"sink_timeout_s must be above 0, got {sink_timeout_s}.")
        self._sink = as_store(sink)
        self._every, self._max_lag_steps, self._on_lag = every_n_steps, max_lag_steps, on_lag
        self._sink_timeout_s, self._name = sink_timeout_s, name
        self._sends_dense, self._states = dense, optimizer_state
        self._run_sends_dense = False  # whether replicas have a dense part of this run
        self._restored: dict[str, Any] | None = None  # from the checkpoint that the next fit resumes from
        self._columns: list[Columns] | None = None  # `columns_of_states`; None: no states are sent
        self._raw_ids: Any = None  # how ids get rows, in tables under managed collisions; None: there are none
        self._acknowledged: tuple[int, int] | None = None  # the newest cut known to be written on all ranks
        self.run: str | None = None
        """Identifies the training, over all of its resumes; None before the first fit."""
        self.generation = 0
        """Generation of the newest cut; every fit begins a new one, and may end with one more."""
        self._forget_fit()

    def _forget_fit(self) -> None:
        self._is_sending = self._is_void = self._is_late = self._is_ending = False
        self._answer: Lowest | None = None
        self._open: Cut | None = None  # the last cut, until `_settle`
        self._outstanding: list[Cut] = []
        self._writes = self._num_ended = 0  # the latter: batches since the last cut, or more

    @property
    @override
    def state_key(self) -> str:
        own = type(self).__qualname__
        return own if self._name is None else f"{own}[{self._name}]"

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restored = self._acknowledged = None  # from an evaluation, or a fit that never began
        self._trainer = trainer
        if stage == "fit" and not isinstance(trainer.strategy, OverlapEmbeddingStrategy):
            raise ValueError(f"EmbeddingDeltas needs OverlapEmbeddingStrategy, got {type(trainer.strategy).__name__}.")

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, OverlapEmbeddingStrategy)
        restored, self._restored = self._restored, None
        if self._run_sends_dense and not self._sends_dense:
            raise ValueError(
                f"run {self.run} has sent the dense part, so dense=False would leave an old dense part in replicas. "
                "Resume with dense=True, or train without this checkpoint and send to an empty sink."
            )
        self._run_sends_dense = self._sends_dense
        self._forget_fit()
        if (access := strategy.table_access) is None:
            raise ValueError(
                f"EmbeddingDeltas has nothing to send: {type(pl_module).__name__} has no TorchRec tables. Remove the "
                "callback."
            )
        self._strategy = strategy
        self._writer = CutWriter(self._sink, min(self._sink_timeout_s, strategy.timeout_s / 2))
        self._touched = touched = TouchedRows(pl_module, access, rank=strategy.global_rank, states=self._states)
        self._is_sending = True
        dense: dict[str, Tensor] = {}
        if self._sends_dense and not strategy.global_rank:
            sharded, state = ShardedStateNames(pl_module), pl_module.state_dict(keep_vars=True)
            dense = {name: value for name, value in state.items() if isinstance(value, Tensor) and name not in sharded}
        self._dense = DenseSource(dense, touched.dense, IdSource(pl_module))
        shapes = {field.shard.name: field.shard.shape for field in (*touched.fields, *touched.dense)}
        of_ranks = strategy.gather((shapes, columns_of_states(touched.fields)))
        self._tables = {name: shape for shapes, _ in of_ranks for name, shape in shapes.items()}
        self._raw_ids = _plain(self._dense.ids.described)
        self._columns = sorted({one for _, columns in of_ranks for one in columns}) if self._states else None
        self._last = self._step  # the step of the newest cut
        self._together(lambda: self._writer.call("check", lambda: check_store(self._sink)))
        self._begin(restored)
        self._acknowledged = (self.generation, self._step)

    @property
    def _step(self) -> int:
        return self._trainer.fit_loop.epoch_loop.total_batch_idx + 1

    @property
    def _place(self) -> tuple[int, int]:
        """The number of epochs that are over, and of batches of the next epoch that are trained."""
        fit_loop: Any = self._trainer.fit_loop
        epochs, batches = fit_loop.epoch_progress.current, fit_loop.epoch_loop.batch_progress
        is_within = epochs.processed < epochs.started
        if is_within and not batches.is_last_batch:
            return epochs.processed, batches.current.ready
        if self._is_ending and epochs.processed and batches.current.ready and not batches.is_last_batch:
            return epochs.processed - 1, batches.current.ready  # Lightning counts an epoch in which training stops
        return epochs.processed + is_within, 0

    def _begin(self, restored: dict[str, Any] | None) -> None:
        """Begin a generation with all rows, or with the rows that replicas may have with other values."""
        found = self._together(lambda: None if self._strategy.global_rank else self._look_into_sink())
        self._fit, now, known, newest = self._strategy.gather(found)[0]
        if newest is not None and newest.run != self.run:
            what = "this fit begins a new run" if self.run is None else f"this fit is of run {self.run}"
            raise ValueError(
                f"{self._sink} has files of run {newest.run} (generation {newest.generation}, step {newest.step}), but "
                f"{what}. Use an empty sink, or resume from a checkpoint of that run (ckpt_path)."
            )
        self._found = known[-1].cut if known else None
        self.generation = 1 + max(self.generation, known[-1].generation if known else 0)
        if self.run is None:
            self.run = self._fit
        elif not known:  # the sink lost its files, and so the number of the last generation
            self.generation = max(self.generation, now)
        self._writes = self._touched.num_writes
        after = self._mark_to_resend(known, restored)
        self._together(lambda: self._write_base(after_all=True) if after is None else self._write_cut(after))

    def _look_into_sink(self) -> tuple[str, int, list[FileName], Header | None]:
        """Return an identifier for this fit, the time, the names of all files, and the newest file's header."""
        known = parse_names(self._writer.call("names", lambda: list(self._sink.names())))
        newest = read_header(self._read(known[-1]), str(known[-1])) if known else None
        return uuid.uuid4().hex, int(time.time()), known, newest

    def _mark_to_resend(self, known: Sequence[FileName], restored: dict[str, Any] | None) -> tuple[int, int] | None:
        """Mark the rows that replicas may have with other values than at the returned cut; None if unknown."""
        now = self._touched.num_weight_writes, self._columns, self._raw_ids
        is_other = restored is None or tuple(map(restored.get, ("writes", "columns", "raw_ids"))) != now
        if self._strategy.any_rank(is_other) or restored is None:
            return None
        acknowledged = restored["acknowledged"] and tuple(restored["acknowledged"])
        if all(name.cut != acknowledged for name in known):
            return None  # without that cut in the sink, it is unknown what replicas have applied since
        since = [name for name in known if name.cut > acknowledged]
        found: dict[str, Tensor] | None = None
        with suppress(Exception):  # then all rows are written
            found = merged_rows(self._sent_rows(since[self._strategy.global_rank :: self._strategy.world_size]))
        of_ranks = self._strategy.gather(found)
        if any(rows is None for rows in of_ranks):
            return None
        whole = {name: torch.arange(self._tables[name][0]) for name in restored["whole"] if name in self._tables}
        for table, numbers in merged_rows([restored["rows"], whole, *of_ranks]).items():
            self._touched.mark(table, numbers)
        return acknowledged

    def _sent_rows(self, names: Iterable[FileName]) -> Iterator[dict[str, Tensor]]:
        for name in names:
            file = decode(self._read(name), str(name))
            if file.header.run != self.run:
                raise FileError(f"{name} is of another run")
            yield from ({rows.table: rows.rows} for rows in file.rows if rows.field == WEIGHT)

    def _read(self, name: FileName) -> bytes:
        return self._writer.call(f"read of {name}", lambda: self._sink.read(str(name)))

    def _together(self, do: Callable[[], Any], error: BaseException | None = None) -> Any:
        """Return `do()`; if it fails or there is an `error` on a rank, raise on all. `do` must not wait for others."""
        result = None
        try:
            result = do()
        except Exception as err:
            error = err
        errors = self._strategy.gather(None if error is None else f"{type(error).__name__}: {error}")
        if causes := [f"rank {errors.index(cause)}: {cause}" for cause in dict.fromkeys(errors) if cause is not None]:
            raise RuntimeError(f"embedding deltas cannot be sent. {'; '.join(causes)}") from error
        return result

    def _header(self, after: tuple[int, int] | None) -> Header:
        assert self.run is not None
        epoch, batch = self._place
        return Header(
            run=self.run,
            generation=self.generation,
            step=self._step,
            after=after,
            rank=self._strategy.global_rank,
            world_size=self._strategy.world_size,
            chunk=0,
            num_chunks=1,
            num_pending=self._strategy.num_pending_updates(),
            global_step=self._trainer.global_step,
            time=time.time(),
            tables=self._tables,
            fit=self._fit,
            found=self._found,
            epoch=epoch,
            batch=batch,
            row_wise=self._columns,
            raw_ids=self._dense.ids.described,
            schema=PLAIN if self._dense.ids.described is None else SCHEMA,
        )

    @property
    def _is_rewritten(self) -> bool:
        """Whether tables were written other than by their backward since the last base."""
        return self._touched.num_writes != self._writes

    def _make_cut(self, after: tuple[int, int]) -> Cut:
        with self._strategy.trained_weights():
            return Cut(self._header(after), self._touched.copy(), self._dense)

    def _write_cut(self, after: tuple[int, int]) -> None:
        self._writer.write_now(self._step, self._make_cut(after).files())

    def _write_base(self, *, after_all: bool) -> None:
        """Write a base while training waits. With `after_all` all ranks do; then no replica needs earlier cuts."""
        self._writer.wait()
        self._touched.begin_base()
        self._dense.forget()
        self._writes = self._touched.num_writes
        with self._strategy.trained_weights():
            self._writer.write_now(self._step, base_files(self._header(None), self._touched.fields, self._dense))
        if after_all:
            self._outstanding.clear()
            self._is_void = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._num_ended += 1
        if not self._is_sending:
            return
        if self._num_ended + 1 < self._every and self._answer is None and self._open is None:
            return  # nothing is due; skips the trainer's counters
        self._settle()
        if self._answer is not None:
            state, written, is_whole = self._answer()
            self._answer = None
            self._read_result(trainer, state, written, is_whole)
            if state == READY and self._step - self._last >= self._every:
                self._cut(is_whole)
        if self._step + 1 - self._last >= self._every:  # poll all ranks; the next step's end reads the result
            writer = self._writer
            writer.look()
            state = FAILED if writer.error is not None else READY if writer.is_ready else BUSY
            self._answer = self._strategy.lowest((state, writer.written_step, not self._is_void))

    def _read_result(self, trainer: Trainer, state: int, written: int, is_whole: int) -> None:
        """Act on the ranks' results: raise errors, note the cuts written on all ranks, log and check the lag."""
        if state == FAILED:
            self._together(lambda: None, self._writer.error)
        # Replicas apply neither a void cut nor the cuts between it and the next base.
        if is_whole and written >= 0:
            self._acknowledged = (self.generation, written)
            self._outstanding = [cut for cut in self._outstanding if cut.header.step > written]
        behind, waiting = self._step - written, self._touched.most
        values = {"steps_behind": behind, "rows_waiting": waiting, "bytes": self._writer.num_bytes}
        prefix = "deltas" if self._name is None else f"deltas/{self._name}"
        for logger in trainer.loggers:
            metrics = {f"{prefix}/{what}": float(value) for what, value in values.items()}
            logger.log_metrics(metrics, step=logged_step(trainer))
        was_late, self._is_late = self._is_late, self._max_lag_steps is not None and behind > self._max_lag_steps
        if was_late or not self._is_late:
            return
        goes_on = "Training continues."
        if self._on_lag == "stop":
            trainer.should_stop, goes_on = True, "Training stops (on_lag='stop')."
        if trainer.is_global_zero:
            warnings.warn(
                f"{self._sink} is {behind} batches behind the training, more than max_lag_steps={self._max_lag_steps}: "
                f"writing a cut takes longer than training {self._every} batches. {goes_on} Use a larger every_n_steps "
                f"or a faster sink. Up to {waiting} rows are waiting on this rank.",
                stacklevel=2,
            )

    def _cut(self, is_whole: int) -> None:
        if not is_whole:
            self._together(lambda: self._write_base(after_all=True))
            self._acknowledged = (self.generation, self._step)
        elif self._is_rewritten:
            with suppress(Exception):  # the writer keeps the error; all ranks get it together
                self._write_base(after_all=False)
        else:
            self._open = self._make_cut((self.generation, self._last))
            self._outstanding.append(self._open)
        self._last, self._num_ended = self._step, 0

    def _settle(self) -> None:
        """Give the last cut to the writer; mark it as void if tables were written while its rows were copied."""
        cut, self._open = self._open, None
        if cut is not None and self._touched.settle():
            self._writer.submit(cut.header.step, cut.files)
        elif cut is not None:
            header = replace(cut.header, is_void=True)
            self._writer.submit(header.step, lambda: [(str(header.name), encode_pieces(header))])
            self._is_void = True  # all ranks send all rows with the next cut

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self._is_sending:
            return
        self._is_ending = True
        self._strategy.update_tables()
        if self._answer is not None:
            self._answer()
        self._settle()
        self._writer.wait()
        self._together(lambda: None, self._writer.error)
        changed = self._is_rewritten
        left = self._step != self._last or bool(self._touched.most) or changed or self._dense.ids.is_changed
        is_void = self._strategy.any_rank(self._is_void)
        if self._strategy.any_rank(left) or is_void:
            after = (self.generation, self._last)
            if self._step == self._last:
                self.generation += 1  # the cuts of a generation have different steps
                self._found = after
            is_base = is_void or changed
            self._together(lambda: self._write_base(after_all=is_void) if is_base else self._write_cut(after))
        self._together(lambda: self._writer.call("close", lambda: close_store(self._sink)))
        self._end()
        self._acknowledged = (self.generation, self._step)

    def _end(self, *_: Any, **__: Any) -> None:
        if self._is_sending:
            self._touched.detach()
            self._writer.close(CLOSE_S)
        self._acknowledged = None  # tables may change from now on
        self._forget_fit()

    on_exception = teardown = _end

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return the state that a resumed training needs to continue sending; all ranks call this."""
        if self.run is None:
            return {}
        acknowledged, rows, whole = self._acknowledged, {}, set()
        if self._is_sending:
            self._strategy.update_tables()
            waiting = [numbers for cut in self._outstanding for numbers in cut.numbers()]
            mine = merged_rows([*self._touched.marked(), *waiting])
            own = [field.shard.name for field in self._touched.dense]
            of_ranks = self._strategy.gather((mine, own, self._is_void or self._is_rewritten))
            rows = merged_rows([rows for rows, _, _ in of_ranks])
            whole = {name for _, names, _ in of_ranks for name in names}
            acknowledged = None if any(changed for _, _, changed in of_ranks) else acknowledged
        if acknowledged is not None and self._strategy.saves_averages:
            acknowledged = None  # a fit that resumes from averages has other rows than all replicas
        return {
            "run": self.run,
            "generation": self.generation,
            "rows": rows,
            "whole": sorted(whole),
            "columns": self._columns,
            "raw_ids": self._raw_ids,
            "dense": self._run_sends_dense,
            "acknowledged": None if acknowledged is None else list(acknowledged),
        }

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        self.run, self.generation = state_dict["run"], max(self.generation, int(state_dict["generation"]))
        self._run_sends_dense |= state_dict.get("dense", False)
        # the count of writes to this rank's fused tables, right after they were loaded
        modules = sharded_modules(self._trainer.lightning_module).values()
        self._restored = state_dict | {"writes": sum(sum(num_fused_writes(module)) for module in modules)}


def _plain(raw_ids: dict[str, RawIds] | None) -> dict[str, dict[str, Any]] | None:
    """Return what checkpoints can hold and compare."""
    return None if raw_ids is None else {table: dict(vars(one)) for table, one in raw_ids.items()}


def state_after(header: Header, *, sends_dense: bool) -> dict[str, Any]:
    """Return the `state_dict` of an `EmbeddingDeltas` whose run has nothing to send beside the cut of a header."""
    return {
        "run": header.run,
        "generation": header.generation,
        "rows": {},
        "whole": [],
        "columns": header.row_wise,
        "raw_ids": _plain(header.raw_ids),
        "dense": sends_dense,
        "acknowledged": [header.generation, header.step],
    }
