"""Store files in Redis: their names in a stream, each file under a separate key."""

from collections.abc import Iterable, Iterator
from contextlib import AbstractContextManager
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ...text import without_secrets
from ..files import FileName
from .sink import as_sink_error

_NAME = b"name"
_PAGE = 1000
_WAIT_S = 10.0


class RedisSink:
    """Stores the names of files in a Redis stream, and each file under the key `{KEY}:NAME`.

    A file and its stream entry (one field, `name`) are written in one transaction. The server's configuration
    determines what a crash leaves behind (`appendonly yes`, `appendfsync always`).

    Args:
        url: `redis://user:password@host:port/0`, `rediss://`, `unix://`; `?key=name` is the same as `key`.
        key: Name of the stream, and prefix, in braces, of the files' keys (one slot of a cluster).
        **options: Arguments of `redis.Redis.from_url`. `socket_timeout` is 10 s by default.

    Raises:
        ImportError: The package redis is not installed.
        SinkError: The URL is invalid.
    """

    def __init__(self, url: str, key: str | None = None, **options: Any) -> None:
        self.url, own_key = _without_key(url)
        self.key = key or own_key or "embedding_deltas"
        self._given, (self._shown, _) = url, _without_key(without_secrets(url))
        self._options = {"socket_timeout": _WAIT_S, "socket_connect_timeout": _WAIT_S} | options
        with self._as_sink_error("open"):
            _ = self._client

    def __repr__(self) -> str:
        return f"RedisSink({self._shown!r}, key={self.key!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_client"}

    def check(self) -> None:
        """Read the stream's length, and write and remove an entry of another stream."""
        other = f"{{{self.key}}}:check"
        with self._as_sink_error("write to"), self._client.pipeline(transaction=True) as pipe:
            pipe.xlen(self.key)
            pipe.xadd(other, {_NAME: b"check"})
            pipe.delete(other)
            pipe.execute()

    def write(self, name: str, content: bytes) -> None:
        """Store a file, and its name in the stream."""
        with self._as_sink_error("write to"), self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._file_key(name), content)
            pipe.xadd(self.key, {_NAME: name})
            pipe.execute()

    def names(self) -> list[str]:
        """Return the distinct names of all files, sorted."""
        with self._as_sink_error("read"):
            found = {name for _, name in self._entries()}
        return sorted(filter(FileName.parse, found))

    def read(self, name: str) -> bytes:
        """Return a file."""
        with self._as_sink_error("read"):
            content = self._client.get(self._file_key(name))
        if content is None:
            raise KeyError(name)
        return bytes(content)

    def remove(self, names: Iterable[str]) -> None:
        """Remove files and their stream entries."""
        with self._as_sink_error("remove files of"):
            entries: dict[str, list[bytes]] = {}
            for entry, name in self._entries():
                entries.setdefault(name, []).append(entry)
            for name in names:
                with self._client.pipeline(transaction=True) as pipe:
                    pipe.unlink(self._file_key(name))
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

    def _file_key(self, name: str) -> str:
        return f"{{{self.key}}}:{name}"

    def _entries(self) -> Iterator[tuple[bytes, str]]:
        start = b"-"
        while True:
            page = self._client.xrange(self.key, min=start, count=_PAGE)
            yield from ((entry, fields[_NAME].decode()) for entry, fields in page if _NAME in fields)
            if len(page) < _PAGE:
                return
            start = b"(" + page[-1][0]

    def _as_sink_error(self, what: str) -> AbstractContextManager[None]:
        return as_sink_error(
            f"cannot {what} the stream {self.key!r} of embedding deltas at {self._shown}",
            self._given,
            "Start the server, or correct its address and password: redis://user:password@host:port/0.",
            *(_redis().RedisError, OSError, ValueError),
        )


def _without_key(url: str) -> tuple[str, str | None]:
    """Return an address without its option `key`, and that option."""
    before, _, query_text = url.partition("?")
    query = dict(parse_qsl(query_text))
    key = query.pop("key", None)
    return before + f"?{urlencode(query, safe='*')}" * bool(query), key


def _redis() -> Any:
    try:
        import redis
    except ImportError as err:
        raise ImportError(
            f"RedisSink needs the package redis, which cannot be imported ({err}): "
            "pip install 'lightning_overlap[deltas]'"
        ) from err
    return redis
