"""Report a run at its end: the closing table, whether losses are equal, and the files in the run folder."""

import csv
import json
import re
import sys
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import numpy as np
from numpy.typing import NDArray

from ..text import aligned, or_dash, unknown_name_message

_FORMS = {  # name in a summary -> title and form in a table
    "mode": ("mode", "{}"),
    "stream": ("stream", "{}"),
    "staleness": ("staleness", "{}"),
    "num_ranks": ("ranks", "{}"),
    "num_steps": ("steps", "{}"),
    "samples_per_s": ("samples/s", "{:,.0f}"),
    "step_ms_median": ("step time median", "{:.2f} ms"),
    "step_ms_p90": ("step time P90", "{:.2f} ms"),
    "final_loss": ("final loss", "{:.9g}"),
    "losses_sha256": ("losses sha256", "{:.12}"),
}


@dataclass(frozen=True, slots=True)
class ModeResult:
    """The result of one mode over all ranks; without losses if it was only evaluated."""

    summary: Mapping[str, Any]  # as in `summary.json`; None for what only training gives
    losses_RS: NDArray[np.float32]  # R ranks, S steps
    step_ms: Sequence[float]  # rank 0's


def table(results: Sequence[ModeResult]) -> str:
    """Return the closing table: a line per quantity, a column per mode."""
    modes = [result.summary for result in results]
    rows = [
        [title, *(or_dash(mode[name], form) for mode in modes)]
        for name, (title, form) in _FORMS.items()
        if any(mode[name] is not None for mode in modes)
    ]
    for name in sorted({name for mode in modes for name in mode["metrics"]}):
        rows.append([name, *(or_dash(mode["metrics"].get(name), "{:.6f}") for mode in modes)])
    for name in modes[0]["peak_memory"]:
        rows.append([f"peak memory, {name}", *(f"{mode['peak_memory'][name] / 2**20:,.0f} MiB" for mode in modes)])
    return aligned(rows)


def compare(results: Sequence[ModeResult]) -> tuple[str, bool]:
    """Return a line on whether all modes have the first mode's losses, bit for bit, and whether all exact modes do."""
    reference, differing, kept = results[0], [], True
    for result in results[1:]:
        step = _first_difference(reference.losses_RS, result.losses_RS)
        if step is not None:
            mode, staleness = result.summary["mode"], result.summary["staleness"]
            kept = kept and bool(staleness or reference.summary["staleness"])
            differing.append(
                f"{mode} (staleness {staleness}) differs from {reference.summary['mode']} from step {step} on"
            )
    return f"losses identical: {'no; ' + '; '.join(differing) if differing else 'yes'}", kept


def _first_difference(one_RS: NDArray[np.float32], other_RS: NDArray[np.float32]) -> int | None:
    num = min(one_RS.shape[1], other_RS.shape[1])
    differs_S = (one_RS[:, :num].view(np.int32) != other_RS[:, :num].view(np.int32)).any(axis=0)
    if differs_S.any():
        return int(differs_S.argmax())
    return None if one_RS.shape == other_RS.shape else num


def write(folder: Path, results: Sequence[ModeResult], metric: str) -> None:
    """Write `steps.csv` (a line per mode and step) and `summary.json`, which names the metric returned to a sweep."""
    if not any(name.startswith("test") for name in results[-1].summary["metrics"]):
        metric = re.sub("^test", "val", metric)  # task=validate
    with open(folder / "steps.csv", "w", newline="", encoding="utf-8") as file:
        writer = csv.writer(file)
        writer.writerow(["mode", "step", "loss", "step_ms"])
        for result in results:
            losses_S = result.losses_RS.mean(axis=0, dtype=np.float64)
            for step, (loss, step_ms) in enumerate(zip(losses_S, result.step_ms, strict=True)):
                writer.writerow([result.summary["mode"], step, f"{loss:.9g}", f"{step_ms:.4f}"])
    verdict, exact = compare(results)
    summary = {"metric": metric, "exact": exact, "verdict": verdict, "modes": [result.summary for result in results]}
    (folder / "summary.json").write_text(json.dumps(summary, indent=2) + "\n", encoding="utf-8")


def compare_runs(runs: Sequence[tuple[Sequence[str], Path]]) -> str:
    """Return a table of a sweep's runs, named by the overrides in which they differ, and a line on those they share.

    Args:
        runs: The overrides and the run folder of each run.
    """
    shared = [one for one in runs[0][0] if all(one in overrides for overrides, _ in runs)] if len(runs) > 1 else []
    rows = [["run", "mode", "steps", "samples/s", "step median", "final loss", "losses", "metric"]]
    digests: dict[str, int] = {}
    for overrides, folder in runs:
        summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
        name = " ".join(one for one in overrides if one not in shared) or "-"
        for mode in summary["modes"]:
            names = ("mode", "num_steps", "samples_per_s", "step_ms_median", "final_loss")
            cells = [or_dash(mode[name], _FORMS[name][1]) for name in names]
            same = digests.setdefault(mode["losses_sha256"], len(digests) + 1) if mode["num_steps"] else None
            metric = or_dash(mode["metrics"].get(summary["metric"]), f"{summary['metric']} {{:.6f}}")
            rows.append([name, *cells, or_dash(same, "{}"), metric])
    note = "losses: runs with the same number have bitwise identical losses at every step."
    of_all = f"\nall runs: {' '.join(shared)}" if shared else ""
    return f"{aligned(rows, words=(0, 1))}{of_all}\n{note}"


def read_metric(folder: Path) -> float | None:
    """Return the config mode's value of the metric in `summary.json`; None, with a warning, if it was not logged."""
    summary = json.loads((folder / "summary.json").read_text(encoding="utf-8"))
    if not summary["exact"]:
        raise ValueError(f"the losses of exact modes must be identical, got {summary['verdict']}.")
    name, metrics = summary["metric"], summary["modes"][-1]["metrics"]
    if metrics and name not in metrics:
        unknown = unknown_name_message("metric", name, metrics)
        print(f"warning: {unknown} The sweep gets no value from this run; set metric=...", file=sys.stderr)
    return float(metrics[name]) if name in metrics else None
