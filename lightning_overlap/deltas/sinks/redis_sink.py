"""Store parts in Redis: their names in a stream, each part under a separate key."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ..parts import PartName
from .sink import told, without_password

_NAME = b"name"
_PAGE = 1000
_WAIT_S = 10.0


class RedisSink:
    """Stores the names of parts in a Redis stream, and each part under the key `{KEY}:NAME`.

    A part and its stream entry (one field, `name`) are written in one transaction. The server's configuration
    determines what a crash leaves behind (`appendonly yes`, `appendfsync always`).

    Args:
        url: `redis://user:password@host:port/0`, `rediss://`, `unix://`; `?key=name` is the same as `key`.
        key: Name of the stream, and prefix, in braces, of the parts' keys (one slot of a cluster).
        **options: Arguments of `redis.Redis.from_url`. `socket_timeout` is 10 s by default.

    Raises:
        ImportError: The package redis is not installed.
        SinkError: The URL is invalid.
    """

    def __init__(self, url: str, key: str | None = None, **options: Any) -> None:
        self.url, _, asked = url.partition("?")
        query = dict(parse_qsl(asked))
        self.key = key or query.pop("key", None) or "embedding_deltas"
        if query:
            self.url += f"?{urlencode(query)}"
        self._options = {"socket_timeout": _WAIT_S, "socket_connect_timeout": _WAIT_S} | options
        with self._told("open"):
            _ = self._client

    def __repr__(self) -> str:
        return f"RedisSink({without_password(self.url)!r}, key={self.key!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_client"}

    def check(self) -> None:
        """Read the stream's length, and write and remove an entry of another stream."""
        other = f"{{{self.key}}}:check"
        with self._told("write to"), self._client.pipeline(transaction=True) as pipe:
            pipe.xlen(self.key)
            pipe.xadd(other, {_NAME: b"check"})
            pipe.delete(other)
            pipe.execute()

    def write(self, name: str, part: bytes) -> None:
        """Store a part, and its name in the stream."""
        with self._told("write to"), self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._part(name), part)
            pipe.xadd(self.key, {_NAME: name})
            pipe.execute()

    def names(self) -> list[str]:
        """Return the distinct names of all parts, sorted."""
        with self._told("read"):
            found = {name for _, name in self._entries()}
        return sorted(filter(PartName.parse, found))

    def read(self, name: str) -> bytes:
        """Return a part."""
        with self._told("read"):
            part = self._client.get(self._part(name))
        if part is None:
            raise KeyError(name)
        return bytes(part)

    def remove(self, names: Iterable[str]) -> None:
        """Remove parts and their stream entries."""
        with self._told("remove parts of"):
            entries: dict[str, list[bytes]] = {}
            for entry, name in self._entries():
                entries.setdefault(name, []).append(entry)
            for name in names:
                with self._client.pipeline(transaction=True) as pipe:
                    pipe.unlink(self._part(name))
                    if name in entries:
                        pipe.xdel(self.key, *entries[name])
                    pipe.execute()

    def close(self) -> None:
        """Close the connections."""
        if (client := vars(self).pop("_client", None)) is not None:
            client.close()

    @cached_property
    def _client(self) -> Any:
        return _redis().Redis.from_url(self.url, **self._options)

    def _part(self, name: str) -> str:
        return f"{{{self.key}}}:{name}"

    def _entries(self) -> Iterator[tuple[bytes, str]]:
        start = b"-"
        while True:
            page = self._client.xrange(self.key, min=start, count=_PAGE)
            yield from ((entry, fields[_NAME].decode()) for entry, fields in page if _NAME in fields)
            if len(page) < _PAGE:
                return
            start = b"(" + page[-1][0]

    def _told(self, what: str) -> AbstractContextManager[None]:
        return told(
            f"cannot {what} the stream {self.key!r} of embedding deltas at {without_password(self.url)}",
            "Start the server, or correct its address and password: redis://user:password@host:port/0.",
            *(_redis().RedisError, OSError, ValueError),
        )


def _redis() -> Any:
    try:
        import redis
    except ImportError as err:
        raise ImportError(
            f"RedisSink needs the package redis, which cannot be imported ({err}): "
            "pip install 'lightning_overlap[deltas]'"
        ) from err
    return redis
