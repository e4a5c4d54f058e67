"""A pipeline mode as a table in issue order; row `Step(stage, +k, stream)`: "during iteration i, for batch i + k"."""

from __future__ import annotations

import itertools
import re
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cached_property
from typing import ClassVar

from .stages import EARLY_OWNERS, SPARSE_STAGES, STAGE_ORDER, TRAINING_STAGES, Stage, StreamName, WeightOwner

_BEFORE = {
    Stage.INPUT_SPLITS_DIST: Stage.COPY_BATCH_TO_DEVICE,
    Stage.INPUT_DATA_DIST: Stage.INPUT_SPLITS_DIST,
    Stage.PREFETCH: Stage.INPUT_DATA_DIST,
    Stage.EMBEDDING_LOOKUP: Stage.INPUT_DATA_DIST,
}


_SENDS = (Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST)


class ScheduleError(ValueError):
    """A schedule that cannot run; the message prints the table with the offending step marked."""


@dataclass(frozen=True, slots=True)
class Step:
    """A row of a schedule: a stage, the batch that it is for, and its stream."""

    stage: Stage
    offset: int
    """Batches ahead of the one being trained; -1, for `EMBEDDING_UPDATE` only, is the previous batch."""
    stream: StreamName

    def __str__(self) -> str:
        return f"{self.stage}{self.offset:+d}/{self.stream}"


_STEP_TEXT = re.compile(r"(?P<stage>[a-z_]+)(?P<offset>[+-]\d+)/(?P<stream>[a-z_]+)")


