"""What kind of store an address is of."""

import os

from .disk_store import DiskStore
from .object_store import ObjectStore
from .redis_store import RedisStore
from .store import Store

_ON_DISK = ("file://", "local://")  # fsspec's addresses of local files


def is_address(path: object) -> bool:
    """Return whether a path is an address that fsspec reads, and not a local file."""
    return "://" in str(path) and not str(path).startswith(_ON_DISK)


def without_protocol(path: str) -> str:
    """Return the local path of one of fsspec's addresses of local files; other texts as they are."""
    for start in _ON_DISK:
        path = path.removeprefix(start)
    return path


def store_at(address: str | os.PathLike[str]) -> Store:
    """Return the store at an address.

    A `RedisStore` for `redis://`, `rediss://`, `unix://`, an `ObjectStore` for others of fsspec, else a `DiskStore`.

    Raises:
        ImportError: The store needs a package that is not installed.
        ValueError: fsspec does not know the address's protocol, or Redis cannot read the address.
    """
    text = os.fspath(address)
    if text.startswith(("redis://", "rediss://", "unix://")):
        return RedisStore(text)
    if is_address(text) or "::" in text:
        return ObjectStore(text)
    return DiskStore(text if (path := without_protocol(text)) == text else os.path.expanduser(path))
