"""Draw timelines as a PNG, with matplotlib."""

from collections import defaultdict
from collections.abc import Collection, Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from ..schedules import Stage
from .layout import EXPOSED_COLOR, LOOKS, NUM_STEPS, Panel, Picture
from .spans import Category, Span

if TYPE_CHECKING:
    from matplotlib.axes import Axes

MAX_RANKS = 16  # per picture; the title gives the number of the others

_WIDTH_IN, _ROW_IN, _DPI = 16.0, 0.34, 120
_PANEL_IN, _TOP_IN, _BOTTOM_IN = 0.62, 0.38, 0.62
_LEFT, _RIGHT = 0.115, 0.988
_LEAST_WIDTH, _RESOLUTION = 3e-4, 4e-4  # of the axes: half a pixel, and a bit more
_CHARACTER_IN = 0.062  # width of a character of a bar's text

_TEXT: Mapping[str, Any] = {"ha": "center", "va": "center_baseline", "fontsize": 7.2, "clip_on": True, "zorder": 3}
_WAIT_TEXT = {"color": EXPOSED_COLOR, "bbox": {"facecolor": "white", "alpha": 0.75, "pad": 0.6, "linewidth": 0}}


def check_matplotlib() -> None:
    """Raise an ImportError if matplotlib cannot be imported."""
    try:
        import matplotlib  # noqa: F401
    except ImportError as err:
        raise ImportError(
            f"drawing timelines needs matplotlib, which cannot be imported ({err}): "
            "pip install 'lightning_overlap[plot]'"
        ) from err


def write_png(
    path: Path | str,
    ranks: Mapping[int | str, Sequence[Span]],
    *,
    num_steps: int = NUM_STEPS,
    title: str = "",
    overlapped: Mapping[int | str, Collection[Stage]] | None = None,
) -> None:
    """Draw a few typical steps of each rank as a PNG, with a lane per stream or thread.

    Args:
        path: The file.
        ranks: The spans of each rank.
        num_steps: Steps to draw.
        title: Title of the picture; "Timeline" if empty.
        overlapped: Rank -> stages that its mode overlaps, as for `break_down`.

    Raises:
        ValueError: There is nothing to draw, or `num_steps` is below 1.
        ImportError: matplotlib cannot be imported.
    """
    check_matplotlib()
    from matplotlib.figure import Figure
    from matplotlib.legend_handler import HandlerPatch
    from matplotlib.patches import Patch, Rectangle

    def as_tall_as_its_bar(*, orig_handle: Any, width: float, height: float, **_: Any) -> Any:
        tall = height * float(orig_handle.get_gid() or 0.84) / 0.84
        return Rectangle((0, (height - tall) / 2), width, tall)

    drawn = dict(list(ranks.items())[:MAX_RANKS])
    picture = Picture(drawn, num_steps=num_steps, resolution=_RESOLUTION, overlapped=overlapped)
    panels = picture.panels
    heights = [_PANEL_IN + _ROW_IN * (panel.num_rows + 0.8) for panel in panels]
    height = _TOP_IN + sum(heights) + _BOTTOM_IN
    canvas = Figure(figsize=(_WIDTH_IN, height), dpi=_DPI, facecolor="white")
    top = height - _TOP_IN
    for panel, panel_height in zip(panels, heights, strict=True):
        bottom = top - panel_height
        axes = canvas.add_axes((_LEFT, (bottom + 0.28) / height, _RIGHT - _LEFT, (panel_height - _PANEL_IN) / height))
        _draw(axes, picture, panel)
        top = bottom
    canvas.text(0.012, 1 - 0.24 / height, title or "Timeline", fontsize=13, fontweight="bold", va="center")
    left_out = len(ranks) - len(drawn)
    note = f"; {left_out} more ranks are not drawn" if left_out else ""
    about = "figures: mean of all steps of the trace" if panels[0].num_steps > 1 else ""
    canvas.text(_RIGHT, 1 - 0.24 / height, about + note, fontsize=8.5, color="#666666", ha="right", va="center")
    colors, kinds = picture.legend()
    handles = [Patch(facecolor=color, label=words) for color, words in colors]
    for kind in kinds:
        patch = Patch(**_style(kind, LOOKS[kind].color), label=LOOKS[kind].words)
        patch.set_gid(str(LOOKS[kind].height))
        handles.append(patch)
    handles.append(Patch(facecolor=EXPOSED_COLOR, label="exposed collective"))
    canvas.legend(
        handles=handles,
        loc="lower center",
        bbox_to_anchor=(0.5, 0.06 / height),
        ncols=8,
        frameon=False,
        fontsize=8.5,
        handlelength=1.8,
        handler_map={Patch: HandlerPatch(patch_func=as_tall_as_its_bar)},
    )
    canvas.savefig(path, format="png")


