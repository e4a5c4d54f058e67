"""What all stores have in common: their methods, and errors in words for the user, without secrets."""

import io
import re
from collections.abc import Iterable, Iterator, Mapping, Sequence
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any, Protocol, TypeAlias, runtime_checkable

import numpy as np

from ..text import message_without_secrets, without_secrets

Piece: TypeAlias = bytes | memoryview  # bytes of a file; a view's memory is reused after the file is written


@runtime_checkable
class Store(Protocol):
    """Keeps files by name. Any number of processes read at the same time.

    `read` raises a FileNotFoundError without the file. All methods raise an OSError (a `StoreError`) if the disk or the
    server fails. A pickled copy opens its own connection at the first use. A store may also have `check()`, which
    raises if files cannot be written, and `close()`, which closes connections: the next call opens them again.
    """

    def put(self, name: str, pieces: Sequence[Piece]) -> None:
        """Keep or replace a file, whose bytes are those of `pieces` joined.

        When it returns, the file is durable and complete for every reader; before, no reader sees a part of it. The
        memory of the pieces is reused afterwards.
        """

    def read(self, name: str) -> bytes:
        """Return a file."""

    def names(self) -> Iterable[str]:
        """Return the names of all files; nothing if the store is not there yet."""

    def remove(self, names: Iterable[str]) -> None:
        """Remove files, in the given order; missing names are ignored."""


class StoreError(OSError):
    """A store cannot be reached, read or written."""


def check_store(store: Store) -> None:
    """Raise an OSError if files cannot be written, as far as the store can tell."""
    getattr(store, "check", lambda: list(store.names()))()


def close_store(store: Store) -> None:
    """Close the connections of a store that has any."""
    getattr(store, "close", lambda: None)()


def joined(pieces: Sequence[Piece]) -> bytes:
    """Return the bytes of all pieces, copied without the GIL, which a training thread needs."""
    if len(pieces) == 1 and isinstance(pieces[0], bytes):
        return pieces[0]
    whole = io.BytesIO(bytes(sum(map(len, pieces))))
    with whole.getbuffer() as memory:
        np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces], out=np.frombuffer(memory, np.uint8))
    return whole.getvalue()


@dataclass(frozen=True)
class Words:
    """How errors of a store are told."""

    store: str  # what it is, without secrets
    address: str  # with its secrets
    advice: str
    options: Mapping[str, Any] = field(default_factory=dict)  # whose secrets are not shown either

    @contextmanager
    def errors(self, what: str, *, keeps: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Raise a StoreError for any error within this context: what failed, the reason and advice.

        A FileNotFoundError and a PermissionError stay such, and so do `keeps`. The former error is the cause, unless
        the address or options have secrets: a traceback shows causes as they are. All can be sent to other ranks.
        """
        try:
            yield
        except StoreError:
            raise
        except Exception as err:
            kept: tuple[type[Exception], ...] = (FileNotFoundError, PermissionError, *keeps)
            kind = next((kind for kind in kept if isinstance(err, kind)), StoreError)
            secrets = [value for name, value in _texts(self.options) if _SECRET.search(name)]
            hides = bool(secrets) or without_secrets(self.address) != self.address
            text = f"cannot {what} {self.store}: {self._reason(err, secrets, hides=hides)}. {self.advice}"
            raise kind(text) from (None if hides else err)

    def _reason(self, err: Exception, secrets: Iterable[str], *, hides: bool) -> str:
        name = type(err).__name__
        if hides and isinstance(err, ValueError):  # it may name any piece of an address that it cannot read
            return f"{name}; if its password has @ / : ? or #, write %40 %2F %3A %3F %23 for them"
        if isinstance(err, OSError) and err.strerror and err.errno:  # the system's words, such as "File too large"
            return err.strerror if err.filename is None else f"{err.strerror}: {err.filename!r}"
        text = message_without_secrets(str(err), self.address)
        for secret in secrets:
            text = text.replace(secret, "***")
        return f"{name}: {text.rstrip('.')}" if text else name


_SECRET = re.compile(r"(?i)secret|token|passw|key|credential")


def _texts(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of all texts in options."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, str) and value:
            yield str(name), value
