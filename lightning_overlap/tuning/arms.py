"""What `pipeline="auto"` tries: arms, each an exact mode with a stream for its lookups; compare them by their times."""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, fields, replace
from math import hypot, sqrt
from statistics import median, quantiles
from typing import Any, NamedTuple

from ..schedules import MODES, SPARSE_STAGES, STREAMS, Schedule, Stage, Step, StreamName
from ..text import aligned, or_dash

TRIED = ("fused_sparse_dist", "fused_sparse_dist_after_optimizer", "split_backward", "sparse_dist", "base")
"""The modes to try; the first trains until the trial begins. `prefetch` cannot follow another mode in a run."""

STALLED = 0.05  # a block does not count if its wait for data exceeds the median by this share of the block's time
FEWEST = 2  # blocks of an arm that must count


def following(schedule: Schedule) -> Schedule:
    """Return a mode as a table that can follow and precede others in a run: all look up on the lookup stream.

    If a mode leaves the sparse stages to the modules, they come right before its forward, for the same batch.
    """
    if schedule.has_sparse_stages:
        lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
        steps = [replace(step, stream=StreamName.LOOKUP) if step is lookup else step for step in schedule]
        return Schedule(schedule.name, tuple(steps))
    sent = [Step(stage, 0, StreamName.DATA_DIST) for stage in SPARSE_STAGES[:-1]]
    lookup = Step(Stage.EMBEDDING_LOOKUP, 0, StreamName.LOOKUP)
    forward = schedule.position(Stage.DENSE_FORWARD)
    return Schedule(schedule.name, (*schedule.steps[:forward], *sent, lookup, *schedule.steps[forward:]))


@dataclass(frozen=True, slots=True)
class Arm:
    """An exact mode, and a name of `STREAMS` for its early lookups. All arms give the same losses."""

    mode: str
    stream: str

    @property
    def schedule(self) -> Schedule:
        """The arm's table."""
        return _TABLES[self.mode]

    @property
    def ahead(self) -> int:
        """Number of batches that lookups run ahead."""
        return self.schedule[Stage.EMBEDDING_LOOKUP].offset

    @property
    def held(self) -> tuple[int, int, bool, int]:
        """Key to compare memory; a split backward's layers keep their inputs for weight gradients."""
        stream = list(STREAMS).index(self.stream) if self.ahead else 0
        return self.schedule.depth, self.ahead, self.schedule.splits_backward, stream


_TABLES = {name: following(MODES[name]) for name in TRIED}

BRIDGE = _TABLES["sparse_dist"]  # without lookups ahead: one batch under it lets lookups move to another stream


def modes_on(stream: str, *, splits: bool = True) -> list[Arm]:
    """Return every mode to try, on one stream; `splits`: whether the fit can split its backward."""
    return [Arm(mode, stream) for mode in TRIED if splits or not _TABLES[mode].splits_backward]


def streams_of(arm: Arm) -> list[Arm]:
    """Return a mode on every stream, the given arm first; only that arm if the mode looks up nothing ahead."""
    others = [name for name in STREAMS if name != arm.stream] if arm.ahead else []
    return [arm, *(Arm(arm.mode, stream) for stream in others)]


@dataclass(frozen=True, slots=True)
class Auto:
    """How `pipeline="auto"` tries modes: in rounds of blocks of batches, one block for each arm (mode and stream).

    Args:
        warm_up: Batches before the first block, in which allocators and caches fill.
        settle: Untimed batches at the beginning of a block, after the switch.
        block: Timed batches of a block, rounded up to whole optimizer steps.
        rounds: Number of rounds before the arms are compared. A block does not count if it contains an evaluation, a
            save, the end of an epoch or a stall of a data loader. If fewer than two blocks of an arm count, more
            rounds follow, at most twice as many in all.
        tie: Arms within this share of the fastest arm's time are equal; the arm that holds the fewest batches wins. The
            first arm stays unless another one is better by more than the noise of their blocks.

    Raises:
        ValueError: A number is too small.
    """

    warm_up: int = 10
    settle: int = 2
    block: int = 16
    rounds: int = 4
    tie: float = 0.05

    def __post_init__(self) -> None:
        for field in fields(self):
            value, lowest = getattr(self, field.name), {"warm_up": 0, "tie": 0}.get(field.name, 1)
            if value < lowest:
                raise ValueError(f"{field.name} of Auto must be a number >= {lowest}, got {value!r}.")


def resolve_auto(pipeline: Any) -> Auto | None:
    """Return the options of `pipeline="auto"` or `pipeline=Auto(...)`; None for other pipelines."""
    auto = Auto() if pipeline == "auto" else pipeline
    return auto if isinstance(auto, Auto) else None


