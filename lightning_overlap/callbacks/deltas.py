"""`EmbeddingDeltas`: updated rows leave for serving while training goes on."""

from __future__ import annotations

import os
import time
import uuid
import warnings
from contextlib import suppress
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ..deltas import (
    CutWriter,
    DeltaSink,
    Header,
    PartName,
    check_sink,
    parse_names,
    read_header,
    resolve_sink,
    rows_in,
    written_since,
)
from ..distributed import Lowest
from ..plugin import OverlapEmbeddingStrategy, logged_step
from ..tables import sharded_state_names
from ..tracking import TouchedRows
from .cuts import Cut, DenseSource, base_chunks, merged_rows

FAILED, BUSY, READY = range(3)
"""What a rank says of its writer; the lowest of all ranks counts."""

CLOSE_S = 10.0
"""How long the end of a fit that failed waits for a write that is under way."""

ON_LAG = ("warn", "stop")


class EmbeddingDeltas(Callback):
    """Sends the rows that updates have written to a sink, in cuts that a replica applies to become the trainer's equal.

    A row is marked when its update is made. Every `every_n_steps` all ranks copy their marked rows, overlapped with
    the next forward, and a thread writes them. Where the sink is slow no step waits: fewer cuts are made, each with the
    last values of all rows that were written since the one before. A fit begins with all rows, or, resumed from a
    checkpoint, with those that replicas may have otherwise; training waits for that first part to be written, and for
    the last one at the end of `fit`.

    Args:
        sink: A folder (or fsspec URL), `redis://...`, or a `DeltaSink`.
        every_n_steps: Cut once in so many batches, if the one before has left.
        max_lag_steps: How many batches replicas may be behind, by what has been written; None: any number.
        on_lag: Past that, `warn` once, or `stop` the training after the step.
        dense: Whether rank 0 sends the dense part with each cut: all parameters and buffers that are not sharded.
        optimizer_state: Whether rows take the state of their fused optimizer with them.

    Raises:
        ValueError: A number of steps below 1, a `max_lag_steps` below `every_n_steps`, or an unknown `on_lag`.
    """

    reads_tables = False  # between the backward and the step: the order of a step stays as it is

    def __init__(
        self,
        sink: str | os.PathLike[str] | DeltaSink,
        every_n_steps: int = 10,
        max_lag_steps: int | None = None,
        *,
        on_lag: str = "warn",
        dense: bool = True,
        optimizer_state: bool = False,
    ) -> None:
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps is a number of batches, from 1 on, got {every_n_steps}.")
        if max_lag_steps is not None and max_lag_steps < every_n_steps:
            raise ValueError(
                f"max_lag_steps={max_lag_steps} is below every_n_steps={every_n_steps}: replicas are always that many "
                "batches behind before the next cut."
            )
        if on_lag not in ON_LAG:
            raise ValueError(f"on_lag is one of {', '.join(ON_LAG)}, got {on_lag!r}.")
        self._sink = resolve_sink(sink)
        self._every, self._max_lag, self._on_lag = every_n_steps, max_lag_steps, on_lag
        self._sends_dense, self._states = dense, optimizer_state
        self._restored: dict[str, Any] | None = None
        self.run: str | None = None
        """Identifies the training, over all of its resumes; None before its first fit."""
        self.generation = 0
        """Of this fit."""
        self._forget_fit()

    def _forget_fit(self) -> None:
        self._touched: TouchedRows | None = None
        self._writer: CutWriter | None = None
        self._trainer: Trainer | None = None
        self._answer: Lowest | None = None
        self._open: Cut | None = None  # until it is known whether tables were written while it was copied
        self._outstanding: list[Cut] = []
        self._is_void = False
        self._is_late = False
        self._writes: tuple[int, ...] = ()

    # -- the beginning ------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        if stage == "fit" and not isinstance(trainer.strategy, OverlapEmbeddingStrategy):
            raise ValueError(
                f"EmbeddingDeltas takes OverlapEmbeddingStrategy, which shards the tables, got "
                f"{type(trainer.strategy).__name__}."
            )

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        strategy = trainer.strategy
        assert isinstance(strategy, OverlapEmbeddingStrategy)
        self._forget_fit()
        touched = strategy.touched_rows(states=self._states)
        if touched is None:
            raise ValueError(
                f"EmbeddingDeltas has nothing to send: {type(pl_module).__name__} has no TorchRec tables. Take the "
                "callback out."
            )
        self._trainer, self._strategy, self._touched = trainer, strategy, touched
        self._writer = CutWriter(self._sink)
        shards = [*touched.shards, *(shard for shard, _ in touched.dense)]
        of_ranks = strategy.gather({shard.name: shard.shape for shard in shards})
        self._tables = {name: shape for of_rank in of_ranks for name, shape in of_rank.items()}
        self._dense = self._dense_source(pl_module, touched)
        self._last = self._step  # the step of the newest cut
        self._together(lambda: check_sink(self._sink))
        self._together(self._begin)
        touched.attach()

    @property
    def _step(self) -> int:
        """Batches trained so far."""
        assert self._trainer is not None
        return self._trainer.fit_loop.epoch_loop.total_batch_idx + 1

    def _dense_source(self, module: LightningModule, touched: TouchedRows) -> DenseSource:
        of_shards = zip(touched.dense, touched.dense_states, strict=True)
        tables = [
            (shard, states) for (shard, is_replicated), states in of_shards if self._is_first or not is_replicated
        ]
        tensors: dict[str, Tensor] = {}
        if self._is_first and self._sends_dense:
            sharded = sharded_state_names(module)
            tensors = {
                name: value
                for name, value in module.state_dict(keep_vars=True).items()
                if isinstance(value, Tensor) and name not in sharded
            }
        return DenseSource(tensors, tables)

    @property
    def _is_first(self) -> bool:
        return self._strategy.global_rank == 0

    def _together(self, do: Any) -> None:
        """Do something on all ranks; if it fails on one, it fails on all, with the cause."""
        error: BaseException | None = None
        try:
            do()
        except Exception as err:
            error = err
        self._raise_together(error)

    def _raise_together(self, error: BaseException | None) -> None:
        said = self._strategy.gather(None if error is None else f"{type(error).__name__}: {error}")
        if isinstance(error, ValueError) and len(set(said)) == 1:
            raise error
        causes = [f"rank {rank}: {cause}" for rank, cause in enumerate(said) if cause is not None]
        if causes:
            raise RuntimeError(f"embedding deltas cannot be sent. {'; '.join(causes)}") from error

    def _begin(self) -> None:
        """Begin a generation with a part of all rows, or of those that replicas may have otherwise."""
        assert self._touched is not None
        names = self._on_first(lambda: [str(name) for name in parse_names(self._sink.names())])
        known = parse_names(names)
        restored, self._restored = self._restored, None
        self.run = self.run if restored is None else restored["run"]
        self._check_run(known)
        if self.run is None:
            self.run = self._on_first(lambda: uuid.uuid4().hex)
        written = max((name.generation for name in known), default=0)
        self.generation = 1 + max(written, self.generation, 0 if restored is None else restored["generation"])
        acknowledged = None if restored is None else restored["acknowledged"]
        self._acknowledged = None if acknowledged is None else (int(acknowledged[0]), int(acknowledged[1]))
        rows = self._rows_to_resend(known, restored)
        self._writes = self._touched.num_writes
        if rows is None:
            self._write_base(after_all=True)
        else:
            for table, numbers in rows.items():
                self._touched.mark(table, numbers)
            cut = self._make_cut(self._acknowledged)
            self._write_now(cut)
        self._last = self._step

    def _on_first(self, ask: Any) -> Any:
        """Return what rank 0 finds out; if it fails, all do."""
        found: Any = None
        error: Exception | None = None
        if self._is_first:
            try:
                found = ask()
            except Exception as err:
                error = err
        found, said = self._strategy.gather((found, None if error is None else f"{type(error).__name__}: {error}"))[0]
        if said is not None:
            raise RuntimeError(said) from error
        return found

    def _check_run(self, known: list[PartName]) -> None:
        """Refuse a sink that has the parts of another training."""
        if not known:
            return
        newest = known[-1]
        header: Header = self._on_first(lambda: read_header(self._sink.read(str(newest)), str(newest)))
        if header.run == self.run:
            return
        what = "this fit begins a training of its own" if self.run is None else f"this fit is of run {self.run}"
        raise ValueError(
            f"{self._sink} holds the parts of run {header.run} (generation {header.generation}, step "
            f"{header.step}), and {what}. Give it an empty place, or resume from a checkpoint of that run (ckpt_path)."
        )

    def _rows_to_resend(self, known: list[PartName], restored: dict[str, Any] | None) -> dict[str, Tensor] | None:
        """Return the rows that replicas may have otherwise than the tables are now; None: any rows."""
        if restored is None:
            return None
        saved = (int(restored["generation"]), int(restored["step"]))
        since = written_since(known, saved, self._acknowledged)
        found: dict[str, Tensor] | None = None
        if since is not None:
            size = self._strategy.world_size
            assert self.run is not None
            with suppress(Exception):  # whoever cannot read a sink may still write all rows, or say why not
                found = rows_in(self._sink, since[self._strategy.global_rank :: size], self.run)
        of_ranks = self._strategy.gather(found)
        if any(rows is None for rows in of_ranks):
            return None
        return merged_rows([restored["rows"], *of_ranks])

    # -- cuts ---------------------------------------------------------------------------------------------------

    def _header(self, after: tuple[int, int] | None) -> Header:
        assert self._touched is not None
        assert self._trainer is not None
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
        )

    def _make_cut(self, after: tuple[int, int] | None) -> Cut:
        assert self._touched is not None
        copied = self._touched.copy()
        return Cut(self._header(after), self._touched.shards, copied, self._dense.copy(), self._dense)

    def _write_now(self, cut: Cut) -> None:
        assert self._writer is not None
        self._writer.write_now(cut.step, cut.chunks())

    def _write_base(self, *, after_all: bool) -> None:
        """Write all rows of this rank; training waits for it.

        Args:
            after_all: Whether all ranks do, so that replicas need nothing that was written before.
        """
        touched, writer = self._touched, self._writer
        assert touched is not None
        assert writer is not None
        writer.wait()
        touched.begin_base()
        self._dense.forget()
        self._writes = touched.num_writes
        chunks = base_chunks(self._header(None), touched.shards, touched.plan_of_all_rows(), touched.read, self._dense)
        writer.write_now(self._step, chunks)
        if after_all:
            self._outstanding.clear()
            self._is_void = False

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._touched is None:
            return
        self._settle()
        if self._answer is not None:
            state, written, is_whole = self._answer.wait()
            self._answer = None
            self._hear(trainer, state, written)
            if state == READY and self._is_due(self._step):
                self._cut(is_whole=bool(is_whole))
        if self._is_due(self._step + 1):
            self._ask()

    def _is_due(self, step: int) -> bool:
        return step - self._last >= self._every

    def _ask(self) -> None:
        """Ask all ranks, for the next step's end, whether they can cut, and what they have written."""
        writer = self._writer
        assert writer is not None
        state = FAILED if writer.error is not None else READY if writer.is_ready else BUSY
        self._answer = self._strategy.lowest((state, writer.written_step, not self._is_void))

    def _hear(self, trainer: Trainer, state: int, written: int) -> None:
        assert self._writer is not None
        if state == FAILED:
            self._raise_together(self._writer.error)
        self._acknowledge(written)
        behind = self._step - written
        for logger in trainer.loggers:
            values = {"deltas/steps_behind": float(behind), "deltas/bytes": float(self._writer.num_bytes)}
            logger.log_metrics(values, step=logged_step(trainer))
        if self._max_lag is None or behind <= self._max_lag:
            self._is_late = False
        elif not self._is_late:
            self._is_late = True
            self._say_late(trainer, behind)

    def _say_late(self, trainer: Trainer, behind: int) -> None:
        assert self._touched is not None
        if self._on_lag == "stop":
            trainer.should_stop = True
        if self._is_first:
            stops = "Training stops (on_lag='stop')." if self._on_lag == "stop" else "Training goes on."
            warnings.warn(
                f"{self._sink} is {behind} batches behind the training, more than max_lag_steps="
                f"{self._max_lag}: it takes longer to write than {self._every} batches to train. {stops} Take a larger "
                f"every_n_steps or a faster sink; {self._touched.most} rows at most wait on this rank.",
                UserWarning,
                stacklevel=2,
            )

    def _acknowledge(self, written: int) -> None:
        """Forget the cuts that all ranks have written."""
        if written >= 0:
            self._acknowledged = (self.generation, written)
            self._outstanding = [cut for cut in self._outstanding if cut.step > written]

    def _cut(self, *, is_whole: bool) -> None:
        """Make a cut, as all ranks do."""
        touched, after = self._touched, (self.generation, self._last)
        assert touched is not None
        if not is_whole:
            self._together(lambda: self._write_base(after_all=True))
        elif touched.num_writes != self._writes:
            with suppress(Exception):  # which the writer keeps: the ranks hear of it together
                self._write_base(after_all=False)
        else:
            self._open = self._make_cut(after)
            self._outstanding.append(self._open)
        self._last = self._step

    def _settle(self) -> None:
        """Hand the last cut to the writer, once nothing can go wrong with its copy any more."""
        cut, self._open = self._open, None
        if cut is None:
            return
        assert self._touched is not None
        assert self._writer is not None
        if self._touched.settle():
            self._writer.submit(cut.step, cut.chunks)
        else:
            self._is_void = True  # all ranks begin anew with the next one; this one is never whole

    # -- the end ------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._touched is None or self._writer is None:
            return
        self._strategy.update_tables()
        if self._answer is not None:
            self._answer.wait()
            self._answer = None
        self._settle()
        self._writer.wait()
        self._raise_together(self._writer.error)
        changed = self._touched.num_writes != self._writes
        left = self._step != self._last or bool(self._touched.most) or changed
        is_void = self._strategy.any_rank(self._is_void) or self._is_void
        if self._strategy.any_rank(left) or left or is_void:
            self._together(lambda: self._write_last(is_base=is_void or changed, after_all=is_void))
        self._acknowledged = (self.generation, self._step)
        self._end()

    def _write_last(self, *, is_base: bool, after_all: bool) -> None:
        after = (self.generation, self._last)
        if self._step == self._last:
            self.generation += 1  # no two cuts of a generation have the same step
        if is_base:
            self._write_base(after_all=after_all)
        else:
            self._write_now(self._make_cut(after))

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        self._end()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self._end()

    def _end(self) -> None:
        if self._touched is not None:
            self._touched.detach()
        if self._writer is not None:
            self._writer.close(CLOSE_S)
        self._forget_fit()

    # -- checkpoints --------------------------------------------------------------------------------------------

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return what a resumed training has to know; all ranks call this, as they do to save a checkpoint."""
        if self.run is None:
            return {}
        state: dict[str, Any] = {"run": self.run, "generation": self.generation, "rows": {}}
        state["acknowledged"] = None if self._acknowledged is None else list(self._acknowledged)
        if self._touched is None:
            return state | {"step": 0 if self._acknowledged is None else self._acknowledged[1]}
        self._strategy.update_tables()
        waiting = [entry for cut in self._outstanding for entry in cut.rows()]
        mine = [self._touched.marked(), *({entry.table: entry.rows} for entry in waiting)]
        return state | {"step": self._step, "rows": merged_rows(self._strategy.gather(merged_rows(mine)))}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        self._restored = dict(state_dict) or None