@dataclass(frozen=True)
class Schedule:
    """A named, validated table of rows in issue order; depth, staleness and the rest of a mode are derived from it.

    Raises a ScheduleError if the table cannot run: a training stage is missing, repeated or not at offset 0; a stage
    runs before another stage that it needs; or only some of the sparse stages are present.
    """

    name: str
    steps: tuple[Step, ...]

    training_stages: ClassVar[tuple[Stage, ...]] = TRAINING_STAGES  # the trainer runs them; each has a step

    def __post_init__(self) -> None:
        object.__setattr__(self, "steps", tuple(self.steps))
        for check in (_check_steps, _check_training_steps, _check_sparse_steps, _check_prefetch, _check_batch_order):
            check(self)

    def __iter__(self) -> Iterator[Step]:
        return iter(self.steps)

    def __str__(self) -> str:
        return f"{self.name}: " + " ".join(map(str, self.steps))

    @classmethod
    def parse(cls, text: str) -> Schedule:
        """Parse the text that `str(schedule)` printed; raise a ScheduleError if it is no table that can run."""
        name, _, rest = map(str.strip, text.partition(":"))
        if not name or ":" not in text:
            raise ScheduleError(f"expected 'name: stage+offset/stream ...', got {text!r}.")
        steps = []
        for word in rest.split():
            if (match := _STEP_TEXT.fullmatch(word)) is None:
                raise ScheduleError(f"{name!r}: expected 'stage+offset/stream', got {word!r}.")
            try:
                steps.append(Step(Stage(match["stage"]), int(match["offset"]), StreamName(match["stream"])))
            except ValueError as err:
                known = f"stages: {', '.join(map(str, Stage))}; streams: {', '.join(map(str, StreamName))}"
                raise ScheduleError(f"{name!r}: {word!r} names an unknown stage or stream. Known {known}.") from err
        return cls(name, tuple(steps))

    @cached_property
    def max_offset(self) -> int:
        """The largest offset: how far the table looks ahead of the batch being trained."""
        return max(step.offset for step in self.steps)

    @cached_property
    def depth(self) -> int:
        """Batches in flight at once: looked ahead, being trained, and waiting for their update."""
        return self.max_offset + 1 - min(step.offset for step in self.steps)

    @cached_property
    def has_sparse_stages(self) -> bool:
        """Whether the table places the input dist and the lookup (otherwise the modules' own forward does both)."""
        return any(step.stage in SPARSE_STAGES for step in self.steps)

    @cached_property
    def prefetches(self) -> bool:
        """Whether the table copies rows from UVM into the cache."""
        return self.step_of(Stage.PREFETCH) is not None

    def stage_before(self, stage: Stage) -> Stage:
        """Return the stage whose result a sparse stage of the same batch needs."""
        return Stage.PREFETCH if self.prefetches and stage is Stage.EMBEDDING_LOOKUP else _BEFORE[stage]

    @cached_property
    def staleness(self) -> int:
        """Number of batches whose updates a lookup of a fused table cannot see yet."""
        if not self.has_sparse_stages:
            return 0
        # A row for EMBEDDING_UPDATE changes nothing: no lookup stands between the backward and the update.
        return max(0, self[Stage.EMBEDDING_LOOKUP].offset - self._is_below(Stage.EMBEDDING_LOOKUP, Stage.BACKWARD))

    @cached_property
    def defers_update(self) -> bool:
        """Whether `BACKWARD` leaves the update of the tables to a row of its own."""
        return self.step_of(Stage.EMBEDDING_UPDATE) is not None

    @cached_property
    def updates_before_step(self) -> bool:
        """Whether a deferred update stands between the backward and the optimizer step of its own batch."""
        update = self.step_of(Stage.EMBEDDING_UPDATE)
        return update is not None and update.offset == 0 and self._is_below(Stage.OPTIMIZER_STEP, update.stage)

    @cached_property
    def splits_backward(self) -> bool:
        """Whether `BACKWARD` leaves the gradients of layers' weights to a row of its own."""
        return self.step_of(Stage.WEIGHT_GRADIENTS) is not None

    @cached_property
    def with_whole_backward(self) -> Schedule:
        """This table without `WEIGHT_GRADIENTS`, and without an update above `OPTIMIZER_STEP`: `BACKWARD` does both."""
        if not self.splits_backward:
            return self
        left_out = {Stage.WEIGHT_GRADIENTS} | ({Stage.EMBEDDING_UPDATE} if self.updates_before_step else set())
        return Schedule(self.name, tuple(step for step in self.steps if step.stage not in left_out))

    @cached_property
    def sends_after_forward(self) -> tuple[Step, ...]:
        """The rows right below `DENSE_FORWARD` that send sizes and ids; between hosts on a CPU they run inside it."""
        below = self.steps[self.position(Stage.DENSE_FORWARD) + 1 :]
        return tuple(itertools.takewhile(lambda step: step.stage in _SENDS, below))

    @cached_property
    def rows_in_backward_wait(self) -> range:
        """Indices of the rows that may run inside `BACKWARD`, while autograd waits for other ranks (CPU only)."""
        # Before gradients arrive, only an update among these rows writes tables.
        end = self.position(Stage.BACKWARD)
        start = end
        while self.steps[start - 1].stage in (*_SENDS, Stage.PREFETCH, Stage.EMBEDDING_LOOKUP, Stage.EMBEDDING_UPDATE):
            start -= 1
        while start < end and self.steps[start].stage in _SENDS:
            start += 1
        return range(start, end)

    @cached_property
    def dense_owned_lookup(self) -> Step | None:
        """The row for tables of the dense optimizer, if it differs: right after `OPTIMIZER_STEP`, their writer."""
        lookup = self.step_of(Stage.EMBEDDING_LOOKUP)
        if lookup is None or lookup.offset == 0:
            return None
        comes_after = lookup.offset == 1 and self._is_below(lookup.stage, Stage.OPTIMIZER_STEP)
        return None if comes_after else Step(lookup.stage, 1, lookup.stream)

    @cached_property
    def lookup_owners(self) -> frozenset[WeightOwner]:
        """The owners whose tables `EMBEDDING_LOOKUP` looks up; `dense_owned_lookup`, if any, looks up the others."""
        return EARLY_OWNERS if self.dense_owned_lookup is None else frozenset({WeightOwner.FUSED_BACKWARD})

    @cached_property
    def evaluation(self) -> EvaluationSchedule:
        """The table of an evaluation: it looks up as early as this table does, at most one batch ahead."""
        # Every stage stands one batch ahead of the stage that waits for it: each all-to-all has a whole forward.
        forward, copy = Step(Stage.DENSE_FORWARD, 0, StreamName.COMPUTE), self[Stage.COPY_BATCH_TO_DEVICE]
        if not self.has_sparse_stages:
            return EvaluationSchedule(self.name, (copy, forward))
        offset = min(self[Stage.EMBEDDING_LOOKUP].offset, 1)
        early = [Step(stage, offset + n, self[stage].stream) for n, stage in enumerate(reversed(SPARSE_STAGES))]
        last = Step(copy.stage, offset + len(early), copy.stream)
        return EvaluationSchedule(self.name, (*early, forward, last))

    def at(self, batch: int) -> Schedule:
        """The table to walk while a batch is trained: always this one (a `SequentialSchedule` has several)."""
        return self

    @cached_property
    def _positions(self) -> dict[Stage, int]:
        return {step.stage: index for index, step in enumerate(self.steps)}

    def __getitem__(self, stage: Stage) -> Step:
        return self.steps[self._positions[stage]]

    def step_of(self, stage: Stage) -> Step | None:
        """Return the row of a stage, or None."""
        return self[stage] if stage in self._positions else None

    def position(self, stage: Stage) -> int:
        """Return the index of the row of a stage that the table has."""
        return self._positions[stage]

    def _is_below(self, stage: Stage, other: Stage) -> bool:
        return self._positions[stage] > self._positions[other]


