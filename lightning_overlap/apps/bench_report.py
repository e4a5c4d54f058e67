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
    """What one arm's training gave on one rank in one round."""

    step_ms: list[float]
    """Of each timed step."""
    window_ms: float
    """All timed steps together, to device completion."""
    losses: list[bytes]
    """The loss of every step, float32."""
    final_loss: float
    peak_memory: dict[str, int]
    """In the timed steps; the name says which memory, the number is in bytes."""
    cpu_ms: list[float] = field(default_factory=list)
    """CPU time of this process in each timed step, all its threads together."""
    busy_ms: list[float] = field(default_factory=list)
    """By measured step, how long the dense part's lane (the host; on CUDA the compute stream) did not wait for
    collectives; empty where that cannot be seen."""
    wire_ms: list[float] = field(default_factory=list)
    """By measured step, how long any collective was under way."""
    exposed_ms: list[float] = field(default_factory=list)
    """By measured step, how long that lane waited for collectives."""
    collectives: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Which -> milliseconds per step under way, and waited for."""


@dataclass(slots=True)
class ArmTurns:
    """All turns of one arm, or why it does not run here."""

    name: str
    staleness: int
    """Updates that its lookups do not see, in batches."""
    rounds: list[list[Turn]] = field(default_factory=list)
    """For each round, one turn per rank."""
    failure: str | None = None

    @property
    def by_rank(self) -> list[tuple[Turn, ...]]:
        """For each rank, its turns of all rounds."""
        return list(zip(*self.rounds, strict=True))


@dataclass(frozen=True, slots=True)
class ArmResult:
    """The statistics of one arm. Each is of the slowest, or the largest, rank, over the steps of all rounds."""

    name: str
    staleness: int
    step_ms_median: float = float("nan")
    step_ms_p90: float = float("nan")
    cpu_ms: float | None = None
    """Median CPU time of a step; other programs on the machine disturb it less."""
    of_base: float = float("nan")
    """Median over rounds of this arm's median step by that of the reference in the same round."""
    of_base_range: tuple[float, float] = (float("nan"), float("nan"))
    """The lowest and the highest of them."""
    samples_per_s: float | None = None
    """Of all ranks together."""
    peak_memory: dict[str, int] = field(default_factory=dict)
    """90th percentile over rounds; name -> bytes."""
    exposed_ms: float | None = None
    """What the dense part waited for collectives in a measured step, median."""
    efficiency: float | None = None
    """(base - this) / (base - bound), by median step times; None where nothing is to be gained."""
    final_loss: float = float("nan")
    """Mean over ranks."""
    same_as_base: bool = False
    """Whether every rank's loss is the reference's at every step and in every round, bit for bit. An arm `mode+fp16` is
    compared with `base+fp16`, if that ran."""
    collectives: dict[str, tuple[float, float]] = field(default_factory=dict)
    """Which -> milliseconds per step under way, and waited for."""
    failure: str | None = None
    """Why it does not run here; the rest then says nothing."""


def bound_ms(base: ArmTurns, all_reduce_ms: float = 0.0) -> float | None:
    """Return what no overlap of collectives makes a step shorter than, from the reference's measured steps.

    The slowest rank when it never waits, or the wire, whichever is busier. How long the wire is busy, the rank that
    issues last says: to the others a collective seems longer, by what they wait for that rank. The all-reduce of dense
    gradients is out of sight of the clocks and takes its time of the wire as well. None where nothing was measured.
    """
    busy, wire = _by_rank(base, "busy_ms"), _by_rank(base, "wire_ms")
    return max(*busy, min(wire) + all_reduce_ms) if busy and wire else None


def efficiency(base_ms: float, arm_ms: float, bound: float | None) -> float | None:
    """Return the share of the possible gain that an arm has; None where that gain is below a hundredth of a step."""
    if bound is None or base_ms - bound < 0.01 * base_ms:
        return None
    return (base_ms - arm_ms) / (base_ms - bound)


