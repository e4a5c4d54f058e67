"""`EmbeddingDeltas`: updated rows leave for serving while training goes on."""

from __future__ import annotations

import os
import time
import uuid
import warnings
from collections.abc import Callable
from contextlib import suppress
from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ...distributed import Lowest
from ...plugin import OverlapEmbeddingStrategy, logged_step
from ...tables import ShardedStateNames, fused_writes
from ..parts import Header, PartName, encode_pieces, parse_names, read_header
from ..sinks import DeltaSink, resolve_sink
from .cuts import Cut, DenseSource, base_chunks, columns_of_states, merged_rows
from .resume import rows_to_resend
from .touched_rows import TouchedRows
from .writer import CutWriter

FAILED, BUSY, READY = range(3)
"""States of a rank's writer; all ranks act on the lowest one."""

CLOSE_S = 10.0
"""Seconds that the end of a fit that failed waits for a write that is under way."""


class EmbeddingDeltas(Callback):
    """Sends the rows that updates have written to a sink, in cuts that a replica applies to become the trainer's equal.

    A row is marked when its update is made. Every `every_n_steps` all ranks copy their marked rows, overlapped with
    the next forward, and a thread writes them. Where the sink is slow no step waits: fewer cuts are made, each with the
    last values of all rows that were written since the one before. A fit begins with all rows, or, resumed from a
    checkpoint, with those that replicas may have otherwise; training waits for that first part to be written, and for
    the last one at the end of `fit`.

    Args:
        sink: A folder (or fsspec URL), `redis://...`, or a `DeltaSink`.
        every_n_steps: Batches from one cut to the next, if no more than two cuts are still being written by then.
        max_lag_steps: How many batches the newest cut that is written may lag behind the training; None: any number.
        on_lag: If it lags more: `warn` once, or `stop` the training after the step.
        dense: Whether rank 0 sends the dense part with each cut: all parameters and buffers that are not sharded. Where
            a run has begun to, a fit that resumes it does too: replicas would keep the old ones.
        optimizer_state: Whether the fused optimizers' states of the rows are sent, too.
        sink_timeout_s: How long one call of the sink may take, in seconds, a write of at most 64 MB for example; then
            the fit ends on all ranks with an error that names the call. At most half of the strategy's `timeout`.
        name: Name of this callback in checkpoints and logs, if a Trainer has several.

    Raises:
        ValueError: `every_n_steps` is below 1, `max_lag_steps` is below `every_n_steps`, `on_lag` is unknown, or
            `sink_timeout_s` is not above 0.
    """

    reads_tables = False  # between the backward and the step: the order of a step stays as it is
    _trainer: Trainer
    _strategy: OverlapEmbeddingStrategy
    _touched: TouchedRows
    _writer: CutWriter

    def __init__(
        self,
        sink: str | os.PathLike[str] | DeltaSink,
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
            raise ValueError("EmbeddingDeltas takes a folder or a sink to send to (overlap-train: deltas.path=FOLDER).")
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is a number of batches, from 1 on, got {every_n_steps}.")
        if max_lag_steps is not None and max_lag_steps < every_n_steps:
            raise ValueError(
                f"max_lag_steps={max_lag_steps} is below every_n_steps={every_n_steps}: replicas are always that many "
                "batches behind before the next cut."
            )
        if on_lag not in ("warn", "stop"):
            raise ValueError(f"on_lag is one of warn, stop, got {on_lag!r}.")
        if sink_timeout_s <= 0:
            raise ValueError(f"sink_timeout_s is a number of seconds above 0, got {sink_timeout_s}.")
        self._sink = resolve_sink(sink)
        self._every, self._max_lag_steps, self._on_lag = every_n_steps, max_lag_steps, on_lag
        self._sink_timeout_s, self._name = sink_timeout_s, name
        self._sends_dense, self._states = dense, optimizer_state
        self._run_sends_dense = False  # whether replicas have got a dense part of this run
        self._restored: dict[str, Any] | None = None  # the state in the checkpoint that the next fit resumes from
        self._columns: list[tuple[str, str, int, int]] | None = None  # `columns_of_states`; None: no states are sent
        self._acknowledged: tuple[int, int] | None = None  # the newest cut that is known to be written on all ranks
        self.run: str | None = None
        """Identifies the training, over all of its resumes; None before its first fit."""
        self.generation = 0
        """Number of this fit in the run, see `deltas.Header`."""
        self._forget_fit()

    def _forget_fit(self) -> None:
        self._is_sending = self._is_void = self._is_late = False
        self._answer: Lowest | None = None
        self._open: Cut | None = None  # until it is known whether tables were written while it was copied
        self._outstanding: list[Cut] = []
        self._writes = self._num_ended = 0  # calls of the hook since the last cut: at least as many as batches

    @property
    @override
    def state_key(self) -> str:
        own = type(self).__qualname__
        return own if self._name is None else f"{own}[{self._name}]"

    # -- the beginning ------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._restored = self._acknowledged = None  # of an evaluation, or of a fit that never began
        self._trainer = trainer
        if stage == "fit" and not isinstance(trainer.strategy, OverlapEmbeddingStrategy):
            raise ValueError(
                f"EmbeddingDeltas takes OverlapEmbeddingStrategy, which shards the tables, got "
                f"{type(trainer.strategy).__name__}."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, OverlapEmbeddingStrategy)
        restored, self._restored = self._restored, None
        if self._run_sends_dense and not self._sends_dense:
            raise ValueError(
                f"dense=False would leave the dense part of replicas as it is: run {self.run} has sent it so far. "
                "Resume with dense=True, or train without this checkpoint and send to an empty place."
            )
        self._run_sends_dense = self._sends_dense
        self._forget_fit()
        order = strategy.lookup_order
        if order is None:
            raise ValueError(
                f"EmbeddingDeltas has nothing to send: {type(pl_module).__name__} has no TorchRec tables. Take the "
                "callback out."
            )
        self._strategy = strategy
        self._touched = touched = TouchedRows(pl_module, order, strategy.num_pending_updates, states=self._states)
        self._writer = CutWriter(self._sink, min(self._sink_timeout_s, strategy.timeout_s / 2))
        self._is_sending = True
        self._dense = self._dense_source(pl_module, touched)
        shards = [shard for shard, _ in touched.fields] + [shard for shard, *_ in touched.dense]
        shapes = {shard.name: shard.shape for shard in shards}
        of_ranks = strategy.gather((shapes, columns_of_states(touched.fields)))
        self._tables = {name: shape for shapes, _ in of_ranks for name, shape in shapes.items()}
        self._columns = sorted({one for _, columns in of_ranks for one in columns}) if self._states else None
        self._last = self._step  # the step of the newest cut
        self._together(self._writer.check)
        self._begin(restored)
        self._acknowledged = (self.generation, self._step)
        touched.attach()

    @property
    def _step(self) -> int:
        """Batches trained so far."""
        return self._trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def _dense_source(self, module: LightningModule, touched: TouchedRows) -> DenseSource:
        is_first = self._strategy.global_rank == 0
        tables = [(shard, fields) for shard, fields, is_replicated in touched.dense if is_first or not is_replicated]
        tensors: dict[str, Tensor] = {}
        if is_first and self._sends_dense:
            sharded = ShardedStateNames(module)
            tensors = {
                name: value
                for name, value in module.state_dict(keep_vars=True).items()
                if isinstance(value, Tensor) and name not in sharded
            }
        return DenseSource(tensors, tables)

    def _begin(self, restored: dict[str, Any] | None) -> None:
        """Begin a generation with a part of all rows, or of those that replicas may have otherwise."""
        writer = self._writer
        self._fit, now, names = self._ask_first(lambda: (uuid.uuid4().hex, int(time.time()), writer.names()))
        known = parse_names(names)
        if known:
            self._check_run(known[-1])
        self._found = max((name.cut for name in known), default=None)
        self.generation = 1 + max([self.generation, *(name.generation for name in known)])
        if self.run is None:
            self.run = self._fit
        elif not known:  # the sink has lost its parts, and with them the number of the last generation
            self.generation = max(self.generation, now)
        self._writes = self._touched.num_writes
        rows = None
        is_other = restored is None or (restored["writes"], restored.get("columns")) != (self._writes, self._columns)
        if not self._strategy.any_rank(is_other) and restored is not None:
            rows = rows_to_resend(writer, self.run, known, restored, self._tables, self._strategy)
        if rows is None or restored is None:
            self._together(lambda: self._write_base(after_all=True))
        else:
            for table, numbers in rows.items():
                self._touched.mark(table, numbers)
            after = tuple(restored["acknowledged"])
            self._together(lambda: self._write_cut(after))

    def _check_run(self, newest: PartName) -> None:
        """Refuse a sink that has the parts of another training."""
        header: Header = self._ask_first(lambda: read_header(self._writer.read(str(newest)), str(newest)))
        what = "this fit begins a training of its own" if self.run is None else f"this fit is of run {self.run}"
        if header.run != self.run:
            raise ValueError(
                f"{self._sink} holds the parts of run {header.run} (generation {header.generation}, step "
                f"{header.step}), and {what}. Give it an empty place, or resume from a checkpoint of that run "
                "(ckpt_path)."
            )

    # -- errors, on all ranks alike ---------------------------------------------------------------------------------

    def _together(self, do: Callable[[], Any]) -> Any:
        """Return `do()`; if it fails on one rank, raise on all. It must not wait for a rank that may have failed."""
        result, error = None, None
        try:
            result = do()
        except Exception as err:
            error = err
        self._raise_together(error)
        return result

    def _ask_first(self, ask: Callable[[], Any]) -> Any:
        """Return on all ranks what `ask()` returns on rank 0, anything that can be pickled."""
        return self._strategy.gather(self._together(lambda: None if self._strategy.global_rank else ask()))[0]

    def _raise_together(self, error: BaseException | None) -> None:
        said = self._strategy.gather(None if error is None else f"{type(error).__name__}: {error}")
        causes = [f"rank {said.index(cause)}: {cause}" for cause in dict.fromkeys(said) if cause is not None]
        if causes:
            raise RuntimeError(f"embedding deltas cannot be sent. {'; '.join(causes)}") from error

    # -- cuts ---------------------------------------------------------------------------------------------------

    def _header(self, after: tuple[int, int] | None) -> Header:
        assert self.run is not None
        return Header(
            run=self.run,
            generation=self.generation,
            step=self._step,
            after=after,
            rank=self._strategy.global_rank,
            world_size=self._strategy.world_size,
            chunk=0,
            num_chunks=1,
            num_pending=self._touched.num_pending,
            global_step=self._trainer.global_step,
            time=time.time(),
            tables=self._tables,
            fit=self._fit,
            found=self._found,
        )

    def _make_cut(self, after: tuple[int, int] | None) -> Cut:
        copied = self._touched.copy()
        return Cut(self._header(after), copied, self._dense)

    def _write_cut(self, after: tuple[int, int] | None) -> None:
        self._writer.write_now(self._step, self._make_cut(after).chunks())

    def _write_base(self, *, after_all: bool) -> None:
        """Write a base; training waits. With `after_all` all ranks do: then no replica needs the cuts before."""
        self._writer.wait()
        plan = self._touched.begin_base()
        self._dense.forget()
        self._writes = self._touched.num_writes
        self._writer.write_now(self._step, base_chunks(self._header(None), plan, self._dense))
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
            return  # nothing is due, without a look at the trainer's counters
        self._settle()
        if self._answer is not None:
            state, written, is_whole = self._answer()
            self._answer = None
            self._hear(trainer, state, written, is_whole)
            if state == READY and self._step - self._last >= self._every:
                self._cut(is_whole)
                self._num_ended = 0
        if self._step + 1 - self._last >= self._every:
            self._ask()

    def _ask(self) -> None:
        """Ask all ranks whether they can cut and what they have written; the end of the next step reads the answer."""
        writer = self._writer
        writer.look()
        state = FAILED if writer.error is not None else READY if writer.is_ready else BUSY
        self._answer = self._strategy.lowest((state, writer.written_step, not self._is_void))

    def _hear(self, trainer: Trainer, state: int, written: int, is_whole: int) -> None:
        """Act on the ranks' answers: raise errors, note what is written on all ranks, log and check the lag."""
        if state == FAILED:
            self._raise_together(self._writer.error)
        # Replicas apply neither a void cut nor cuts after it before the coming base.
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
        if self._is_late and not was_late:
            self._take_as_late(trainer, behind, waiting)

    def _take_as_late(self, trainer: Trainer, behind: int, waiting: int) -> None:
        """Warn of a lag that has become more than is allowed, or stop the training."""
        goes_on = "Training goes on."
        if self._on_lag == "stop":
            trainer.should_stop, goes_on = True, "Training stops (on_lag='stop')."
        if trainer.is_global_zero:
            warnings.warn(
                f"{self._sink} is {behind} batches behind the training, more than max_lag_steps={self._max_lag_steps}: "
                f"it takes longer to write than {self._every} batches to train. {goes_on} Take a larger every_n_steps "
                f"or a faster sink; {waiting} rows at most wait on this rank.",
                UserWarning,
                stacklevel=2,
            )

    def _cut(self, is_whole: int) -> None:
        """Make a cut, as all ranks do."""
        if not is_whole:
            self._together(lambda: self._write_base(after_all=True))
            self._acknowledged = (self.generation, self._step)
        elif self._touched.num_writes != self._writes:
            with suppress(Exception):  # which the writer keeps: the ranks hear of it together
                self._write_base(after_all=False)
        else:
            self._open = self._make_cut((self.generation, self._last))
            self._outstanding.append(self._open)
        self._last = self._step

    def _settle(self) -> None:
        """Give the last cut to the writer, once it is known whether tables were written while its rows were copied."""
        cut, self._open = self._open, None
        if cut is None:
            return
        if self._touched.settle():
            self._writer.submit(cut.header.step, cut.chunks)
            return
        header = replace(cut.header, is_void=True)
        self._writer.submit(cut.header.step, lambda: [(str(header.name), encode_pieces(header))])
        self._is_void = True  # all ranks send all rows with the next cut

    # -- the end ------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._is_sending and self._strategy.has_stashed_gradients:
            # their steps are made after all hooks, which may save them
            self._strategy.call_at_end(lambda: self._finish(steps=True))
        else:
            self._finish(steps=False)

    def _finish(self, *, steps: bool) -> None:
        """Write what is left of this fit, also if the dense optimizer has made `steps` after the last batch."""
        if not self._is_sending:
            return
        self._strategy.update_tables()
        if self._answer is not None:
            self._answer()
            self._answer = None
        self._settle()
        self._writer.wait()
        self._raise_together(self._writer.error)
        changed = self._touched.num_writes != self._writes
        left = self._step != self._last or bool(self._touched.most) or changed or steps
        is_void = self._strategy.any_rank(self._is_void)
        if self._strategy.any_rank(left) or is_void:
            self._together(lambda: self._write_last(is_base=is_void or changed, after_all=is_void))
        self._acknowledged = (self.generation, self._step)
        self._together(self._writer.close_sink)
        self._end()

    def _write_last(self, *, is_base: bool, after_all: bool) -> None:
        after = (self.generation, self._last)
        if self._step == self._last:
            self.generation += 1  # no two cuts of a generation have the same step
            self._found = after
        if is_base:
            self._write_base(after_all=after_all)
        else:
            self._write_cut(after)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._acknowledged = None  # nobody knows what was left
        self._end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._acknowledged = None  # anybody may write tables from now on
        self._end()

    def _end(self) -> None:
        if self._is_sending:
            self._touched.detach()
            self._writer.close(CLOSE_S)
        self._forget_fit()

    # -- checkpoints --------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training needs to go on sending; all ranks call this when they save a checkpoint."""
        if self.run is None:
            return {}
        state: dict[str, Any] = {"run": self.run, "generation": self.generation, "rows": {}, "whole": []}
        state |= {"columns": self._columns, "dense": self._run_sends_dense}
        acknowledged = self._acknowledged
        if self._is_sending:
            self._strategy.update_tables()
            waiting = [rows for cut in self._outstanding for rows in cut.numbers()]
            mine = merged_rows([self._touched.marked(), *waiting])
            whole = [shard.name for shard, *_ in self._touched.dense]
            is_changed = self._is_void or self._touched.num_writes != self._writes
            of_ranks = self._strategy.gather((mine, whole, is_changed))
            state["rows"] = merged_rows([rows for rows, _, _ in of_ranks])
            state["whole"] = sorted({name for _, names, _ in of_ranks for name in names})
            acknowledged = None if any(changed for _, _, changed in of_ranks) else acknowledged
        return state | {"acknowledged": None if acknowledged is None else list(acknowledged)}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        if not state_dict:
            return
        self.run, self.generation = state_dict["run"], max(self.generation, int(state_dict["generation"]))
        self._run_sends_dense |= state_dict.get("dense", False)
        # how often somebody has written this rank's fused tables, right after they were loaded
        self._restored = state_dict | {"writes": fused_writes(self._trainer.lightning_module)}
