"""Price modes from the costs of a step's parts: walk each mode's table with them, and see how long an iteration takes.

A walk simulates the executor: a host that does all work itself on a CPU, or launches it on streams on CUDA; a link that
every all-to-all needs. A price is the measured step plus the difference between the walks of two modes.
"""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Mapping, Sequence
from statistics import median

from ..profiling import Price, report
from ..schedules import MODES, Schedule, Stage, Step, StreamName
from . import costs as parts
from .arms import following
from .costs import Costs
from .trial import spread

PRICED = tuple(name for name in MODES if name != "prefetch")
"""The modes that are priced; `prefetch` would need tables with a cache."""

NUM_WALKED = 24
"""Iterations of a walk; the first half of them fills the pipeline."""

OFF = 0.5
"""Relative error of the difference between two modes: that between two hosts with a link of 300 Mbit/s, which
all-to-alls share with the all-reduce of dense gradients."""

TOLD = 0.02
"""A measured step decides between two models of the link only if these differ by more than this share of it."""


class Walk:
    """Simulates the iterations of a mode from the costs of a step's parts.

    Args:
        schedule: The mode.
        costs: The costs of a step's parts.
        shared: Whether all-to-alls take turns on the link (bandwidth), or each takes its own time (latency).
    """

    def __init__(self, schedule: Schedule, costs: Costs, *, shared: bool) -> None:
        self._schedule = schedule if schedule.has_sparse_stages else following(schedule)
        self._work, self._shared = costs.work, shared
        self._link = costs.wire if shared else costs.flight
        self._on_device = costs.on_device and schedule.has_sparse_stages  # without these all is on one stream
        self._free: defaultdict[str, float] = defaultdict(float)  # when each lane (host, stream) is free again, in ms
        self._link_free = 0.0
        self._there: defaultdict[tuple[str, int], float] = defaultdict(float)  # when each result of a batch is there
        self._updates_later = costs.work.get(str(Stage.EMBEDDING_UPDATE), 0.0) > 0

    def step_ms(self) -> float:
        """Return how long an iteration takes once the pipeline is full."""
        ends = [self._iterate(iteration) for iteration in range(-self._schedule.max_offset, NUM_WALKED)]
        return (ends[-1] - ends[-1 - NUM_WALKED // 2]) / (NUM_WALKED // 2)

    def _iterate(self, iteration: int) -> float:
        steps = self._schedule.steps
        # On a CPU these run in the backward, while that waits for gradients.
        left = () if self._on_device or self._schedule.defers_update else self._schedule.fills_backward_wait
        for index, step in enumerate(steps):
            if index in left or iteration + step.offset < 0:
                continue
            if step.stage is Stage.BACKWARD:
                self._backward(iteration, [steps[other] for other in left])
            else:
                self._run(step, iteration + step.offset)
        self._spend("host", parts.LOOP)
        return max(self._free.values())

    def _spend(self, lane: str, part: str, not_before: float = 0.0) -> float:
        """Do a part's work on a lane; return its end."""
        lane = lane if self._on_device else "host"
        self._free[lane] = max(self._free[lane], not_before) + self._work.get(part, 0.0)
        return self._free[lane]

    def _send(self, name: str, batch: int, now: float) -> None:
        start = max(now, self._link_free) if self._shared else now
        self._there[name, batch] = end = start + self._link[name]
        self._link_free = end

    def _run(self, step: Step, batch: int) -> None:
        launched = self._free["host"]  # a stream does nothing before the host has got there
        if step.stage is Stage.COPY_BATCH_TO_DEVICE:
            self._there["batch", batch] = self._spend("memcpy", str(step.stage), launched)
        elif step.stage is Stage.INPUT_SPLITS_DIST:
            self._send(parts.SIZES, batch, self._spend("host", parts.SIZES, self._there["batch", batch]))
        elif step.stage is Stage.INPUT_DATA_DIST:
            self._send(parts.IDS, batch, self._spend("host", parts.IDS, self._there[parts.SIZES, batch]))
        elif step.stage is Stage.EMBEDDING_LOOKUP:
            lane = "compute" if step.stream is StreamName.COMPUTE else "lookup"
            written = self._there["tables", batch - 1 - self._schedule.staleness]
            ready = max(launched, written, self._there[parts.IDS, batch])
            self._send(parts.EMBEDDINGS, batch, self._spend(lane, parts.EMBEDDINGS, ready))
        elif step.stage is Stage.DENSE_FORWARD:
            self._spend("compute", parts.BEFORE_MERGE, launched)
            self._spend("compute", parts.AFTER_MERGE, self._there[parts.EMBEDDINGS, batch])
        elif step.stage is Stage.EMBEDDING_UPDATE:
            part = str(step.stage) if self._updates_later else parts.AFTER_SENDING
            self._there["tables", batch] = self._spend("lookup", part, self._there[parts.GRADIENTS, batch])
        else:
            self._spend("compute", str(step.stage), launched)

    def _backward(self, batch: int, left: Sequence[Step]) -> None:
        self._send(parts.GRADIENTS, batch, self._spend("compute", parts.BEFORE_SENDING, self._free["host"]))
        for step in left:
            self._run(step, batch + step.offset)
        if not self._schedule.defers_update:
            self._spend("compute", parts.AFTER_SENDING, self._there[parts.GRADIENTS, batch])
            self._there["tables", batch] = self._spend("compute", str(Stage.EMBEDDING_UPDATE))
        elif self._updates_later:  # as measured: what is left of a backward that leaves the update
            self._spend("compute", parts.AFTER_SENDING)


def can_be_priced(schedule: Schedule) -> bool:
    """Whether a walk can simulate a mode: none with a cache, and none with updates at the optimizer step."""
    return schedule.step_of(Stage.PREFETCH) is None and not schedule.holds_updates


def prices(
    measured: Schedule, costs: Costs, steps_ms: Sequence[float], changed: Mapping[str, Costs] | None = None
) -> list[Price]:
    """Return the time of a step in each mode, the measured one first, then the cheapest.

    It is not known whether all-to-alls take turns on the link: the mode that was measured is walked with both models of
    it. If the measured step fits both, a price lies between them. The error of a price is the spread of the measured
    steps, the error of the walk in the measured mode, and `OFF` of the difference.

    Args:
        measured: The mode that was measured.
        costs: The costs of its parts.
        steps_ms: The steps that were measured, in milliseconds.
        changed: Other costs to price in the same mode, by what would change them, in words.
    """
    step_ms, spread_ms = median(steps_ms), spread(steps_ms)
    walked = {shared: Walk(measured, costs, shared=shared).step_ms() for shared in (True, False)}
    off_ms = {shared: abs(ms - step_ms) for shared, ms in walked.items()}
    told = max(spread_ms, TOLD * step_ms)  # apart by less than that, the step does not tell which link it is
    links = [shared for shared in walked if off_ms[shared] <= min(off_ms.values()) + told]

    def price(name: str, schedule: Schedule, with_costs: Costs) -> Price:
        found = [Walk(schedule, with_costs, shared=shared).step_ms() - walked[shared] for shared in links]
        gain_ms = (max(found) + min(found)) / 2
        walk_ms = max(off_ms[shared] for shared in links) + (max(found) - min(found)) / 2 + OFF * abs(gain_ms)
        return Price(name, max(0.0, step_ms + gain_ms), spread_ms + walk_ms, schedule.staleness)

    others = [price(name, MODES[name], costs) for name in PRICED if name != measured.name]
    others += [price(name, measured, with_costs) for name, with_costs in (changed or {}).items()]
    return [price(measured.name, measured, costs), *sorted(others, key=lambda one: one.ms)]


def price_table(found: Sequence[Price]) -> str:
    """Return prices for a terminal, that of the measured mode first."""
    rows = [(one.name, f"{one.ms:.1f}", f"{one.error_ms:.1f}", str(one.staleness)) for one in found]
    rows[0] = (f"{rows[0][0]}, as measured", *rows[0][1:])
    return report.Table(("a step would take", "ms", "+-", "staleness"), rows).text()
