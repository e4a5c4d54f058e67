"""A timeline as one HTML page that opens without a network: zoom, pan, names under the pointer, and the tables."""

from __future__ import annotations

import html
import json
import re
from collections.abc import Collection, Mapping, Sequence
from importlib import resources
from pathlib import Path
from typing import Any

from ..schedules import Stage
from . import layout
from .layout import LOOKS, NUM_STEPS, Panel
from .report import Table, headline, label, tables
from .spans import Span

_RESOLUTION = 2e-5
"""Neighbours nearer than this share of the drawn time are one bar; zoomed in fifty times they are 1 pixel apart."""


def write_html(
    path: Path | str,
    ranks: Mapping[int | str, Sequence[Span]],
    *,
    num_steps: int = NUM_STEPS,
    title: str = "",
    overlapped: Mapping[int | str, Collection[Stage]] | None = None,
) -> None:
    """Write the page.

    Args:
        path: The file; all that it needs is inside.
        ranks: The spans of each rank.
        num_steps: Steps to show.
        title: Heading of the page.
        overlapped: The stages that each rank's mode overlaps, where they are known: what goes on beside other work in a
            mode that overlaps nothing is not called hidden.

    Raises:
        ValueError: There is nothing to draw, or `num_steps` is below 1.
    """
    panels = layout.lay_out(ranks, num_steps=num_steps, resolution=_RESOLUTION, overlapped=overlapped)
    batches = layout.by_batch(panels)
    data = json.dumps([_data(panel, batches) for panel in panels], separators=(",", ":"), ensure_ascii=True)
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "{{title}}": html.escape(title or "Timeline"),
        "{{exposed}}": layout.EXPOSED_COLOR,
        "{{colors}}": _legend(panels, batches),
        "{{heights}}": json.dumps({str(kind): look.height for kind, look in LOOKS.items()}),
        "{{opacity}}": json.dumps({str(kind): look.opacity for kind, look in LOOKS.items()}),
        "{{tables}}": "\n".join(map(_section, panels)),
        # Inside a script "</" could end it, whatever the name of a kernel may hold.
        "{{data}}": data.replace("</", "<\\/").replace("<!--", "<\\!--"),
    }
    text = re.sub(r"\{\{\w+\}\}", lambda mark: parts[mark.group()], template)
    Path(path).write_text(text, encoding="utf-8")


def _data(panel: Panel, batches: bool) -> dict[str, Any]:
    start, _ = panel.window
    lanes, first_row = [], 0
    for lane in panel.lanes:
        bars = []
        for bar in lane.bars:
            span, hidden = bar.span, layout.hidden_in(panel, bar)
            said = "" if hidden is None else f", {100 * hidden:.0f} % hidden"
            about = (
                span.name if bar.count == 1 else f"{span.name} and {bar.count - 1} more",
                f"{span.stage or ''} {'' if span.batch is None else f'batch {span.batch}'}".strip(),
                f"{span.kind}, {span.duration_ms:.3f} ms{said}",
                span.detail,
            )
            bars.append(
                [
                    round(span.start_ms - start, 5),
                    round(span.end_ms - start, 5),
                    bar.row,
                    span.kind.value,
                    layout.color_of(span, batches=batches),
                    layout.text_of(span, batches=batches),
                    "\n".join(filter(None, about)),
                ]
            )
        lanes.append(
            {"name": lane.name, "does": layout.shares(lane), "row": first_row, "rows": lane.num_rows, "bars": bars}
        )
        first_row += lane.num_rows
    return {
        "label": label(panel.rank),
        "headline": headline(panel.summary),
        "length": panel.length_ms,
        "rows": first_row,
        "steps": [round(step - start, 5) for step in panel.steps],
        "lanes": lanes,
        "exposed": [[round(begin - start, 5), round(end - start, 5)] for begin, end in panel.exposed],
    }


def _legend(panels: Sequence[Panel], batches: bool) -> str:
    """Return the legend: the same words and colours as in the PNG."""
    colors, kinds = layout.legend(panels, batches=batches)
    parts = [f'<i style="background:{color}"></i>{words}' for color, words in colors]
    for kind in kinds:
        style = f"background-color:{LOOKS[kind].color};height:{14 * LOOKS[kind].height:.0f}px"
        parts.append(f'<i class="{kind}" style="{style}"></i>{LOOKS[kind].words}')
    return " ".join(f"<span>{part}</span>" for part in parts)


def _section(panel: Panel) -> str:
    parts = "\n".join(map(_table, tables(panel.summary)))
    return f"<section><h2>{html.escape(label(panel.rank))}</h2>\n{parts}\n</section>"


def _table(table: Table) -> str:
    def row(cells: Sequence[str], tag: str) -> str:
        texts = [
            f'<{tag} class="{"w" if number in table.words else "n"}">{html.escape(cell)}</{tag}>'
            for number, cell in enumerate(cells)
        ]
        return f"<tr>{''.join(texts)}</tr>"

    rows = "\n".join(row(cells, "td") for cells in table.rows)
    note = f"<p>{html.escape(table.note)}</p>" if table.note else ""
    return f"<table><thead>{row(table.head, 'th')}</thead><tbody>\n{rows}\n</tbody></table>{note}"
