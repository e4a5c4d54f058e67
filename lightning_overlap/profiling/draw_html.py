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
from .layout import EXPOSED_COLOR, LOOKS, NUM_STEPS, Panel, Picture
from .report import Table, label, tables
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
    """Write the page, a file with all that it needs inside; arguments and errors are those of `write_png`."""
    picture = Picture(ranks, num_steps=num_steps, resolution=_RESOLUTION, overlapped=overlapped)
    data = json.dumps([_data(picture, panel) for panel in picture.panels], separators=(",", ":"))
    template = resources.files(__package__).joinpath("page.html").read_text(encoding="utf-8")
    parts = {
        "{{title}}": html.escape(title or "Timeline"),
        "{{exposed}}": EXPOSED_COLOR,
        "{{colors}}": _legend(picture),
        "{{heights}}": json.dumps({kind: look.height for kind, look in LOOKS.items()}),
        "{{opacity}}": json.dumps({kind: look.opacity for kind, look in LOOKS.items()}),
        "{{tables}}": "\n".join(map(_section, picture.panels)),
        # Inside a script "</" could end it, whatever the name of a kernel may hold.
        "{{data}}": data.replace("</", "<\\/").replace("<!--", "<\\!--"),
    }
    text = re.sub(r"\{\{\w+\}\}", lambda mark: parts[mark.group()], template)
    Path(path).write_text(text, encoding="utf-8")


def _data(picture: Picture, panel: Panel) -> dict[str, Any]:
    start = panel.window[0]

    def bar(span: Span, row: int) -> list[Any]:
        hidden = panel.hidden(span)
        about = (
            span.name,
            f"{span.stage or ''} {'' if span.batch is None else f'batch {span.batch}'}".strip(),
            f"{span.kind}, {span.duration_ms:.3f} ms" + ("" if hidden is None else f", {100 * hidden:.0f} % hidden"),
            span.detail,
        )
        begin, end = round(span.start_ms - start, 5), round(span.end_ms - start, 5)
        return [begin, end, row, span.kind, picture.color(span), picture.words(span), "\n".join(filter(None, about))]

    lanes: list[dict[str, Any]] = []
    first = 0
    for name, rows in panel.lanes.items():
        bars = [bar(span, number) for number, row in enumerate(rows) for span in row]
        lanes.append({"name": name, "does": panel.does(name), "row": first, "rows": len(rows), "bars": bars})
        first += len(rows)
    return {
        "title": panel.title,
        "length": panel.length_ms,
        "rows": first,
        "steps": [round(step - start, 5) for step in panel.steps],
        "lanes": lanes,
        "exposed": [[round(begin - start, 5), round(end - start, 5)] for begin, end in panel.exposed],
    }


def _legend(picture: Picture) -> str:
    """Return the legend: the same words and colours as in the PNG."""
    colors, kinds = picture.legend()
    parts = [f'<i style="background:{color}"></i>{words}' for color, words in colors]
    for kind in kinds:
        style = f"background-color:{LOOKS[kind].color};height:{14 * LOOKS[kind].height:.0f}px"
        parts.append(f'<i class="{kind}" style="{style}"></i>{LOOKS[kind].words}')
    return " ".join(f"<span>{part}</span>" for part in parts)


def _section(panel: Panel) -> str:
    parts = "\n".join(map(_table, tables(panel.found)))
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