class Block(NamedTuple):
    """One rank's measurements of a block, per batch."""

    arm: Arm
    ms: float
    data_ms: float  # in which the host waited for the data loader
    void: str = ""  # why the block does not count; empty if it does


def times_of(ranks: Sequence[Sequence[Block]]) -> dict[Arm, list[float]]:
    """Return arm -> time of a batch on the slowest rank, in ms, in each block that counts, from each rank's blocks."""
    usual = [median(block.data_ms for block in blocks) for blocks in ranks]
    found: dict[Arm, list[float]] = {block.arm: [] for block in ranks[0]}
    for of_ranks in zip(*ranks, strict=True):
        stalled = any(block.data_ms - waits > STALLED * block.ms for block, waits in zip(of_ranks, usual, strict=True))
        if not stalled and not any(block.void for block in of_ranks):
            found[of_ranks[0].arm].append(max(block.ms for block in of_ranks))
    return found


def uncertainty(times: Sequence[float]) -> float | None:
    """Return twice the standard error of the median of some times; None for a single time.

    It is estimated from the quartiles, so that single slow blocks count little. Of a normal distribution half the
    distance between them is 0.6745 standard deviations, and the median has 1.2533 times the mean's standard error.
    """
    if len(times) < 2:
        return None
    first, _, third = quantiles(times, n=4)
    return 2 * 1.2533 / 0.6745 * (third - first) / 2 / sqrt(len(times))


def noise(first: Sequence[float], second: Sequence[float]) -> float:
    """Return how far the medians of two arms of equal speed may be apart; each has at least two times."""
    return hypot(uncertainty(first) or 0.0, uncertainty(second) or 0.0)


def choose(found: Mapping[Arm, Sequence[float]], tie: float) -> Arm | None:
    """Return the arm of `as_fast` that uses the least memory, the faster of two that use the same; None without one."""
    return min(as_fast(found, tie), key=lambda arm: (arm.held, median(found[arm])), default=None)


def as_fast(found: Mapping[Arm, Sequence[float]], tie: float) -> list[Arm]:
    """Return the arms to choose from: those of `told_apart` whose median is within `tie` of the fastest of them."""
    measured = {arm: median(found[arm]) for arm in told_apart(found)}
    limit_ms = min(measured.values(), default=0.0) * (1 + tie)
    return [arm for arm, ms in measured.items() if ms <= limit_ms]


def told_apart(found: Mapping[Arm, Sequence[float]]) -> list[Arm]:
    """Return the first arm of `found`, the default, and those whose time differs from its time by more than noise.

    Arms with fewer than `FEWEST` blocks are left out. If the default has too few, all others are returned.
    """
    measured = {arm: times for arm, times in found.items() if len(times) >= FEWEST}
    default = next(iter(found), None)
    if default is None or default not in measured:
        return list(measured)
    usual = measured[default]
    return [
        arm
        for arm, times in measured.items()
        if arm == default or abs(median(times) - median(usual)) >= noise(times, usual)
    ]


def reason(found: Mapping[Arm, Sequence[float]], tie: float) -> str:
    """Return why `choose` chooses its arm, for the log."""
    chosen = choose(found, tie)
    if chosen is None:
        return "no choice was made, because evaluations, saves, ends of epochs or data loading disturbed every block"
    mine, default = found[chosen], next(iter(found))
    others = [times for arm, times in found.items() if arm != chosen and len(times) >= FEWEST]
    if all(median(times) - median(mine) > noise(times, mine) for times in others):
        return "it is the fastest"
    if chosen == default:
        if len({arm.mode for arm in found}) > 1:
            return f"no mode is measurably faster than {default.mode}"
        return f"no stream is measurably faster than {default.stream}"
    if len(as_fast(found, tie)) > 1:
        return f"no other is measurably more than {tie:.0%} faster; among equally fast modes it uses the least memory"
    if len(found[default]) >= FEWEST:
        return f"it is measurably faster than {default.mode}"
    return "it has the shortest time"


def table(found: Mapping[Arm, Sequence[float]], chosen: Arm | None) -> str:
    """Return a table of the arms' times, for the log."""
    rows = [("mode", "stream", "ms per batch", "+-", "blocks", "batches in flight", "")]
    for arm, times in found.items():
        took = or_dash(median(times) if times else None, "{:.2f}"), or_dash(uncertainty(times), "{:.2f}")
        is_chosen = "chosen" if arm == chosen else ""
        rows.append((arm.mode, arm.stream, *took, str(len(times)), str(arm.schedule.depth), is_chosen))
    return aligned(rows, words=(0, 1, 6))
