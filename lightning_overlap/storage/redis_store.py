"""Keep files in Redis: their names in a stream, each file under a separate key."""

from collections.abc import Iterable, Iterator, Sequence
from functools import cached_property
from typing import Any
from urllib.parse import parse_qsl, urlencode

from ..text import without_secrets
from .store import Piece, Words, joined

_NAME = b"name"
_PAGE = 1000
_WAIT_S = 10.0


class RedisStore:
    """Keeps the names of files in a Redis stream, and each file under the key `{KEY}:NAME`.

    A file and its stream entry (one field, `name`) are written in one transaction. The server's configuration
    determines what a crash leaves behind (`appendonly yes`, `appendfsync always`).

    Args:
        url: `redis://user:password@host:port/0`, `rediss://`, `unix://`; `?key=name` is the same as `key`.
        key: Name of the stream, and prefix, in braces, of the files' keys (one slot of a cluster).
        **options: Arguments of `redis.Redis.from_url`. `socket_timeout` is 10 s by default.

    Raises:
        ImportError: The package redis is not installed.
        ValueError: The URL is invalid.
    """

    def __init__(self, url: str, key: str | None = None, **options: Any) -> None:
        self.url, own_key = _without_key(url)
        self.key = key or own_key or "embedding_deltas"
        self._shown, _ = _without_key(without_secrets(url))
        self._options = {"socket_timeout": _WAIT_S, "socket_connect_timeout": _WAIT_S} | options
        advice = "Start the server, or correct its address and password: redis://user:password@host:port/0."
        self._words = Words(f"the stream {self.key!r} at {self._shown}", url, advice, options)
        with self._words.errors("open", keeps=(ImportError, ValueError)):
            _ = self._client

    def __repr__(self) -> str:
        return f"RedisStore({self._shown!r}, key={self.key!r})"

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in vars(self).items() if name != "_client"}

    def check(self) -> None:
        """Read the stream's length, and write and remove an entry of another stream."""
        other = f"{{{self.key}}}:check"
        with self._words.errors("write to"), self._client.pipeline(transaction=True) as pipe:
            pipe.xlen(self.key)
            pipe.xadd(other, {_NAME: b"check"})
            pipe.delete(other)
            pipe.execute()

    def put(self, name: str, pieces: Sequence[Piece]) -> None:
        """Keep a file, and its name in the stream."""
        with self._words.errors("write to"), self._client.pipeline(transaction=True) as pipe:
            pipe.set(self._file_key(name), joined(pieces))
            pipe.xadd(self.key, {_NAME: name})
            pipe.execute()

    def read(self, name: str) -> bytes:
        """Return a file; a FileNotFoundError if there is none."""
        with self._words.errors("read", name):
            content = self._client.get(self._file_key(name))
            if content is None:
                raise FileNotFoundError(name)
            return bytes(content)

    def names(self) -> list[str]:
        """Return the distinct names of all files, sorted."""
        with self._words.errors("read"):
            return sorted({name for _, name in self._entries()})

    def remove(self, names: Iterable[str]) -> None:
        """Remove files and their stream entries."""
        with self._words.errors("remove files of"):
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
            f"RedisStore needs the package redis, which cannot be imported ({err}): "
            "pip install 'lightning_overlap[deltas]'"
        ) from err
    return redis
