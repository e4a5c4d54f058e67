"""Which parts nobody needs any more."""

from __future__ import annotations

import os

from .chain import Chain
from .parts import PartName
from .sink import DeltaSink, resolve_sink


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
    sink = resolve_sink(sink)
    needed = Chain(sink).oldest_needed()
    if needed is None:
        return []
    parsed = ((PartName.parse(name), name) for name in sorted(sink.names()))
    old = [name for part, name in parsed if part is not None and part.cut < needed]
    sink.remove(old)
    return old