def evaluate(arms: Sequence[ArmTurns], batch_size: int | None, bound: float | None) -> list[ArmResult]:
    """Return the statistics of every arm; the first is the reference. All that ran have as many rounds and ranks."""
    base = arms[0]
    by_name = {arm.name: arm for arm in arms}
    base_ms = max(_by_rank(base, "step_ms"))
    results = []
    for arm in arms:
        if arm.failure is not None:
            results.append(ArmResult(arm.name, arm.staleness, failure=arm.failure))
            continue
        by_rank, arm_ms = arm.by_rank, max(_by_rank(arm, "step_ms"))
        num_samples = sum(len(turn.step_ms) for turns in by_rank for turn in turns) * (batch_size or 0)
        slowest_ms = max(sum(turn.window_ms for turn in turns) for turns in by_rank)
        ratios = [_round_ms(mine) / _round_ms(of_base) for mine, of_base in zip(arm.rounds, base.rounds, strict=True)]
        results.append(
            ArmResult(
                name=arm.name,
                staleness=arm.staleness,
                step_ms_median=arm_ms,
                step_ms_p90=max(_by_rank(arm, "step_ms", 90)),
                cpu_ms=max(_by_rank(arm, "cpu_ms"), default=None),
                of_base=median(ratios),
                of_base_range=(min(ratios), max(ratios)),
                samples_per_s=num_samples / slowest_ms * 1e3 if batch_size else None,
                peak_memory={
                    name: int(max(np.percentile([turn.peak_memory[name] for turn in turns], 90) for turns in by_rank))
                    for name in arm.rounds[0][0].peak_memory
                },
                exposed_ms=max(_by_rank(arm, "exposed_ms"), default=None),
                efficiency=efficiency(base_ms, arm_ms, bound),
                final_loss=sum(turn.final_loss for turn in arm.rounds[0]) / len(by_rank),
                same_as_base=all(
                    turn.losses == of_base.losses
                    for turns in arm.rounds
                    for turn, of_base in zip(turns, _alike(arm, base, by_name).rounds[0], strict=True)
                ),
                collectives=_worst(arm),
            )
        )
    return results


def _alike(arm: ArmTurns, base: ArmTurns, by_name: Mapping[str, ArmTurns]) -> ArmTurns:
    """Return the reference whose losses an exact arm has: the one that sends in the same precision, if there is one."""
    _, plus, precision = arm.name.partition("+")
    return by_name.get(f"{base.name}{plus}{precision}", base)


def _why_other(result: ArmResult) -> str:
    """Return what makes an arm's losses other than the reference's, if it is meant to."""
    if result.staleness:
        return f"staleness {result.staleness}"
    name = result.name.partition("+")[0].partition("/")[0]
    return "frozen window" if name.endswith("_frozen_window") else ""


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
        medians = [(median(busy for busy, _ in of), median(waited for _, waited in of)) for of in pairs if of]
        worst[name] = max(medians, key=lambda pair: pair[1])
    return worst


# -- what is printed --------------------------------------------------------------------------------------------


def table(results: Sequence[ArmResult]) -> str:
    """Return the table of the arms that ran, one line each."""
    memories, names, base = list(results[0].peak_memory), {result.name for result in results}, results[0].name
    head = ["median", "P90", "CPU", "of base", "(rounds)", "samples/s", "exposed", "efficiency"]
    head += [f"peak {name}" for name in memories] + ["final loss", "same as base"]
    rows = [["arm", *head]]
    for result in results:
        if result.failure is not None:
            continue
        low, high = result.of_base_range
        cells = [
            f"{result.step_ms_median:.2f} ms",
            f"{result.step_ms_p90:.2f} ms",
            or_dash(result.cpu_ms, "{:.2f} ms"),
            f"{result.of_base:.3f}",
            f"{low:.3f}-{high:.3f}",
            or_dash(result.samples_per_s, "{:,.0f}"),
            or_dash(result.exposed_ms, "{:.2f} ms"),
            or_dash(result.efficiency, "{:.0%}"),
        ]
        cells += [f"{result.peak_memory[name] / 2**20:,.0f} MiB" for name in memories]
        precision = result.name.partition("+")[2]
        reference = f" ({base}+{precision})" if f"{base}+{precision}" in names else ""
        why = _why_other(result) or (precision if not reference else "")
        same = f"yes{reference}" if result.same_as_base else f"no ({why})" if why else f"NO{reference}"
        rows.append([result.name, *cells, f"{result.final_loss:.9g}", same])
    return aligned(rows)


