"""Report a benchmark: statistics over rounds and ranks, the tables, and the files in the run folder."""

import json
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from pathlib import Path
from statistics import median
from typing import Any

import numpy as np

from ..profiling import ALL_TO_ALLS
from ..text import aligned, or_dash

HIDDEN = 0.1  # a collective counts as hidden if the wait for it was less than this share of its duration
MAX_SPREAD = 0.2  # if rounds of an arm differ by more than this share of their median, there is no verdict


@dataclass(frozen=True, slots=True)
class Turn:
    """One arm on one rank in one round. Times of collectives are by measured step, empty if there is none."""

    step_ms: list[float]  # by timed step
    losses: bytes  # of every step, float32
    final_loss: float
    peak_memory: dict[str, int]  # in the timed steps; name -> bytes
    cpu_ms: list[float] = field(default_factory=list)  # of all threads of the process, by timed step
    # The dense lane is the host on a CPU, the compute stream on CUDA.
    busy_ms: list[float] = field(default_factory=list)  # time in which the dense lane did not wait for collectives
    wire_ms: list[float] = field(default_factory=list)  # time in which a collective was in progress
    exposed_ms: list[float] = field(default_factory=list)  # time in which the dense lane waited for collectives
    collectives: dict[str, tuple[float, float]] = field(default_factory=dict)  # -> ms per step in progress, and waited


@dataclass(slots=True)
class ArmTurns:
    """All turns of one arm, or the reason why it cannot run."""

    name: str
    staleness: int  # in batches
    rounds: list[list[Turn]] = field(default_factory=list)  # [round][rank]
    failure: str | None = None

    @property
    def by_rank(self) -> list[tuple[Turn, ...]]:
        """The turns as [rank][round]."""
        return list(zip(*self.rounds, strict=True))


Result = Mapping[str, Any]  # an arm's statistics over all steps, of the rank with the largest value; as in `bench.json`


def bound_ms(base: ArmTurns, all_reduce_ms: float = 0.0) -> float | None:
    """Return the larger of the slowest rank's time without waits and the wire's time; None without measurements."""
    busy, wire = _by_rank(base, "busy_ms"), _by_rank(base, "wire_ms")
    # The rank that issues a collective last measures its duration; the others also wait for that rank.
    # A step's measurements lack the all-reduce of dense gradients.
    return max(*busy, min(wire) + all_reduce_ms) if busy and wire else None


def evaluate(arms: Sequence[ArmTurns], batch_size: int | None) -> list[Result]:
    """Return the statistics of every arm that ran; the first arm is the reference."""
    ran = {arm.name: arm for arm in arms if arm.failure is None}
    return [_evaluate(arm, arms[0], ran, batch_size) for arm in ran.values()]


def _evaluate(arm: ArmTurns, base: ArmTurns, ran: Mapping[str, ArmTurns], batch_size: int | None) -> Result:
    by_rank, memories = arm.by_rank, arm.rounds[0][0].peak_memory
    slowest_ms = max(float(np.mean([turn.step_ms for turn in turns])) for turns in by_rank)
    # This arm's median step / the reference's median step in the same round.
    rounds = ([max(median(turn.step_ms) for turn in turns) for turns in one.rounds] for one in (arm, base))
    ratios = [mine / of_base for mine, of_base in zip(*rounds, strict=True)]
    # The reference of the losses: for an arm `mode+fp16` it is `base+fp16`, if that ran.
    alike = ran.get(f"{base.name}+{arm.name.partition('+')[2]}", base)
    final_losses = [sum(turn.final_loss for turn in turns) / len(turns) for turns in arm.rounds]
    return {
        "name": arm.name,
        "staleness": arm.staleness,
        "step_ms_median": max(_by_rank(arm, "step_ms")),
        "step_ms_p90": max(_by_rank(arm, "step_ms", 90)),
        "cpu_ms": max(_by_rank(arm, "cpu_ms"), default=None),  # less sensitive to other programs than the step time
        "of_base": median(ratios),
        "of_base_range": (min(ratios), max(ratios)),
        "samples_per_s": len(by_rank) * batch_size / slowest_ms * 1e3 if batch_size else None,  # of all ranks together
        "peak_memory": {  # 90th percentile over rounds, bytes
            name: int(max(np.percentile([turn.peak_memory[name] for turn in turns], 90) for turns in by_rank))
            for name in memories
        },
        "exposed_ms": max(_by_rank(arm, "exposed_ms"), default=None),  # median per measured step
        "final_loss": sum(final_losses) / len(final_losses),  # mean over rounds and ranks
        "final_loss_range": (min(final_losses), max(final_losses)),  # over rounds; the mean over ranks
        # Bit for bit, on every rank, in every step and round.
        "same_as_base": all(
            [turn.losses for turn in turns] == [turn.losses for turn in alike.rounds[0]] for turns in arm.rounds
        ),
        "compared_with": alike.name,
        "collectives": {name: _worst(arm, name) for name in arm.rounds[0][0].collectives},
    }


