"""Draw `architecture.png`: the stations of one batch, from the DataLoader to the end of its step.

Run `python docs/draw_architecture.py` after a change of STATIONS; `tests/house/test_architecture.py` checks its files.
"""

from __future__ import annotations

from dataclasses import dataclass
from itertools import pairwise
from pathlib import Path

from matplotlib.axes import Axes
from matplotlib.backends.backend_agg import FigureCanvasAgg
from matplotlib.figure import Figure
from matplotlib.patches import Circle, Rectangle

LANES = {"plugin": "what Lightning calls", "runtime": "when, on which stream", "sparse": "what a stage does"}
COLORS = {"plugin": "#b9bfe8", "runtime": "#aedae4", "sparse": "#d2da98"}  # of batches on timelines, paler


@dataclass(frozen=True)
class Station:
    """One station of a batch's way.

    Args:
        title: What happens there.
        when: At which point of which iteration.
        boxes: Lane -> the file, and what it does; in the order in which they call each other.
    """

    title: str
    when: str
    boxes: dict[str, tuple[str, str]]


STATIONS = {
    "iteration N-3": [
        Station(
            "exchange of samples",
            "with balance: under the step, from\nthe copy of N-1 on",
            {
                "plugin": (
                    "plugin/loops/batch_stream.py",
                    "takes N from the DataLoader and\nstarts its exchange on a thread",
                ),
                "sparse": (
                    "balance/balancer.py",
                    "costs, the same assignment on all\nranks, samples: a thread of its own",
                ),
            },
        ),
    ],
    "iteration N-2": [
        Station(
            "copy_batch_to_device",
            "before the forward of N-2",
            {
                "runtime": (
                    "runtime/walker.py",
                    "runs the row on the memcpy stream;\nruntime/batches.py polls the ranks",
                ),
                "plugin": ("plugin/loops/batch_stream.py", "DataLoader, transfer hooks,\ncopy to the device"),
            },
        ),
        Station(
            "input_splits_dist",
            "after the forward of N-2",
            {
                "runtime": ("runtime/walker.py", "reads whether all ranks have N:\nruntime/batches.py"),
                "sparse": ("sparse/input_sizes.py", "sizes of all modules' inputs; they\nleave with the ids of N-1"),
            },
        ),
    ],
    "iteration N-1": [
        Station(
            "input_data_dist",
            "after the forward of N-1",
            {
                "runtime": ("runtime/walker.py", "runs the row on the data_dist\nstream: runtime/streams.py"),
                "sparse": (
                    "sparse/input_dist.py",
                    "reads the sizes of N on the host, starts\nits ids' all-to-all with the sizes of N+1",
                ),
            },
        ),
        Station(
            "embedding_lookup",
            "after the backward of N-1",
            {
                "runtime": ("runtime/walker.py", "lets the lookup stream wait for\nthe last writer of the tables"),
                "sparse": ("sparse/flight.py", "TBE forward, then output_dist:\nthe all-to-all of embeddings"),
            },
        ),
    ],
    "iteration N": [
        Station(
            "next batch",
            "the loop asks for a batch",
            {
                "plugin": ("plugin/loops/fit_loop.py", "Lightning's loop with the\nlookahead fetcher in it"),
                "runtime": ("runtime/walker.py", "next_batch(): begins the iteration,\nreturns the copied batch"),
            },
        ),
        Station(
            "training_step",
            "the user's code, unchanged",
            {
                "plugin": ("plugin/step_hooks.py", "training_step(): unpacks the\ncopied batch, calls the user's"),
                "runtime": ("runtime/walker.py", "forward(): marks the batch as\nconsumed"),
                "sparse": ("sparse/flight.py", "serve(): gives its embeddings\nwhile the step runs"),
            },
        ),
        Station(
            "self.ebc(kjt)",
            "inside training_step",
            {
                "sparse": (
                    "sparse/module_forward.py",
                    "same KJT: the early embeddings,\nwaited for at the merge; any other\ninput: the own forward",
                ),
            },
        ),
        Station(
            "backward",
            "writes the fused tables",
            {
                "plugin": ("plugin/step_hooks.py", "pre_backward(), post_backward()\naround loss.backward()"),
                "runtime": ("runtime/walker.py", "rows that run while autograd\nwaits for other ranks (CPU)"),
                "sparse": (
                    "sparse/update_rates.py",
                    "the TBE backward applies the fused\noptimizer at this step's rate",
                ),
            },
        ),
        Station(
            "optimizer step",
            "dense parameters",
            {
                "plugin": ("plugin/step_hooks.py", "optimizer_step(): DDP's, then\ntells the walker"),
                "runtime": (
                    "runtime/walker.py",
                    "after(OPTIMIZER_STEP): looks up\ntables of the dense optimizer for N+1",
                ),
            },
        ),
        Station(
            "end of batch",
            "counted as trained",
            {
                "plugin": ("plugin/step_hooks.py", "end_optimization(); loggers,\ncheckpoints, progress follow"),
                "runtime": ("runtime/walker.py", "the batch leaves those in flight:\nruntime/batches.py"),
            },
        ),
    ],
    "iteration N+1": [
        Station(
            "deferred update",
            "in modes with defer_update:\nafter the forward of N+1",
            {
                "runtime": ("runtime/deferred_updates.py", "keeps batches whose tables are\nstill to be written"),
                "sparse": ("sparse/deferred_update.py", "waits for the gradients, runs the\nTBE backward then"),
            },
        ),
    ],
}

