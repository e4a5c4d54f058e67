"""Draw `steps.svg` and, for narrow screens, `steps_narrow.svg`: the front page's picture of a step in three modes.

Run `python docs/draw_steps.py` after a change. The README shows `steps.svg`; the site puts both into the page, and
shows the one that fits.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path

# How long each part of a step takes, in the picture's own unit: the parts are alike in all three modes.
IDS, LOOKUP, FORWARD, BACKWARD, GRADIENTS, STEP = 4.0, 4.0, 5.0, 6.5, 3.5, 4.5
INPUTS, WEIGHTS = 3.0, 3.5  # the backward's two halves


@dataclass(frozen=True)
class Bar:
    """A part of a step: what it is, of which batch (N is 0), its start and its end; waiting if it has no batch."""

    words: str
    batch: int | None
    start: float
    end: float


@dataclass(frozen=True)
class Panel:
    """A mode: its title, and what the device computes and the link carries, batch by batch."""

    title: str
    note: str
    period: float  # a step's length
    compute: tuple[Bar, ...]  # of the first step, as the next
    link: tuple[Bar, ...]


def _row(start: float, *parts: tuple[str, int | None, float]) -> tuple[Bar, ...]:
    bars = []
    for words, batch, length in parts:
        bars.append(Bar(words, batch, start, start + length))
        start += length
    return tuple(bars)


_BASE_WAIT = IDS + LOOKUP
PANELS = (
    Panel(
        "before",
        'pipeline="base": nothing starts early',
        _BASE_WAIT + FORWARD + BACKWARD + GRADIENTS + STEP,
        (
            *_row(0, ("wait", None, _BASE_WAIT), ("forward", 0, FORWARD), ("backward", 0, BACKWARD)),
            *_row(_BASE_WAIT + FORWARD + BACKWARD, ("wait", None, GRADIENTS), ("step", 0, STEP)),
        ),
        (
            *_row(0, ("ids", 0, IDS), ("lookup", 0, LOOKUP)),
            *_row(_BASE_WAIT + FORWARD + BACKWARD, ("grads", 0, GRADIENTS)),
        ),
    ),
    Panel(
        "after",
        'pipeline="fused_sparse_dist", the default',
        FORWARD + BACKWARD + GRADIENTS + STEP,
        _row(0, ("forward", 0, FORWARD), ("backward", 0, BACKWARD), ("wait", None, GRADIENTS), ("step", 0, STEP)),
        (
            *_row(FORWARD, ("ids", 1, IDS)),
            *_row(FORWARD + BACKWARD, ("grads", 0, GRADIENTS), ("lookup", 1, LOOKUP)),
        ),
    ),
    Panel(
        "split",
        'pipeline="split_backward": gradients of inputs, then of weights',
        FORWARD + INPUTS + WEIGHTS + STEP,
        _row(0, ("forward", 0, FORWARD), ("inputs", 0, INPUTS), ("weights", 0, WEIGHTS), ("step", 0, STEP)),
        (
            *_row(FORWARD - IDS + INPUTS, ("ids", 1, IDS)),
            *_row(FORWARD + INPUTS, ("grads", 0, GRADIENTS), ("lookup", 1, LOOKUP)),
        ),
    ),
)
ALT = (
    "Three timelines of a training step. Before: the step waits for its ids, its lookup and its gradients. After: ids "
    "and lookup of the next batch travel while this batch computes. Split: so do the gradients, during the second half "
    "of the backward."
)

LEGEND = ("grads: the gradients of the tables; a colour is a batch; a dashed line ends a step",)
MUTED = 'fill="currentColor" opacity=".75"'
COLORS = ("#8f98dc", "#74bccd", "#b3bd55", "#c294b4")  # by batch, as on timelines
STYLE = """\
.steps-drawing { color: #1f2328; font-family: system-ui, "DejaVu Sans", sans-serif; }
.steps-drawing .paper { fill: #ffffff; }
.steps-drawing .lane { fill: #f4f5f7; }
.steps-drawing .wait { fill: #fff4f2; }
.steps-drawing .waits { fill: #c62021; stroke: #fff4f2; stroke-width: 3px; paint-order: stroke; }
.steps-drawing .words { fill: #15181c; }
@media (prefers-color-scheme: dark) {
  .steps-drawing { color: #e6edf3; }
  .steps-drawing .paper { fill: #1e2129; }
  .steps-drawing .lane { fill: #2b2f3a; }
  .steps-drawing .wait { fill: #3a2224; }
  .steps-drawing .waits { fill: #ffb3ad; stroke: #3a2224; }
}
"""


@dataclass(frozen=True)
class Form:
    """Sizes of a drawing, in pixels where it is shown as wide as it is."""

    name: str
    width: int
    left: int  # of the lanes; their names are before it, or above them if 0
    window: float  # how much time is shown
    font: float
    bar: int
    gap: int


FORMS = (Form("steps", 900, 58, 42.0, 13, 34, 8), Form("steps_narrow", 368, 0, 28.4, 9.6, 34, 6))


def draw(form: Form) -> str:
    """Return the drawing as SVG."""
    scale = (form.width - form.left) / form.window
    y, parts = 4.0, []
    for panel in PANELS:
        head = f'<tspan font-weight="700">{panel.title}</tspan><tspan dx="8" opacity=".75">{panel.note}</tspan>'
        y += form.font * 1.3
        parts.append(f'<text x="0" y="{y:.1f}" font-size="{form.font * 1.08:.1f}" fill="currentColor">{head}</text>')
        y += 9
        for lane, bars in (("device", panel.compute), ("link", panel.link)):
            tall = form.bar if lane == "device" else form.bar * 0.86
            rect = f'x="{form.left}" y="{y - 2:.1f}" width="{form.width - form.left}" height="{tall + 4:.1f}"'
            parts.append(f'<rect class="lane" {rect}/>')
            if form.left:
                middle = y + tall / 2 + form.font * 0.35
                parts.append(f'<text x="0" y="{middle:.1f}" font-size="{form.font}" fill="currentColor">{lane}</text>')
            for bar in _repeated(bars, panel.period, form.window):
                parts += _bar(form, bar, scale, y, tall)
            y += tall + 6
        for number in range(1, 4):
            at = form.left + panel.period * number * scale
            if at <= form.width:
                top = y - form.bar * 1.86 - 18
                parts.append(
                    f'<line x1="{at:.1f}" x2="{at:.1f}" y1="{top:.1f}" y2="{y - 2:.1f}" stroke="currentColor" '
                    'stroke-width="1" stroke-dasharray="4 3"/>'
                )
        y += form.gap
    y -= form.gap / 2
    for line in LEGEND if form.left else ("upper row: the device; lower row: the link", *LEGEND):
        y += form.font * 1.2
        parts.append(f'<text x="{form.left}" y="{y:.1f}" font-size="{form.font}" {MUTED}>{line}</text>')
    height = y + 8
    hatch = (
        f'<pattern id="{form.name}-hatch" width="7" height="7" patternUnits="userSpaceOnUse" '
        'patternTransform="rotate(45)">'
        '<rect class="wait" width="7" height="7"/><rect width="2.2" height="7" fill="#d62728" opacity=".6"/></pattern>'
    )
    return (
        f'<svg xmlns="http://www.w3.org/2000/svg" class="steps-drawing {form.name}" role="img" '
        f'viewBox="0 0 {form.width} {height:.0f}" aria-label="{ALT}">\n<style>\n{STYLE}</style>\n<defs>{hatch}</defs>\n'
        f'<rect class="paper" width="{form.width}" height="{height:.0f}"/>\n' + "\n".join(parts) + "\n</svg>\n"
    )


def _repeated(bars: tuple[Bar, ...], period: float, window: float) -> Iterator[Bar]:
    for number in range(-1, 4):
        for bar in bars:
            batch = None if bar.batch is None else bar.batch + number
            start, end = max(bar.start + number * period, 0), min(bar.end + number * period, window)
            if end - start > 0.05:
                yield Bar(bar.words, batch, start, end)


def _bar(form: Form, bar: Bar, scale: float, y: float, tall: float) -> Iterator[str]:
    left, width = form.left + bar.start * scale, (bar.end - bar.start) * scale
    fill = f"url(#{form.name}-hatch)" if bar.batch is None else COLORS[bar.batch % len(COLORS)]
    yield f'<rect x="{left:.1f}" y="{y:.1f}" width="{max(width - 1, 0.5):.1f}" height="{tall:.1f}" fill="{fill}"/>'
    batch = "" if bar.batch is None else f"N{bar.batch:+d}" if bar.batch else "N"
    one_line = f"{bar.words} {batch}".strip()
    lines = [one_line] if len(one_line) * form.font * 0.58 < width - 4 else [bar.words, batch]
    if max(map(len, lines)) * form.font * 0.56 > width:
        return
    kind = "waits" if bar.batch is None else "words"
    for number, words in enumerate(line for line in lines if line):
        base = y + tall / 2 + form.font * (0.35 + (number - (len(lines) - 1) / 2) * 1.15)
        yield (
            f'<text class="{kind}" x="{left + width / 2:.1f}" y="{base:.1f}" font-size="{form.font}" '
            f'text-anchor="middle">{words}</text>'
        )


if __name__ == "__main__":
    for form in FORMS:
        Path(__file__).with_name(f"{form.name}.svg").write_text(draw(form), encoding="utf-8")