def _by_rank(arm: ArmTurns, what: str, percent: float = 50) -> list[float]:
    """Return a percentile over all rounds by rank; an empty list if a rank has no values."""
    ranks = [[ms for turn in turns for ms in getattr(turn, what)] for turns in arm.by_rank]
    return [float(np.percentile(ms, percent)) for ms in ranks] if all(ranks) else []


def _worst(arm: ArmTurns, name: str) -> tuple[float, float]:
    """Return the times of a collective: medians over rounds on the rank that waits longest for it."""
    pairs = [[turn.collectives[name] for turn in turns if name in turn.collectives] for turns in arm.by_rank]
    busy_ms, waited_ms = max((np.median(of, axis=0).tolist() for of in pairs if of), key=lambda pair: pair[1])
    return busy_ms, waited_ms


_FORMS = {  # field of a result -> title and form in the table
    "step_ms_median": ("median", "{:.2f} ms"),
    "step_ms_p90": ("P90", "{:.2f} ms"),
    "cpu_ms": ("CPU", "{:.2f} ms"),
    "of_base": ("of base", "{:.3f}"),
    "of_base_range": ("(rounds)", "{0[0]:.3f}-{0[1]:.3f}"),
    "samples_per_s": ("samples/s", "{:,.0f}"),
    "exposed_ms": ("exposed", "{:.2f} ms"),
}


def table(results: Sequence[Result]) -> str:
    """Return the table of the arms that ran, one line each."""
    memories = list(results[0]["peak_memory"])
    rows = [["arm", *(title for title, _ in _FORMS.values()), *(f"peak {name}" for name in memories)]]
    rows[0] += ["final loss", "same as base"]
    for result in results:
        reference = f" ({result['compared_with']})" if "+" in result["compared_with"] else ""
        why = "" if reference else result["name"].partition("+")[2]
        if result["staleness"]:
            why = f"staleness {result['staleness']}"
        cells = [or_dash(result[name], form) for name, (_, form) in _FORMS.items()]
        cells += [f"{result['peak_memory'][name] / 2**20:,.0f} MiB" for name in memories]
        same = f"yes{reference}" if result["same_as_base"] else f"no ({why})" if why else f"NO{reference}"
        rows.append([result["name"], *cells, f"{result['final_loss']:.9g}", same])
    return aligned(rows)


def collectives_table(results: Sequence[Result]) -> str | None:
    """Return a table by arm of the waits for all-to-alls, and for what else an arm waits for; None if it is empty."""
    names = dict.fromkeys([*ALL_TO_ALLS, *(name for result in results for name in result["collectives"])])
    columns = [["waited for", *(result["name"] for result in results)]]
    for name in names:
        cells = [_hidden(result["collectives"].get(name)) for result in results]
        if set(cells) - ({"-"} if name in ALL_TO_ALLS else {"-", "hidden"}):
            columns.append([name, *cells])
    return aligned(list(zip(*columns, strict=True))) if len(columns) > 1 else None


def _hidden(times: tuple[float, float] | None) -> str:
    if times is None:
        return "-"
    busy, waited = times
    return "hidden" if waited < max(HIDDEN * busy, 0.05) else f"exposed {waited:.1f} ms"


def notes(arms: Sequence[ArmTurns], results: Sequence[Result]) -> list[str]:
    """Return a line for each arm whose times give no verdict, for losses that give none, and for what does not run."""
    of_base = [
        f"{result['name']} does not equal itself in all rounds, so 'same as base' says nothing: its sums are not "
        "reproducible. Run with deterministic=true."
        for result in results[:1]
        if not result["same_as_base"]
    ]
    return (
        of_base
        + [
            f"{result['name']}: the rounds disagree, from {low:.2f} to {high:.2f} of base: no verdict. Close other "
            "programs, or raise rounds and steps."
            for result in results
            for low, high in [result["of_base_range"]]
            if high - low > MAX_SPREAD * result["of_base"]
        ]
        + [f"{arm.name}: does not run here: {arm.failure}" for arm in arms if arm.failure is not None]
    )


def write(
    folder: Path, arms: Sequence[ArmTurns], results: Sequence[Result], bound: float | None, about: Mapping[str, Any]
) -> None:
    """Write `bench.json`, with the facts in `about`, into the run folder."""
    ran = {result["name"]: result for result in results}
    every = [
        {"name": arm.name, "staleness": arm.staleness, "failure": arm.failure, **ran.get(arm.name, {})} for arm in arms
    ]
    content = {**about, "bound_ms": bound, "arms": every}
    (folder / "bench.json").write_text(json.dumps(content, indent=2) + "\n", encoding="utf-8")