NOTE = """\
A mode is a table in schedules/modes.py: it says in which order and how early the walker issues these steps.
Before the first batch plugin/strategy.py shards the tables (tables/sharding.py) and finds the modules that can be
looked up early (tables/supported_modules.py); profiling/recorder.py records what each step did when."""

WIDTH, ROW, TOP, BOTTOM = 12.0, 0.92, 1.12, 0.74
BOX_WIDTH, BOX_HEIGHT = 2.72, 0.76
LANE_X = {lane: 3.3 + 2.88 * number for number, lane in enumerate(LANES)}
MUTED, INK = "#6a6a6a", "#222222"


def draw(path: Path) -> None:
    """Draw all stations, one beneath the other, into a PNG."""
    height = TOP + ROW * sum(map(len, STATIONS.values())) + BOTTOM
    figure = Figure(figsize=(WIDTH, height), dpi=120, facecolor="white")
    FigureCanvasAgg(figure)
    axes = figure.add_axes((0, 0, 1, 1))
    axes.set_xlim(0, WIDTH)
    axes.set_ylim(height, 0)
    axes.axis("off")
    axes.text(0.2, 0.3, "The way of batch N through fused_sparse_dist", fontsize=13, fontweight="bold", va="center")
    for lane, does in LANES.items():
        middle = LANE_X[lane] + BOX_WIDTH / 2
        axes.add_patch(Rectangle((LANE_X[lane], 0.98), BOX_WIDTH, 0.05, facecolor=COLORS[lane], linewidth=0))
        axes.text(middle, 0.66, f"{lane}/", fontsize=12, fontweight="bold", ha="center", va="center", color=INK)
        axes.text(middle, 0.88, does, fontsize=9, ha="center", va="center", color=MUTED)
    top, number = TOP, 0
    for shade, (iteration, stations) in enumerate(STATIONS.items()):
        tall = ROW * len(stations)
        axes.add_patch(
            Rectangle((0.1, top), WIDTH - 0.2, tall, facecolor="#f5f6f8" if shade % 2 == 0 else "white", linewidth=0)
        )
        if top > TOP:
            axes.axhline(top, color="#444444", linewidth=0.8, linestyle=(0, (4, 3)), zorder=1)
        axes.text(0.29, top + tall / 2, iteration, fontsize=9, rotation=90, ha="center", va="center", color=MUTED)
        for station in stations:
            number += 1
            _draw_station(axes, number, station, top + ROW / 2)
            top += ROW
    line = {"color": "#b0b0b0", "linewidth": 1.6, "zorder": 1}
    axes.plot((0.72, 0.72), (TOP + ROW / 2, top - ROW / 2), **line)
    axes.text(
        0.2,
        top + 0.38,
        NOTE,
        fontsize=8.6,
        va="center",
        color=INK,
        linespacing=1.4,
    )
    figure.savefig(path, format="png", metadata={"Software": None})


def _draw_station(axes: Axes, number: int, station: Station, y: float) -> None:
    axes.add_patch(Circle((0.72, y), 0.19, facecolor="white", edgecolor=INK, linewidth=1.2, zorder=2))
    axes.text(0.72, y + 0.01, str(number), fontsize=9.5, ha="center", va="center", zorder=3)
    axes.text(1.05, y - 0.13, station.title, fontsize=10.5, fontweight="bold", va="center", color=INK)
    axes.text(1.05, y + 0.08, station.when, fontsize=8.6, va="top", color=MUTED, linespacing=1.15)
    lanes = list(station.boxes)
    for lane, (file, does) in station.boxes.items():
        _draw_box(axes, lane, y, file, does)
    for caller, called in pairwise(lanes):
        left_to_right = LANE_X[caller] < LANE_X[called]
        start = LANE_X[caller] + (BOX_WIDTH if left_to_right else 0)
        end = LANE_X[called] + (0 if left_to_right else BOX_WIDTH)
        axes.annotate(
            "", (end, y), (start, y), arrowprops={"arrowstyle": "-|>", "color": INK, "shrinkA": 1, "shrinkB": 1}
        )


def _draw_box(axes: Axes, lane: str, y: float, file: str, does: str) -> None:
    left, top = LANE_X[lane], y - BOX_HEIGHT / 2
    axes.add_patch(Rectangle((left, top), BOX_WIDTH, BOX_HEIGHT, facecolor=COLORS[lane], linewidth=0, zorder=2))
    lines = does.count("\n") + 1
    above = 0.19 if lines < 3 else 0.13
    axes.text(left + 0.1, top + above, file, fontsize=9.2, family="monospace", va="center", zorder=3, color=INK)
    axes.text(left + 0.1, top + above + 0.1, does, fontsize=8.3, va="top", zorder=3, color=INK, linespacing=1.15)


if __name__ == "__main__":
    draw(Path(__file__).with_name("architecture.png"))
