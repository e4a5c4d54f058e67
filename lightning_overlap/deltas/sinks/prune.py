"""Remove the parts that nobody needs."""

from __future__ import annotations

import os

from ..parts import Chain
from .resolve import resolve_sink
from .sink import DeltaSink


def prune(sink: str | os.PathLike[str] | DeltaSink) -> list[str]:
    """Remove the parts that no replica needs any more: those older than the newest base of all ranks.

    Replicas that are further behind go on from that base, and so does a training that resumes: a base has every row.

    Args:
        sink: A sink, or its address.

    Returns:
        The names of the parts that were removed, oldest first; none where no base of all ranks is there.

    Raises:
        PartError: A part that has to be read is torn.
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
