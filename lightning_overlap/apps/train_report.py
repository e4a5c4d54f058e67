"""Report a run at its end: the closing table, whether losses are equal, and the files in the run folder."""

from __future__ import annotations

import csv
import json
from collections.abc import Sequence
from dataclasses import asdict, dataclass
from pathlib import Path

from ..text import aligned, or_dash, unknown_name_message


@dataclass(frozen=True, slots=True)
class ModeResult:
    """What one mode's training gave, over all ranks; without losses it was only evaluated."""

    mode: str
    stream: str
    """The stream policy, or '-' in a mode without an early lookup."""
    staleness: int
    num_ranks: int
    peak_memory: dict[str, int]
    """Of the largest rank; the name says which memory, the number is in bytes."""
    metrics: dict[str, float]
    """Validation and test metrics."""
    losses: Sequence[float] = ()
    """Mean over ranks, by step."""
    step_ms: Sequence[float] = ()
    """Rank 0's time per step."""
    step_ms_median: float = float("nan")
    """Of the slowest rank, as the next."""
    step_ms_p90: float = float("nan")
    samples_per_s: float | None = None
    """All ranks together, without the first step; None if the batch size is not known."""
    losses_sha256: str = ""
    """Digest of all ranks' losses, in float32."""
    loss_bits: Sequence[bytes] = ()
    """Every rank's losses, by step, to compare modes by."""


def table(results: Sequence[ModeResult]) -> str:
    """Return the closing table: a line per quantity, a column per mode."""
    rows: list[tuple[str, list[str]]] = [
        ("mode", [result.mode for result in results]),
        ("stream", [result.stream for result in results]),
        ("staleness", [str(result.staleness) for result in results]),
        ("ranks", [str(result.num_ranks) for result in results]),
        ("steps", [str(len(result.losses)) for result in results]),
    ]
    if any(result.losses for result in results):
        rows += [
            ("samples/s", [or_dash(result.samples_per_s, "{:,.0f}") for result in results]),
            ("step time median", [f"{result.step_ms_median:.2f} ms" for result in results]),
            ("step time P90", [f"{result.step_ms_p90:.2f} ms" for result in results]),
            ("final loss", [or_dash(result.losses[-1] if result.losses else None, "{:.9g}") for result in results]),
            ("losses sha256", [result.losses_sha256[:12] for result in results]),
        ]
    for name in sorted({name for result in results for name in result.metrics}):
        rows.append((name.replace("_", " "), [or_dash(result.metrics.get(name), "{:.6f}") for result in results]))
    for name in results[0].peak_memory:
        values = [f"{result.peak_memory[name] / 2**20:,.0f} MiB" for result in results]
        rows.append((f"peak memory, {name}", values))
    return aligned([(name, *cells) for name, cells in rows])


def compare(results: Sequence[ModeResult]) -> tuple[str, bool]:
    """Say whether all modes had the losses of the first, bit for bit on every rank, and whether all exact ones had."""
    reference, differing, kept = results[0], [], True
    for result in results[1:]:
        step = _first_difference(reference.loss_bits, result.loss_bits)
        if step is not None:
            kept = kept and bool(result.staleness or reference.staleness)
            differing.append(
                f"{result.mode} (staleness {result.staleness}) differs from {reference.mode} from step {step} on"
            )
    return f"losses identical: {'no; ' + '; '.join(differing) if differing else 'yes'}", kept


def write(folder: Path, results: Sequence[ModeResult], metric: str) -> None:
    """Write `steps.csv` (a line per mode and step) and `summary.json`, which names the metric that a sweep is told."""
    with open(folder / "steps.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["mode", "step", "loss", "step_ms"])
        for result in results:
            for step, (loss, step_ms) in enumerate(zip(result.losses, result.step_ms, strict=True)):
                writer.writerow([result.mode, step, f"{loss:.9g}", f"{step_ms:.4f}"])
    series = ("losses", "step_ms", "loss_bits")
    modes = [
        {name: value for name, value in asdict(result).items() if name not in series}
        | {"num_steps": len(result.losses), "final_loss": result.losses[-1] if result.losses else None}
        for result in results
    ]
    verdict, exact = compare(results)
    summary = {"metric": metric, "exact": exact, "verdict": verdict, "modes": modes}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def compare_runs(runs: Sequence[tuple[str, Path]]) -> str:
    """Return a table of a sweep's runs, from the overrides and the run folder of each."""
    rows = [("run", "mode", "steps", "samples/s", "step median", "final loss", "losses", "metric")]
    digests: dict[str, str] = {}
    for overrides, folder in runs:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        for mode in summary["modes"]:
            same = digests.setdefault(mode["losses_sha256"], f"{len(digests) + 1}") if mode["num_steps"] else "-"
            metric = mode["metrics"].get(summary["metric"])
            rows.append(
                (
                    overrides or "-",
                    mode["mode"],
                    str(mode["num_steps"]),
                    or_dash(mode["samples_per_s"], "{:,.0f}"),
                    f"{mode['step_ms_median']:.2f} ms" if mode["num_steps"] else "-",
                    or_dash(mode["final_loss"], "{:.9g}"),
                    same,
                    or_dash(metric, f"{summary['metric']} {{:.6f}}"),
                )
            )
    note = "losses: runs with the same number have the same losses at every step, bit for bit."
    return f"{aligned(rows, words=(0, 1))}\n{note}"


def read_metric(folder: Path) -> float | None:
    """Return the metric that `summary.json` names, of the mode asked for; None if the run had no metrics at all.

    Raises:
        ValueError: An exact mode had other losses than the first mode, or there are metrics, but not this one.
    """
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if not summary["exact"]:
        raise ValueError(f"an exact mode has to have the losses of every other: {summary['verdict']}.")
    name, metrics = summary["metric"], summary["modes"][-1]["metrics"]
    if metrics and name not in metrics:
        raise ValueError(unknown_name_message("metric", name, metrics))
    return float(metrics[name]) if metrics else None


def _first_difference(one: Sequence[bytes], other: Sequence[bytes]) -> int | None:
    steps = [step for step, (mine, yours) in enumerate(zip(one, other, strict=False)) if mine != yours]
    return steps[0] if steps else None if len(one) == len(other) else min(len(one), len(other))
