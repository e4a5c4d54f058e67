"""Draw timelines as a PNG, with matplotlib; `draw_html.py` writes the same picture as a page to zoom into."""

from __future__ import annotations

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schedules import Stage
from . import layout
from .layout import EXPOSED_COLOR, LOOKS, NUM_STEPS, Lane, Panel
from .report import headline, label
from .spans import Category, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_RANKS = 16
"""Ranks in one picture; its last line says how many it left out."""

_WIDTH_IN, _ROW_IN, _DPI = 16.0, 0.34, 120
_PANEL_IN, _TOP_IN, _BOTTOM_IN = 0.62, 0.38, 0.62
_LEFT, _RIGHT = 0.115, 0.988
_LEAST_WIDTH = 3e-4  # of the axes: half a pixel
_CHARACTER_IN = 0.062
"""Width of a character of a bar's text."""

_STYLES: Mapping[Category, dict[str, Any]] = {
    Category.LOOKUP: {"hatch": "....", "edgecolor": "white"},
    Category.WAIT: {"hatch": "/////", "facecolor": LOOKS[Category.WAIT].color, "edgecolor": EXPOSED_COLOR},
}
"""What matplotlib draws besides the colour of a bar."""


def write_png(
    path: Path | str,
    ranks: Mapping[int | str, Sequence[Span]],
    *,
    num_steps: int = NUM_STEPS,
    title: str = "",
    overlapped: Mapping[int | str, Collection[Stage]] | None = None,
) -> None:
    """Draw a few steady steps: a lane per stream or thread, the ranks beneath each other.

    Args:
        path: Where the PNG is written.
        ranks: The spans of each rank.
        num_steps: Steps to draw.
        title: Heading of the picture; "Timeline" if empty.
        overlapped: The stages that each rank's mode overlaps, where they are known: what goes on beside other work in a
            mode that overlaps nothing is not called hidden.

    Raises:
        ValueError: There is nothing to draw, or `num_steps` is below 1.
    """
    from matplotlib.backends.backend_agg import FigureCanvasAgg
    from matplotlib.figure import Figure as Canvas
    from matplotlib.legend_handler import HandlerPatch
    from matplotlib.patches import Patch, Rectangle

    class AsTallAsItsBar(HandlerPatch):  # matplotlib takes long to import: only where something is drawn
        def _create_patch(self, legend: Any, handle: Any, x: float, y: float, w: float, h: float, size: float) -> Any:
            tall = h * float(handle.get_gid() or 0.84) / 0.84
            return Rectangle((-x, -y + (h - tall) / 2), w, tall)

    drawn = dict(list(ranks.items())[:MAX_RANKS])
    panels = layout.lay_out(drawn, num_steps=num_steps, resolution=4e-4, overlapped=overlapped)
    batches = layout.by_batch(panels)
    heights = [_PANEL_IN + _ROW_IN * (panel.num_rows + 0.8) for panel in panels]
    height = _TOP_IN + sum(heights) + _BOTTOM_IN
    canvas = Canvas(figsize=(_WIDTH_IN, height), dpi=_DPI, facecolor="white")
    FigureCanvasAgg(canvas)
    top = height - _TOP_IN
    for panel, panel_height in zip(panels, heights, strict=True):
        bottom = top - panel_height
        axes = canvas.add_axes((_LEFT, (bottom + 0.28) / height, _RIGHT - _LEFT, (panel_height - _PANEL_IN) / height))
        _draw(axes, panel, batches)
        top = bottom
    canvas.text(0.012, 1 - 0.24 / height, title or "Timeline", fontsize=13, fontweight="bold", va="center")
    left_out = len(ranks) - len(drawn)
    note = f"; {left_out} more ranks are not drawn" if left_out else ""
    about = "figures: mean of all steps of the trace" if panels[0].summary.num_steps > 1 else ""
    canvas.text(_RIGHT, 1 - 0.24 / height, about + note, fontsize=8.5, color="#666666", ha="right", va="center")
    canvas.legend(
        handles=_legend(panels, batches),
        loc="lower center",
        bbox_to_anchor=(0.5, 0.06 / height),
        ncols=8,
        frameon=False,
        fontsize=8.5,
        handlelength=1.8,
        handler_map={Patch: AsTallAsItsBar()},
    )
    canvas.savefig(path, format="png")