class EvaluationSchedule(Schedule):
    """The table of an evaluation, derived by `Schedule.evaluation`: its only training stage is the forward."""

    training_stages: ClassVar[tuple[Stage, ...]] = (Stage.DENSE_FORWARD,)

    staleness = 0  # it updates no table
    rows_in_backward_wait = range(0)
    dense_owned_lookup = None  # no optimizer step follows


def check_number(name: str, value: object, *, least: int = 0, instead: str = "") -> None:
    """Check a number of batches that a user passes; `instead` ends the error about a smaller number than `least`."""
    if not isinstance(value, int) or isinstance(value, bool):
        raise TypeError(f"{name} must be a number of batches, got {value!r}.")
    if value < least:
        raise ValueError(f"{name} must be at least {least} batches, got {value}.{instead}")


def _check_steps(schedule: Schedule) -> None:
    if not re.fullmatch(r"[a-z][a-z0-9_]*", schedule.name):
        raise ScheduleError(f"a schedule's name has lower-case letters, digits and '_', got {schedule.name!r}.")
    seen: set[Stage] = set()
    for index, step in enumerate(schedule.steps):
        if not isinstance(step, Step):
            raise ScheduleError(f"{schedule.name!r}: step {index + 1} is {step!r}; expected a Step.")
        lowest = -1 if step.stage is Stage.EMBEDDING_UPDATE else 0
        if step.offset < lowest:
            problem = f"{step.stage} has offset {step.offset}"
            raise _error(schedule, problem, f"Use an offset of {lowest} or more.", index)
        if step.stage in seen:
            raise _error(schedule, f"{step.stage} occurs twice", "Keep one step per stage.", index)
        seen.add(step.stage)


_OF_TRAINER = (*TRAINING_STAGES, Stage.WEIGHT_GRADIENTS)


def _check_training_steps(schedule: Schedule) -> None:
    for stage in (Stage.COPY_BATCH_TO_DEVICE, *schedule.training_stages):
        if schedule.step_of(stage) is None:
            raise _error(schedule, f"{stage} is missing", f"Add Step({stage.name}, 0, ...).")
    for index, step in enumerate(schedule.steps):
        name = f"{step.stage} (step {index + 1})"
        if step.stage in _OF_TRAINER and step.offset != 0:
            remedy = "The trainer runs it on the batch being trained: offset 0."
            raise _error(schedule, f"{name} has offset {step.offset}", remedy, index)
        if step.stage in _OF_TRAINER and step.stream is not StreamName.COMPUTE:
            remedy = "The trainer runs it on the compute stream."
            raise _error(schedule, f"{name} is on stream {step.stream}", remedy, index)


