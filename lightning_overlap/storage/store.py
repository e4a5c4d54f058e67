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

    Each rank uses its own pickled copy, which has to open its connection at the first use. `read` raises a
    FileNotFoundError without the file; all methods raise an OSError (`StoreError`, say) if the disk or the server
    fails. A store that cannot be read may return no names: then every fit that sends deltas begins with a base. A store
    may also have `check()`, which raises if files cannot be written, and `close()`, which closes connections: the next
    call opens them again.
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


class MissingFileError(StoreError, FileNotFoundError):
    """A store has no such file."""


class RefusedError(StoreError, PermissionError):
    """A store refuses this user."""


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
    if not pieces:
        return b""
    whole = io.BytesIO(bytes(sum(map(len, pieces))))
    with whole.getbuffer() as memory:
        np.concatenate([np.frombuffer(piece, np.uint8) for piece in pieces], out=np.frombuffer(memory, np.uint8))
    return whole.getvalue()


@contextmanager
def hidden_os_error() -> Iterator[None]:
    """Raise the error of the disk that another error hides: torch writes the end of a file that it could not write."""
    try:
        yield
    except Exception as err:
        hidden: BaseException | None = err
        while hidden is not None and not isinstance(hidden, OSError):
            hidden = hidden.__cause__ or hidden.__context__
        if hidden is None or hidden is err:
            raise
        raise hidden from None


@dataclass(frozen=True)
class Words:
    """How errors of a store are told."""

    store: str  # what it is, without secrets
    address: str  # with its secrets
    advice: str
    options: Mapping[str, Any] = field(default_factory=dict)  # whose secrets are not shown either

    @contextmanager
    def errors(self, what: str, name: str = "", *, keeps: tuple[type[Exception], ...] = ()) -> Iterator[None]:
        """Raise a StoreError for any error within this context: what failed, the reason and advice.

        `name` is the file's, if it is to be told. Errors of the types `keeps` keep theirs. The former error is the
        cause, unless the address or options have secrets: a traceback shows causes as they are. All can be sent to
        other ranks.
        """
        try:
            yield
        except StoreError:
            raise
        except Exception as err:
            missing = (FileNotFoundError, NotADirectoryError) if what == "read" else (FileNotFoundError,)
            kinds: dict[type[Exception], type[Exception]] = {
                **dict.fromkeys(missing, MissingFileError),
                PermissionError: RefusedError,
            }
            kinds |= {one: one for one in keeps}
            kind = next((kind for of, kind in kinds.items() if isinstance(err, of)), StoreError)
            advice = f". {self.advice}" if issubclass(kind, StoreError) and kind is not MissingFileError else ""
            shown = f"{name} of {self.store}" if name else self.store
            text = f"cannot {what} {shown}: {self._reason(err)}{advice}"
            raise kind(text) from (None if self._hides else err)

    @property
    def _hides(self) -> bool:
        """Whether the address or the options have a secret."""
        return bool(self._secrets) or without_secrets(self.address) != self.address

    @property
    def _secrets(self) -> list[str]:
        return [value for name, value in _texts(self.options) if _SECRET.search(name)]

    def _reason(self, err: Exception) -> str:
        name = type(err).__name__
        if isinstance(err, ValueError) and without_secrets(self.address) != self.address:
            # It may name any piece of an address that it cannot read.
            return f"{name}; if its password has @ / : ? or #, write %40 %2F %3A %3F %23 for them"
        if isinstance(err, OSError) and err.errno and err.strerror:  # in the system's words, such as "File too large"
            text = self._without_secrets(err.strerror).rstrip(".")
            return text if err.filename is None else f"{text}: {self._without_secrets(str(err.filename))!r}"
        text = self._without_secrets(str(err)).rstrip(".")
        return f"{name}: {text}" if text else name

    def _without_secrets(self, text: str) -> str:
        text = message_without_secrets(text, self.address)
        for secret in self._secrets:
            text = text.replace(secret, "***")
        return text


_SECRET = re.compile(r"(?i)secret|token|passw|key|credential")


def _texts(options: Mapping[str, Any]) -> Iterator[tuple[str, str]]:
    """Yield (name, text) of all texts in options."""
    for name, value in options.items():
        if isinstance(value, Mapping):
            yield from _texts(value)
        elif isinstance(value, str) and value:
            yield str(name), value
