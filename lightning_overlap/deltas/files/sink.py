"""Where files of cuts are kept: the store for an address; remove files that no replica needs."""

import os
from typing import Any

from ...storage import Store, store_at
from .chain import Chain


def as_store(sink: Any) -> Store:
    """Return the store at an address (see `storage.store_at`), or the store that is given.

    Raises:
        TypeError: The argument is neither an address nor a store.
        ImportError: The store needs a package that is not installed.
        ValueError: The address cannot be read.
    """
    if isinstance(sink, (str, os.PathLike)):
        return store_at(sink)
    if not isinstance(sink, Store):
        lacks = [name for name in ("put", "read", "names", "remove") if not hasattr(sink, name)]
        raise TypeError(
            "a sink must be a path, an address (redis://, s3://), or an object with the methods of Store.\n"
            f"  got: {sink!r}, which lacks {', '.join(lacks)}"
        )
    return sink


def prune(sink: str | os.PathLike[str] | Store) -> list[str]:
    """Remove the files of a sink, or of its address, that are older than the newest base of all ranks.

    Returns the names of the removed files, oldest first; none without such a base. Replicas that lag further, and
    resumed trainings, continue from that base, which has every row.

    Raises:
        FileError: A file is damaged.
        StoreError: The sink cannot be read or written.
    """
    store = as_store(sink)
    chain = Chain(store)
    chain.list_sink()
    if (start := chain.start()) is None:
        return []
    needed = start.files[0][1].cut
    old = [str(name) for cut in chain.cuts if cut.at < needed for name in cut.names]
    store.remove(old)
    return old
