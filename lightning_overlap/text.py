"""Texts that several parts print: names that are unknown, the first of many names, aligned columns."""

from __future__ import annotations

import difflib
from collections.abc import Collection, Iterable, Sequence

SCALES_LOSS = (
    "scales the loss, and fused tables would be updated with scaled gradients inside backward. Use {instead}, which "
    "needs no scaling"
)
"""Why the precision `16-mixed` is refused, by the strategy and by the command before a rank starts."""


def unknown_name_message(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for a name of a kind ("table", "mode") that is not known; it offers the nearest ones first."""
    known = list(known)
    nearest = difflib.get_close_matches(name, known, n=3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}."


def some(names: Iterable[str], limit: int = 5) -> str:
    """Return the first of some names, and how many more there are; nothing where there are none."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def or_dash(value: object, form: str) -> str:
    """Return a value in a form of `str.format`, a dash for None."""
    return "-" if value is None else form.format(value)


def aligned(rows: Sequence[Sequence[str]], *, words: Collection[int] = (0,), ruled: bool = True) -> str:
    """Return rows of cells as text in columns.

    Args:
        rows: As many cells in each.
        words: The columns that start at the left; all others end at the right, as numbers do.
        ruled: Draw a line under the first row.
    """
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if column in words else ">" for column in range(len(widths))]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)) for row in rows
    ]
    if ruled:
        lines.insert(1, "-" * len(lines[0]))
    return "\n".join(line.rstrip() for line in lines)