def _draw(axes: Axes, panel: Panel, batches: bool) -> None:
    start, _ = panel.window
    axes.set_xlim(0, panel.length_ms)
    axes.set_ylim(panel.num_rows + 0.8, 0)
    axes.set_title(f"{label(panel.rank)}: {headline(panel.summary)}", loc="left", fontsize=9.5, pad=5)
    axes.set_xlabel("ms", fontsize=8, loc="right", labelpad=-9)
    axes.tick_params(axis="x", labelsize=8, length=2)
    axes.tick_params(axis="y", labelsize=8.5, length=0)
    for side in ("top", "right", "left"):
        axes.spines[side].set_visible(False)
    for step in panel.steps:
        axes.axvline(step - start, color="#444444", linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
    ticks, words, first_row = [], [], 0
    for number, lane in enumerate(panel.lanes):
        if number % 2 == 0:
            axes.axhspan(first_row, first_row + lane.num_rows, color="#f5f6f8", linewidth=0, zorder=-1)
        _draw_bars(axes, panel, lane, first_row, batches)
        ticks.append(first_row + lane.num_rows / 2)
        does = layout.shares(lane)
        words.append(f"{lane.name}\n{does}" if does and does != lane.name else lane.name)
        first_row += lane.num_rows
    exposed = [(begin - start, end - begin) for begin, end in panel.exposed]
    axes.broken_barh(exposed, (first_row + 0.12, 0.5), facecolor=EXPOSED_COLOR, linewidth=0)
    axes.set_yticks([*ticks, first_row + 0.37], [*words, "exposed collectives"])
    axes.get_yticklabels()[-1].set_color(EXPOSED_COLOR)


def _draw_bars(axes: Axes, panel: Panel, lane: Lane, first_row: int, batches: bool) -> None:
    inches_per_ms = _WIDTH_IN * (_RIGHT - _LEFT) / panel.length_ms
    alike: defaultdict[tuple[int, Category, str], list[tuple[float, float]]] = defaultdict(list)
    for bar in lane.bars:
        span, left = bar.span, bar.span.start_ms - panel.window[0]
        width = max(span.duration_ms, _LEAST_WIDTH * panel.length_ms)
        alike[bar.row, span.kind, layout.color_of(span, batches=batches)].append((left, width))
        words = layout.text_of(span, batches=batches)
        if len(words) * _CHARACTER_IN < span.duration_ms * inches_per_ms and LOOKS[span.kind].height > 0.5:
            _write(axes, left + span.duration_ms / 2, first_row + bar.row + 0.5, words, span.kind)
    for (row, kind, color), extents in alike.items():
        share = LOOKS[kind].height
        options = {"facecolor": color, "linewidth": 0.0, "alpha": LOOKS[kind].opacity, **_STYLES.get(kind, {})}
        axes.broken_barh(extents, (first_row + row + 0.5 - share / 2, share), **options)


def _write(axes: Axes, x: float, y: float, words: str, kind: Category) -> None:
    plate = {"facecolor": "white", "alpha": 0.75, "pad": 0.6, "linewidth": 0} if kind is Category.WAIT else None
    color = EXPOSED_COLOR if kind is Category.WAIT else "#1a1a1a"
    axes.text(
        x, y, words, ha="center", va="center_baseline", fontsize=7.2, color=color, clip_on=True, bbox=plate, zorder=3
    )


def _legend(panels: Sequence[Panel], batches: bool) -> list[Any]:
    from matplotlib.patches import Patch

    colors, kinds = layout.legend(panels, batches=batches)
    handles = [Patch(facecolor=color, label=words) for color, words in colors]
    for kind in kinds:
        style = {"facecolor": LOOKS[kind].color, "linewidth": 0.0, **_STYLES.get(kind, {})}
        patch = Patch(**style, label=LOOKS[kind].words)
        patch.set_gid(str(LOOKS[kind].height))
        handles.append(patch)
    handles.append(Patch(facecolor=EXPOSED_COLOR, label="exposed collective"))
    return handles