def collectives_table(results: Sequence[ArmResult]) -> str | None:
    """Return a table that says how long each collective was waited for, or that it was hidden; None without any."""
    seen = dict.fromkeys(name for result in results for name in result.collectives)
    others = [
        name
        for name in seen
        if name not in ALL_TO_ALLS
        and any(_hidden(r.collectives.get(name)) != "hidden" for r in results if name in r.collectives)
    ]
    names = [name for name in ALL_TO_ALLS if name in seen] + others
    if not names:
        return None
    rows = [["waited for", *names]]
    for result in results:
        if result.failure is None:
            rows.append([result.name, *(_hidden(result.collectives.get(name)) for name in names)])
    return aligned(rows)


def _hidden(times: tuple[float, float] | None) -> str:
    if times is None:
        return "-"
    busy, waited = times
    return "hidden" if waited < max(HIDDEN * busy, 0.05) else f"exposed {waited:.1f} ms"


def failures(results: Sequence[ArmResult]) -> list[str]:
    """Return a line for each arm that does not run here."""
    return [f"{result.name}: does not run here: {result.failure}" for result in results if result.failure is not None]


def disagreements(results: Sequence[ArmResult]) -> list[str]:
    """Return a line for each arm whose rounds say too different things to go by their median."""
    return [
        f"{result.name}: the rounds disagree, from {low:.2f} to {high:.2f} of base: no verdict. Close other programs, "
        "or raise rounds and steps."
        for result in results
        if result.failure is None
        for low, high in [result.of_base_range]
        if high - low > MAX_SPREAD * result.of_base
    ]


# -- what is written --------------------------------------------------------------------------------------------


def write(folder: Path, results: Sequence[ArmResult], bound: float | None, about: Mapping[str, Any]) -> None:
    """Write `bench.json`, with what is said about the run, and `bench.png` into the run folder."""
    content = {**about, "bound_ms": bound, "arms": [asdict(result) for result in results]}
    (folder / "bench.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
    draw(folder / "bench.png", results, bound)


def draw(path: Path, results: Sequence[ArmResult], bound: float | None) -> None:
    """Draw the median step of every arm that ran, its exposed part, its P90, and the bound."""
    from matplotlib.figure import Figure

    ran = [result for result in reversed(results) if result.failure is None]
    places = range(len(ran))
    medians, exposed = [r.step_ms_median for r in ran], [r.exposed_ms or 0.0 for r in ran]
    figure = Figure(figsize=(9, 1.2 + 0.34 * len(ran)), layout="constrained")
    axes = figure.subplots()
    late = [max(0.0, r.step_ms_p90 - r.step_ms_median) for r in ran]
    axes.barh(
        range(len(ran)), medians, color="#9db8d2", xerr=[[0.0] * len(ran), late], ecolor="#555555", label="step, to P90"
    )
    axes.barh(places, exposed, left=[m - e for m, e in zip(medians, exposed, strict=True)], color="#c8553d",
              label="of it, waiting for collectives")  # fmt: skip
    if bound is not None:
        axes.axvline(bound, color="black", linestyle=":", label="bound")
    axes.set_yticks(places, [f"{r.name}{'' if r.same_as_base else ' *'}" for r in ran])
    axes.set_xlabel("milliseconds per step, slowest rank (*: other losses than base)")
    axes.legend(loc="lower right", fontsize="small")
    figure.savefig(path, dpi=120)