def _draw(axes: "Axes", picture: Picture, panel: Panel) -> None:
    start, _ = panel.window
    axes.set_xlim(0, panel.length_ms)
    axes.set_ylim(panel.num_rows + 0.8, 0)
    axes.set_title(panel.title, loc="left", fontsize=9.5, pad=5)
    axes.set_xlabel("ms", fontsize=8, loc="right", labelpad=-9)
    axes.tick_params(axis="x", labelsize=8, length=2)
    axes.tick_params(axis="y", labelsize=8.5, length=0)
    axes.spines[["top", "right", "left"]].set_visible(False)
    for step in panel.steps:
        axes.axvline(step - start, color="#444444", linewidth=0.7, linestyle=(0, (4, 3)), zorder=0)
    ticks, words, first = [], [], 0
    for number, (lane, rows) in enumerate(panel.lanes.items()):
        if number % 2 == 0:
            axes.axhspan(first, first + len(rows), color="#f5f6f8", linewidth=0, zorder=-1)
        for place, row in enumerate(rows, first):
            _draw_bars(axes, picture, panel, row, place + 0.5)
        ticks.append(first + len(rows) / 2)
        words.append("\n".join(filter(None, (lane, panel.does(lane)))))
        first += len(rows)
    exposed = [(begin - start, end - begin) for begin, end in panel.exposed]
    axes.broken_barh(exposed, (panel.num_rows + 0.12, 0.5), facecolor=EXPOSED_COLOR, linewidth=0)
    axes.set_yticks([*ticks, panel.num_rows + 0.37], [*words, "exposed collectives"])
    axes.get_yticklabels()[-1].set_color(EXPOSED_COLOR)


def _draw_bars(axes: "Axes", picture: Picture, panel: Panel, row: Sequence[Span], middle: float) -> None:
    inches_per_ms = _WIDTH_IN * (_RIGHT - _LEFT) / panel.length_ms
    alike: defaultdict[tuple[Category, str], list[tuple[float, float]]] = defaultdict(list)
    for span in row:
        left, width = span.start_ms - panel.window[0], max(span.duration_ms, _LEAST_WIDTH * panel.length_ms)
        alike[span.kind, picture.color(span)].append((left, width))
        words = picture.words(span)
        if len(words) * _CHARACTER_IN < span.duration_ms * inches_per_ms and LOOKS[span.kind].height > 0.5:
            style = _WAIT_TEXT if span.kind is Category.WAIT else {"color": "#1a1a1a"}
            axes.text(left + span.duration_ms / 2, middle, words, **_TEXT, **style)
    for (kind, color), extents in alike.items():
        share = LOOKS[kind].height
        axes.broken_barh(extents, (middle - share / 2, share), alpha=LOOKS[kind].opacity, **_style(kind, color))


def _style(kind: Category, color: str) -> dict[str, Any]:
    style: dict[str, Any] = {"facecolor": color, "linewidth": 0.0}
    if kind is Category.LOOKUP:
        style |= {"hatch": "....", "edgecolor": "white"}
    elif kind is Category.WAIT:
        style |= {"hatch": "/////", "facecolor": LOOKS[kind].color, "edgecolor": EXPOSED_COLOR}
    return style
