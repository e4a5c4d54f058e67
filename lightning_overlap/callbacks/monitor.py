"""`OverlapMonitor`: logs how much of the lookup and of the communication was hidden."""

import math
import time
from collections.abc import Iterable, Iterator, Mapping
from contextlib import ExitStack
from statistics import fmean
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from typing_extensions import override

from .. import profiling
from ..balance import Balanced
from ..plugin import logged_step
from ..profiling import Breakdown, HostSync, report
from ..schedules import Schedule
from ..sparse import StaleCounts, StaleRows
from .recording import Recording, join, watched_strategy
from .timeline import OverlapTimeline

NUM_WATCHED = 2  # steps per measurement: the first step issues what the second step uses
WARM_UP = 3  # steps before the first measurement: the schedule fills, allocators and caches warm up
MAX_COST = 0.005  # share of the time that measuring may take, unless the user sets `every_n_steps`
KEPT = 25  # then ids are kept, to count stale rows, in at most one of this many steps


class OverlapMonitor(Callback):
    """Measures occasional steps: hidden and exposed time by stage, what limits the step, which rank is slowest.

    *Hidden* is time of a stage that the mode overlaps with other work. Overlap that `base` has as well (for example by
    autograd's order) does not count. The steps that an `OverlapTimeline` draws are also measured. Measuring makes no
    host-device syncs. Bytes that a stage sends to other ranks are counted, and those that `quantized_comms` saves, but
    not those of DistributedDataParallel. The values go to every logger and, as `hidden`, to the progress bar; in a
    stale mode also the share of looked-up rows with a pending update (`overlap/stale_rows/<table>`), and with `balance`
    the ranks' costs before and after (`overlap/cost_before/rank_0`, `overlap/heaviest_after`). The end of `fit`
    prints a table and a line of advice.

    Args:
        every_n_steps: Measure, and count stale rows, in one step in this many. None: measure as often as the Trainer
            logs, or less often, so that it takes less than 0.5 % of the time; count stale rows every
            25 * (`staleness` + 1) steps, or less often if the Trainer logs less often.
        audit: Count the host-device syncs of one step, with stage and source line. That step is slow.
        table: Print the closing table.

    Raises:
        ValueError: `every_n_steps` is not larger than the two steps that a measurement takes.
    """

    def __init__(self, every_n_steps: int | None = None, *, audit: bool = True, table: bool = True) -> None:
        if every_n_steps is not None and every_n_steps <= NUM_WATCHED:
            raise ValueError(
                f"every_n_steps must be more than {NUM_WATCHED}, because a measurement takes {NUM_WATCHED} steps, "
                f"got {every_n_steps}."
            )
        self._every_n_steps = every_n_steps
        self._audit_wanted = audit
        self._table = table
        self._reset()

    def _reset(self) -> None:
        self._measured: dict[Schedule, list[Breakdown]] = {}  # by mode, the one measured last at the end
        self.syncs: list[HostSync] | None = None  # host syncs of the audited step; None before the audit
        self.stale_rows: dict[str, tuple[int, int]] = {}  # table -> stale rows read and rows read, over all ranks
        self.own_ms = 0.0  # time that this callback took
        self._stale: _StaleSteps | None = None
        self._num_steps = 0
        self._next = WARM_UP  # the step with which the next recording starts
        self._recording: Recording | None = None
        self._wanted: set[int] = set()  # numbers of the steps to measure
        self._timelines: list[OverlapTimeline] = []
        # Recordings with step, step of the loggers, batches in flight, and what balancing did to the batch.
        self._pending: list[tuple[Recording, int, int, int, Balanced | None]] = []
        self._audit: ExitStack | None = None

    @property
    def accounts(self) -> list[Breakdown]:
        """A breakdown per measured step of the mode measured last."""
        return next(reversed(self._measured.values()), [])

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()  # an earlier fit may have left a measurement
        self._reset()
        strategy = self._strategy = watched_strategy(trainer, self)
        if strategy is None:
            return
        self._timelines = [one for one in trainer.callbacks if isinstance(one, OverlapTimeline)]  # type: ignore[attr-defined]
        log_every = getattr(trainer, "log_every_n_steps", 0)
        self._every = self._every_n_steps or max(log_every, NUM_WATCHED + 1)
        rows = strategy.stale_rows()
        if rows is not None:
            self._stale = _StaleSteps(rows, self._every_n_steps, log_every)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        if self._strategy is None:
            return
        start = time.perf_counter()
        self._num_steps += 1
        number = self._num_steps
        if self._recording is not None:
            self._recording.step(number)
            # `pipeline="auto"` changes the mode; skip a step that began in another mode.
            if number in self._wanted and self._strategy.schedule is self._recording.schedule:
                strategy = self._strategy
                at_step = logged_step(trainer), strategy.num_in_flight, strategy.balanced
                self._pending.append((self._recording, number, *at_step))
        if self._recording is None and number >= self._next and not self._audit_is_due:
            self._want(pl_module, [number + NUM_WATCHED])
        for timeline in self._timelines:
            if number == timeline.recorded.start:
                self._want(pl_module, timeline.drawn)
        if self._recording is not None and number >= max(self._wanted):
            self._leave()
            enough = 0
            if self._every_n_steps is None and self.accounts:  # by `MAX_COST`
                cost_ms = self.own_ms / sum(map(len, self._measured.values()))
                enough = math.ceil(cost_ms / (MAX_COST * fmean(one.step_ms for one in self.accounts)))
            self._next = number + max(self._every, enough) - NUM_WATCHED
        if self._stale is not None:
            self._stale.step(number, not self._audit_is_due, logged_step(trainer))
        self._harvest(trainer, pl_module)
        self.own_ms += (time.perf_counter() - start) * 1e3

    def _want(self, pl_module: LightningModule, numbers: Iterable[int]) -> None:
        assert self._strategy is not None
        self._wanted |= set(numbers)
        if self._recording is None:
            self._recording = join(self._strategy, pl_module, self)
            self._recording.step(self._num_steps)

    def _harvest(self, trainer: Trainer, pl_module: LightningModule | None) -> None:
        """Log the measurements and counts of stale rows that can be read without waiting."""
        while self._pending and self._pending[0][0].recorder.over:
            recording, number, step, num_in_flight, balanced = self._pending.pop(0)
            spans, mode = recording.recorder.spans(), recording.schedule
            result = profiling.break_down(spans, recording.window(number), overlapped=profiling.overlapped_by(mode))
            self._measured[mode] = [*self._measured.pop(mode, ()), result]
            values = {f"overlap/{name}": value for name, value in report.metrics(result).items()}
            values["overlap/batches_in_flight"] = float(num_in_flight)
            if balanced is not None:
                values |= {f"overlap/{name}": value for name, value in _costs(balanced).items()}
            if self.syncs is not None:
                values["overlap/host_syncs"] = float(len(self.syncs))
            _log(trainer, values, step)
            if result.overlaps and pl_module is not None and not trainer.barebones:
                # A host tensor: the progress bar would sync to read a device tensor.
                hidden = torch.tensor(values["overlap/hidden_fraction"])
                pl_module.log("hidden", hidden, prog_bar=True, logger=False, on_step=True, on_epoch=False)
        for rows, step in () if self._stale is None else self._stale.take():
            for table, (stale, read) in rows.items():
                before = self.stale_rows.get(table, (0, 0))
                self.stale_rows[table] = before[0] + stale, before[1] + read
            _log(trainer, {f"overlap/stale_rows/{table}": stale / read for table, (stale, read) in rows.items()}, step)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        if self._strategy is None:
            return
        self._end_audit()
        # Before the first measurement: on a CPU its value in the progress bar would look like a sync.
        if self._audit_is_due and self._num_steps >= WARM_UP and self._recording is None:
            recording = join(self._strategy, pl_module, self)
            self._audit = ExitStack()
            self._audit.callback(recording.leave, self)
            self._audited = self._audit.enter_context(
                profiling.record_host_syncs(lambda: str(stage[0]) if (stage := recording.recorder.stage) else "")
            )

    @property
    def _audit_is_due(self) -> bool:
        drawn = any(self._num_steps in timeline.recorded for timeline in self._timelines)  # that step is slow
        return self._audit_wanted and self.syncs is None and not drawn

    def _end_audit(self) -> None:
        if self._audit is not None:
            assert self._strategy is not None
            self._audit.close()
            self._audit, device = None, self._strategy.root_device.type
            self.syncs = [sync for sync in self._audited if sync.device == device and not sync.reads_host]

    def _forget(self, *_: Any, **__: Any) -> None:
        if self._audit is not None:
            self._end_audit()
            self.syncs = None  # the audit is repeated
        if self._recording is not None:
            self._leave()
            self._next = self._num_steps + 1

    # A step that contains a validation or the end of an epoch is not representative.
    on_validation_start = on_train_epoch_end = on_exception = _forget

    def _leave(self) -> None:
        assert self._recording is not None
        self._recording.leave(self)
        self._recording = None
        self._wanted.clear()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._forget()
        strategy = self._strategy
        if strategy is None:
            return
        if self._pending and strategy.root_device.type == "cuda":
            torch.cuda.synchronize(strategy.root_device)  # training is over
        if self._stale is not None:
            self._stale.wait()
        self._harvest(trainer, None)
        ranks = strategy.gather({mode: profiling.mean(found) for mode, found in self._measured.items()})
        if not (trainer.is_global_zero and self._table):
            return
        num = {mode: len(found) for mode, found in self._measured.items() if all(mode in means for means in ranks)}
        if not num:
            print(
                f"Overlap: not measured. A measurement needs {WARM_UP} steps to warm up, 2 to find host syncs and "
                f"{NUM_WATCHED} more without a validation in between; training had {self._num_steps} steps."
            )
            return
        users = [sync for sync in self.syncs or () if not sync.is_the_librarys]  # users cannot act on the others
        lines = profiling.sync_lines(users, strategy.root_device.type == "cuda") if self.syncs is not None else []
        mode = strategy.schedule if strategy.schedule in num else next(reversed(num))
        of_mode = [means[mode] for means in ranks]
        print(report.closing_table(of_mode, num, mode, strategy.stream, lines, self.stale_rows), flush=True)


