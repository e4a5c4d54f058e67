"""Remove parts that no replica needs."""

from __future__ import annotations

import os

from ..parts import Chain
from .resolve import resolve_sink
from .sink import DeltaSink


def prune(sink: str | os.PathLike[str] | DeltaSink) -> list[str]:
    """Remove the parts that are older than the newest base of all ranks; return their names, oldest first.

    Replicas that lag further, and resumed trainings, continue from that base, which has every row.

    Raises:
        PartError: A part is damaged.
        SinkError: The sink cannot be read or written.
    """
    resolved = resolve_sink(sink)
    chain = Chain(resolved)
    chain.list_sink()
    start = chain.start()
    if start is None:
        return []
    needed = start.chunks[0][1].cut
    old = [str(name) for cut in chain.cuts if cut.at < needed for name in cut.names]
    resolved.remove(old)
    return old
