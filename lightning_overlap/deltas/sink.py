"""Where parts go: the protocol of a sink."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Protocol


class DeltaSink(Protocol):
    """Keeps parts by their names, for replicas to read and for a resumed training to know what they have read.

    One process writes (each rank has a sink of its own, a copy of the one that the user made: it must be picklable and
    open its connection when it is first used), any number read at the same time. A sink that cannot read back may
    return no names: every fit then begins with a base.
    """

    def write(self, name: str, part: bytes) -> None:
        """Keep a part; return once it cannot get lost and every reader may see it, whole.

        Writing the same name again replaces it.
        """

    def names(self) -> Iterable[str]:
        """Return the names of all parts that are kept; other things that lie beside them are left out."""

    def read(self, name: str) -> bytes:
        """Return a part.

        Raises:
            KeyError: There is none of that name.
        """

    def remove(self, names: Iterable[str]) -> None:
        """Remove parts, in the given order; those that are not there are passed over."""

    def close(self) -> None:
        """Let go of connections; the next call opens them anew."""
