"""What comes of one law."""

from __future__ import annotations

from dataclasses import dataclass


@dataclass(frozen=True, slots=True)
class Verdict:
    """What came of one law.

    Args:
        law: What has to hold.
        problem: What does not, or ''.
        said: What was seen where it holds.
    """

    law: str
    problem: str
    said: str