def _costs(balanced: Balanced) -> dict[str, float]:
    """Return the cost of each rank before and after balancing, and the heaviest one's as a multiple of the mean."""
    values = {"balance_bytes": float(balanced.num_bytes)}
    for when, costs in (("before", balanced.before), ("after", balanced.after)):
        values |= {f"cost_{when}/rank_{rank}": cost for rank, cost in enumerate(costs)}
        values[f"heaviest_{when}"] = max(costs) / mean if (mean := fmean(costs)) else 1.0
    return values


def _log(trainer: Trainer, values: Mapping[str, float], step: int) -> None:
    for logger in trainer.loggers:
        logger.log_metrics(dict(values), step=step)


class _StaleSteps:
    """Counts stale rows every `every` steps, or every `KEPT * (staleness + 1)` steps, but at least `at_least`."""

    def __init__(self, rows: StaleRows, every: int | None, at_least: int) -> None:
        self._rows = rows
        self._every, self._at_least = every, at_least
        self._next = WARM_UP
        self._pending: list[tuple[StaleCounts, int]] = []

    def step(self, num_steps: int, may_count: bool, logged: int) -> None:
        """Count the stale rows of the step that ends, if due; `logged` is the step number for loggers."""
        if num_steps >= self._next and may_count:
            counts = self._rows.count()
            if counts is not None:
                self._pending.append((counts, logged))
                self._next = num_steps + (self._every or max(self._at_least, KEPT * (self._rows.staleness + 1)))
        staleness = self._rows.staleness  # a count needs the ids of staleness + 1 lookups
        self._rows.keep_ids(staleness > 0 and num_steps >= self._next - staleness - 1)

    def take(self) -> Iterator[tuple[dict[str, tuple[int, int]], int]]:
        """Yield the counts that can be read without waiting, with their step numbers for loggers."""
        while self._pending and self._pending[0][0].over:
            counts, step = self._pending.pop(0)
            yield counts.read(), step

    def wait(self) -> None:
        for counts, _ in self._pending:
            counts.wait()
