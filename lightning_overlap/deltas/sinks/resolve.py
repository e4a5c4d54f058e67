"""Make the sink for an address; remove files that no replica needs."""

import os
from typing import Any

from ..files import Chain, DeltaSink
from .folder_sink import FolderSink
from .redis_sink import RedisSink


def resolve_sink(sink: Any) -> DeltaSink:
    """Return a `RedisSink` for `redis://`, `rediss://`, `unix://`, a `FolderSink` for other addresses; else the sink.

    Raises:
        TypeError: The argument is neither an address nor a sink.
        ImportError: The sink needs a package that is not installed.
    """
    if isinstance(sink, (str, os.PathLike)):
        address = os.fspath(sink)
        is_redis = address.startswith(("redis://", "rediss://", "unix://"))
        return RedisSink(address) if is_redis else FolderSink(address)
    if not isinstance(sink, DeltaSink):
        lacks = [name for name in ("write", "names", "read", "remove", "close") if not hasattr(sink, name)]
        raise TypeError(
            "a sink must be a path, a redis:// address, or an object with the methods of DeltaSink.\n"
            f"  got: {sink!r}, which lacks {', '.join(lacks)}"
        )
    return sink


def prune(sink: str | os.PathLike[str] | DeltaSink) -> list[str]:
    """Remove the files of a sink, or of its address, that are older than the newest base of all ranks.

    Returns the names of the removed files, oldest first; none without such a base. Replicas that lag further, and
    resumed trainings, continue from that base, which has every row.

    Raises:
        FileError: A file is damaged.
        SinkError: The sink cannot be read or written.
    """
    resolved = resolve_sink(sink)
    chain = Chain(resolved)
    chain.list_sink()
    if (start := chain.start()) is None:
        return []
    needed = start.files[0][1].cut
    old = [str(name) for cut in chain.cuts if cut.at < needed for name in cut.names]
    resolved.remove(old)
    return old