_ALL_SPARSE = "Add a step for every sparse stage, or for none."


def _check_sparse_steps(schedule: Schedule) -> None:
    missing = [stage for stage in SPARSE_STAGES if schedule.step_of(stage) is None]
    update = schedule.step_of(Stage.EMBEDDING_UPDATE)
    if missing and (update is not None or len(missing) < len(SPARSE_STAGES)):
        raise _error(schedule, f"{', '.join(map(str, missing))} is missing", _ALL_SPARSE)
    if update is None:
        return
    position = schedule.position(update.stage)
    lookup, backward = schedule.position(Stage.EMBEDDING_LOOKUP), schedule.position(Stage.BACKWARD)
    between = backward < lookup < position if update.offset == 0 else not position < lookup < backward
    if between:
        # A module's own forward updates in the backward, and code between two steps (an evaluation, a checkpoint) needs
        # the update at once. Neither may change which updates a lookup sees.
        problem = f"a lookup stands between backward and {update.stage} (step {position + 1})"
        remedy = f"Move embedding_lookup above backward and {update.stage}-1 above it, or {update.stage}+0."
        raise _error(schedule, problem, remedy, lookup, position)


def _check_prefetch(schedule: Schedule) -> None:
    prefetch, lookup = schedule.step_of(Stage.PREFETCH), schedule.step_of(Stage.EMBEDDING_LOOKUP)
    if prefetch is None:
        return
    bad = schedule.position(Stage.PREFETCH)
    if lookup is None:
        raise _error(schedule, "no step looks up the prefetched rows", _ALL_SPARSE, bad)
    if schedule.defers_update:
        problem = "a cached table's backward belongs to its last lookup and cannot be deferred"
        remedy = "Leave out prefetch or embedding_update."
        raise _error(schedule, problem, remedy, bad, schedule.position(Stage.EMBEDDING_UPDATE))
    if prefetch.offset != lookup.offset or schedule.staleness:
        # The kernel matches lookups with prefetches in order, and its backward belongs to its last lookup. Between two
        # iterations may come an evaluation.
        problem = f"{prefetch} and {lookup} are in different iterations, or the lookup misses an update it needs"
        raise _error(schedule, problem, "Give both the same offset: 0, or 1 with the lookup below BACKWARD.", bad)


def _check_batch_order(schedule: Schedule) -> None:
    by_stage = sorted(schedule.steps, key=lambda step: STAGE_ORDER[step.stage])
    chain = [step for step in by_stage if step.stage is not Stage.EMBEDDING_UPDATE]
    backward_and_update = [step for step in by_stage if step.stage in (Stage.BACKWARD, Stage.EMBEDDING_UPDATE)]
    for early, late in (*itertools.pairwise(chain), *itertools.pairwise(backward_and_update)):
        early_index, late_index = schedule.position(early.stage), schedule.position(late.stage)
        # Batch b passes step s in iteration b - offset(s): later iterations are larger, then the order of steps counts.
        if (-early.offset, early_index) > (-late.offset, late_index):
            problem = (
                f"{late.stage}{late.offset:+d} (step {late_index + 1}) runs before "
                f"{early.stage}{early.offset:+d} (step {early_index + 1}) of the same batch"
            )
            higher = f"Raise the offset of {early.stage} to at least +{late.offset}"
            remedy = (
                f"Move {early.stage} above step {late_index + 1}, or raise its batch offset to +{late.offset + 1}."
                if early.offset == late.offset
                else f"{higher}, or lower the offset of {late.stage}."
            )
            raise _error(schedule, problem, remedy, late_index)


def _error(schedule: Schedule, problem: str, remedy: str, *bad: int) -> ScheduleError:
    width = max((len(str(step)) for step in schedule.steps), default=0)
    table = "\n".join(
        f"  {'>' if index in bad else ' '} {index + 1:2d}  {step!s:{width}s}{'   <-- here' if index in bad else ''}"
        for index, step in enumerate(schedule.steps)
    )
    return ScheduleError(f"{schedule.name!r}: {problem}.\n{table}\n  {remedy}")
