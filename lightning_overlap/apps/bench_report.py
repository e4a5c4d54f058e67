"""Report a benchmark: statistics over rounds and ranks, the tables, and the files in the run folder."""

from __future__ import annotations

import json
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..profiling import ALL_TO_ALLS
from ..text import aligned, or_dash

HIDDEN = 0.1
"""A collective counts as hidden when less than this share of its time under way was waited for."""

MAX_SPREAD = 0.2
"""Rounds of an arm that differ by more than this share of their median give no verdict."""


@dataclass(frozen=True, slots=True)
class Turn:
    """What one arm's training gave on one rank in one round.

    What was seen of collectives is by measured step, and empty where that cannot be seen. The lane of the dense part is
    the host; on CUDA the compute stream.
    """

    step_ms: list[float]  # of each timed step
    losses: bytes  # of every step, float32
    final_loss: float
    peak_memory: dict[str, int]  # in the timed steps; name -> bytes
    cpu_ms: list[float] = field(default_factory=list)  # of all threads of the process, in each timed step
    busy_ms: list[float] = field(default_factory=list)  # how long the dense part's lane did not wait for collectives
    wire_ms: list[float] = field(default_factory=list)  # how long any collective was under way
    exposed_ms: list[float] = field(default_factory=list)  # how long the dense part's lane waited for collectives
    collectives: dict[str, tuple[float, float]] = field(default_factory=dict)  # -> ms a step under way, and waited for


@dataclass(slots=True)
class ArmTurns:
    """All turns of one arm, or why it does not run here."""

    name: str
    staleness: int  # updates that its lookups do not see, in batches
    rounds: list[list[Turn]] = field(default_factory=list)  # for each round, one turn per rank
    failure: str | None = None
    frozen_window: bool = False  # whether its tables are updated with the optimizer step, and not for each batch

    @property
    def by_rank(self) -> list[tuple[Turn, ...]]:
        """For each rank, its turns of all rounds."""
        return list(zip(*self.rounds, strict=True))


@dataclass(frozen=True, slots=True)
class ArmResult:
    """The statistics of an arm that ran. Each is of the slowest, or the largest, rank, over the steps of all rounds."""

    name: str
    staleness: int
    frozen_window: bool
    step_ms_median: float
    step_ms_p90: float
    cpu_ms: float | None  # median; other programs on the machine disturb it less
    of_base: float  # median over rounds of this arm's median step by that of the reference in the same round
    of_base_range: tuple[float, float]  # the lowest and the highest of them
    samples_per_s: float | None  # of all ranks together
    peak_memory: dict[str, int]  # 90th percentile over rounds; name -> bytes
    exposed_ms: float | None  # median of what the dense part waited for collectives in a measured step
    final_loss: float  # mean over ranks
    same_as_base: bool  # whether each rank's loss is the reference's at every step and in every round, bit for bit
    compared_with: str  # the reference of the losses: of an arm `mode+fp16` it is `base+fp16`, if that ran
    collectives: dict[str, tuple[float, float]]  # -> milliseconds a step under way, and waited for


def bound_ms(base: ArmTurns, all_reduce_ms: float = 0.0) -> float | None:
    """Return what no overlap of collectives makes a step shorter than, from the reference's measured steps.

    The slowest rank when it never waits, or the wire, whichever is busier. How long the wire is busy, the rank that
    issues last says: to the others a collective seems longer, by what they wait for that rank. The all-reduce of dense
    gradients is out of sight of the clocks and takes its time of the wire as well. None where nothing was measured.
    """
    busy, wire = _by_rank(base, "busy_ms"), _by_rank(base, "wire_ms")
    return max(*busy, min(wire) + all_reduce_ms) if busy and wire else None


def evaluate(arms: Sequence[ArmTurns], batch_size: int | None) -> list[ArmResult]:
    """Return the statistics of every arm that ran; the first is the reference. All have as many rounds and ranks."""
    base, by_name = arms[0], {arm.name: arm for arm in arms}
    results = []
    for arm in arms:
        if arm.failure is not None:
            continue
        by_rank = arm.by_rank
        slowest_ms = max(float(np.mean([turn.step_ms for turn in turns])) for turns in by_rank)
        ratios = [_round_ms(mine) / _round_ms(of_base) for mine, of_base in zip(arm.rounds, base.rounds, strict=True)]
        alike = by_name.get(f"{base.name}+{arm.name.partition('+')[2]}", base)
        results.append(
            ArmResult(
                name=arm.name,
                staleness=arm.staleness,
                frozen_window=arm.frozen_window,
                step_ms_median=max(_by_rank(arm, "step_ms")),
                step_ms_p90=max(_by_rank(arm, "step_ms", 90)),
                cpu_ms=max(_by_rank(arm, "cpu_ms"), default=None),
                of_base=median(ratios),
                of_base_range=(min(ratios), max(ratios)),
                samples_per_s=len(by_rank) * batch_size / slowest_ms * 1e3 if batch_size else None,
                peak_memory={
                    name: int(max(np.percentile([turn.peak_memory[name] for turn in turns], 90) for turns in by_rank))
                    for name in arm.rounds[0][0].peak_memory
                },
                exposed_ms=max(_by_rank(arm, "exposed_ms"), default=None),
                final_loss=sum(turn.final_loss for turn in arm.rounds[0]) / len(by_rank),
                same_as_base=all(
                    [turn.losses for turn in turns] == [turn.losses for turn in alike.rounds[0]] for turns in arm.rounds
                ),
                compared_with=alike.name,
                collectives=_worst(arm),
            )
        )
    return results


