"""Formatting shared by several folders: unknown names, long lists of names, aligned columns."""

import difflib
import re
from collections.abc import Collection, Iterable, Sequence

SCALES_LOSS = (
    "scales the loss, so the backward would update fused tables with scaled gradients. Use {instead}, which "
    "needs no scaling"
)
"""Why the precision `16-mixed` is rejected."""


def unknown_name_message(kind: str, name: str, known: Iterable[str]) -> str:
    """Return the message for an unknown name of a kind ("table", "mode"); it suggests the nearest known names."""
    known = list(known)
    nearest = nearest_names(name, known)
    hint = f" Did you mean {' or '.join(map(repr, nearest))}?" if nearest else ""
    return f"unknown {kind} {name!r}.{hint} Known: {', '.join(known)}."


def nearest_names(name: str, known: Collection[str]) -> list[str]:
    """Return up to three known names that resemble a name, the nearest first."""
    likeness = {one: difflib.SequenceMatcher(None, one, name).ratio() for one in known}
    cutoff = max(0.4, 0.85 * max(likeness.values(), default=0.0))  # a name much nearer than others stands alone
    return difflib.get_close_matches(name, known, n=3, cutoff=cutoff)


def check_known(kind: str, name: str, known: Collection[str], where: str = "") -> None:
    """Raise a ValueError that suggests the nearest names if a name is unknown; the message begins with `where`."""
    if name not in known:
        raise ValueError(where + unknown_name_message(kind, str(name), known))


def some(names: Iterable[str], limit: int = 5) -> str:
    """Return the first `limit` names and the number of the others; "" without names."""
    names = list(names)
    more = f" and {len(names) - limit} more" if len(names) > limit else ""
    return ", ".join(names[:limit]) + more


def or_dash(value: object, form: str) -> str:
    """Return `form.format(value)`, or a dash for None."""
    return "-" if value is None else form.format(value)


def aligned(rows: Sequence[Sequence[str]], *, words: Collection[int] = (0,), ruled: bool = True) -> str:
    """Return rows of cells as text, the columns in `words` left-aligned; with `ruled`, a line under the first row."""
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    sides = ["<" if column in words else ">" for column in range(len(widths))]
    lines = [
        "  ".join(f"{cell:{side}{width}}" for cell, side, width in zip(row, sides, widths, strict=True)) for row in rows
    ]
    if ruled:
        lines.insert(1, "-" * len(lines[0]))
    return "\n".join(line.rstrip() for line in lines)


_SECRET = (  # options of addresses whose values are secrets, in whatever words a service has for them
    r"(?i)(?<![\w.-])((?:sig|sas|[\w.-]*(?:passw|passphrase|pwd|secret|token|signature|credential|auth|access_?key|"
    r"account_?key|api_?key)[\w.-]*)=)"
)


def without_secrets(address: str) -> str:
    """Return an address with `***` for its password and the secrets of its options, whatever characters they have.

    It may replace more: what stands between the first colon after `://` and the last `@` may be a password.
    """
    address = re.sub(rf"{_SECRET}[^&]*", r"\1***", address, flags=re.DOTALL)
    return re.sub(r"(?<=://)([^:]*):.*@", r"\1:***@", address, flags=re.DOTALL)


def message_without_secrets(text: str, *addresses: str) -> str:
    """Return an error's text without the secrets of addresses: of these ones, also in parts, and of any others."""
    for address in addresses:
        text = text.replace(address, without_secrets(address))
        for part in sorted(_secret_parts(address), key=len, reverse=True):
            text = text.replace(part, "***")
    text = re.sub(rf"{_SECRET}[^&\s'\"]*", r"\1***", text)
    return re.sub(r"(?<=://)([^:\s'\"]*):[^\s'\"]*@", r"\1:***@", text)


def _secret_parts(address: str) -> set[str]:
    """Return pieces of an address's password: a library that takes it apart elsewhere may name any of them."""
    found = re.search(r"://[^:]*:(.*)@", address, flags=re.DOTALL)
    if found is None:
        return set()
    password = found.group(1)
    return {part for part in (password, *re.split(r"[@:/?#\[\]]", password)) if len(part) > 2}
