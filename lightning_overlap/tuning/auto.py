"""The options of `pipeline="auto"`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Auto:
    """How `pipeline="auto"` tries modes: in rounds of blocks of batches, one block for each arm (mode and stream).

    Args:
        warm_up: Batches before the first block, in which allocators and caches fill.
        settle: Batches at the beginning of a block, after the switch, that are not timed.
        block: Batches of a block that are timed; rounded up to whole optimizer steps.
        rounds: Rounds after which the arms are compared. A block does not count if there was an evaluation or a save,
            if an epoch ended, or if a data loader stalled in it. If fewer than two blocks of an arm count, there are
            more rounds, at most twice as many.
        tie: Arms that take at most this share longer than the fastest one count as equal; of these the one that holds
            the fewest batches is chosen.

    Raises:
        ValueError: A number is too small.
    """

    warm_up: int = 10
    settle: int = 2
    block: int = 16
    rounds: int = 4
    tie: float = 0.05

    def __post_init__(self) -> None:
        for field in fields(self):
            value, lowest = getattr(self, field.name), {"warm_up": 0, "tie": 0}.get(field.name, 1)
            if value < lowest:
                raise ValueError(f"{field.name} of Auto is a number from {lowest} on, got {value!r}.")


def resolve_auto(pipeline: Any) -> Auto | None:
    """Return the options of "auto", which is given as that name or as an `Auto`; None if a mode was named."""
    auto = Auto() if pipeline == "auto" else pipeline
    return auto if isinstance(auto, Auto) else None