def _by_rank(arm: ArmTurns, what: str, percent: float = 50) -> list[float]:
    """Return a percentile over all rounds for each rank; nothing where one of them has not seen it."""
    ranks = [[ms for turn in turns for ms in getattr(turn, what)] for turns in arm.by_rank]
    return [float(np.percentile(ms, percent)) for ms in ranks] if all(ranks) else []


def _round_ms(turns: Sequence[Turn]) -> float:
    return max(median(turn.step_ms) for turn in turns)


def _worst(arm: ArmTurns) -> dict[str, tuple[float, float]]:
    """Of each collective, the median over rounds on the rank that waits longest for it."""
    worst: dict[str, tuple[float, float]] = {}
    for name in arm.rounds[0][0].collectives:
        pairs = [[turn.collectives[name] for turn in turns if name in turn.collectives] for turns in arm.by_rank]
        busy_ms, waited_ms = max((np.median(of, axis=0).tolist() for of in pairs if of), key=lambda pair: pair[1])
        worst[name] = busy_ms, waited_ms
    return worst


# -- what is printed --------------------------------------------------------------------------------------------


_FORMS = {
    "step_ms_median": ("median", "{:.2f} ms"),
    "step_ms_p90": ("P90", "{:.2f} ms"),
    "cpu_ms": ("CPU", "{:.2f} ms"),
    "of_base": ("of base", "{:.3f}"),
    "of_base_range": ("(rounds)", "{0[0]:.3f}-{0[1]:.3f}"),
    "samples_per_s": ("samples/s", "{:,.0f}"),
    "exposed_ms": ("exposed", "{:.2f} ms"),
}
"""Field of a result -> title and form in the table."""


def table(results: Sequence[ArmResult]) -> str:
    """Return the table of the arms that ran, one line each."""
    memories = list(results[0].peak_memory)
    rows = [["arm", *(title for title, _ in _FORMS.values()), *(f"peak {name}" for name in memories)]]
    rows[0] += ["final loss", "same as base"]
    for result in results:
        reference = f" ({result.compared_with})" if "+" in result.compared_with else ""
        why = "" if reference else result.name.partition("+")[2]
        if result.staleness:
            why = f"staleness {result.staleness}"
        elif result.frozen_window:
            why = "frozen window"
        cells = [or_dash(getattr(result, name), form) for name, (_, form) in _FORMS.items()]
        cells += [f"{result.peak_memory[name] / 2**20:,.0f} MiB" for name in memories]
        same = f"yes{reference}" if result.same_as_base else f"no ({why})" if why else f"NO{reference}"
        rows.append([result.name, *cells, f"{result.final_loss:.9g}", same])
    return aligned(rows)


def collectives_table(results: Sequence[ArmResult]) -> str | None:
    """Return a table that says how long each collective was waited for, or that it was hidden; None without any.

    All-to-alls are in it, and others that some arm waits for.
    """
    names = dict.fromkeys([*ALL_TO_ALLS, *(name for result in results for name in result.collectives)])
    columns = [["waited for", *(result.name for result in results)]]
    for name in names:
        cells = [_hidden(result.collectives.get(name)) for result in results]
        if set(cells) - ({"-"} if name in ALL_TO_ALLS else {"-", "hidden"}):
            columns.append([name, *cells])
    return aligned(list(zip(*columns, strict=True))) if len(columns) > 1 else None


def _hidden(times: tuple[float, float] | None) -> str:
    if times is None:
        return "-"
    busy, waited = times
    return "hidden" if waited < max(HIDDEN * busy, 0.05) else f"exposed {waited:.1f} ms"


def notes(arms: Sequence[ArmTurns], results: Sequence[ArmResult]) -> list[str]:
    """Return a line for each arm whose rounds say too different things to go by their median, or that does not run."""
    return [
        f"{result.name}: the rounds disagree, from {low:.2f} to {high:.2f} of base: no verdict. Close other programs, "
        "or raise rounds and steps."
        for result in results
        for low, high in [result.of_base_range]
        if high - low > MAX_SPREAD * result.of_base
    ] + [f"{arm.name}: does not run here: {arm.failure}" for arm in arms if arm.failure is not None]


def write(
    folder: Path, arms: Sequence[ArmTurns], results: Sequence[ArmResult], bound: float | None, about: Mapping[str, Any]
) -> None:
    """Write `bench.json`, with what is said about the run, into the run folder."""
    ran = {result.name: asdict(result) for result in results}
    every = [
        {"name": arm.name, "staleness": arm.staleness, "failure": arm.failure} | ran.get(arm.name, {}) for arm in arms
    ]
    content = {**about, "bound_ms": bound, "arms": every}
    (folder / "bench.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
