"""The options of `pipeline="auto"`."""

from __future__ import annotations

from dataclasses import dataclass, fields
from typing import Any


@dataclass(frozen=True, slots=True)
class Auto:
    """How `pipeline="auto"` tries modes: in rounds of blocks of batches, one block for each arm (mode and stream).

    Args:
        warm_up: Batches before the first block, in which allocators and caches fill.
        settle: Untimed batches at the beginning of a block, after the switch.
        block: Timed batches of a block, rounded up to whole optimizer steps.
        rounds: Number of rounds before the arms are compared. A block does not count if it contains an evaluation, a
            save, the end of an epoch or a stall of a data loader. If fewer than two blocks of an arm count, more
            rounds follow, at most twice as many in all.
        tie: Arms within this share of the fastest arm's time count as equal; the arm that holds the fewest batches
            wins.

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
                raise ValueError(f"{field.name} of Auto must be a number >= {lowest}, got {value!r}.")


def resolve_auto(pipeline: Any) -> Auto | None:
    """Return the options of `pipeline="auto"` or `pipeline=Auto(...)`; None for other pipelines."""
    auto = Auto() if pipeline == "auto" else pipeline
    return auto if isinstance(auto, Auto) else None
