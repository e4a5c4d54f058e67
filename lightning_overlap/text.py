"""Texts that several parts print: names that are unknown, aligned columns."""

from __future__ import annotations

import difflib
from collections.abc import Mapping, Sequence


def unknown_name_message(kind: str, name: str, known: Mapping[str, object]) -> str:
    """Return the message for a name that is unknown; it offers the nearest known names first.

    Args:
        kind: What is named, for the message: "table", "mode".
        name: The name the user gave.
        known: All valid names; the values are not read.
    """
    nearest = difflib.get_close_matches(name, list(known), n=3, cutoff=0.4)
    hint = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}."


def aligned(rows: Sequence[tuple[str, Sequence[str]]]) -> str:
    """Return rows of (name, cells) as text in columns, a line under the first."""
    name_width = max(len(name) for name, _ in rows)
    widths = [max(len(cell) for cell in column) for column in zip(*(cells for _, cells in rows), strict=True)]
    lines = [
        f"{name:<{name_width}}  " + "  ".join(f"{cell:>{w}}" for cell, w in zip(cells, widths, strict=True))
        for name, cells in rows
    ]
    lines.insert(1, "-" * len(lines[0]))
    return "\n".join(lines)
