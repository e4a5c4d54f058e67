"""Which weights a module has now: its trained ones or averages, whose, and who has asked for them."""

import itertools
import signal
import threading
import weakref
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager, nullcontext
from dataclasses import dataclass
from types import FrameType
from typing import Any, Protocol

from torch import nn

from .sharded_module import read_once
from .supported_modules import sharded_modules

TRAINED = 0
"""The version of a module's trained weights."""

_versions = itertools.count(TRAINED + 1)


def next_version() -> int:
    """Return the version of averages that have just changed, which no others have."""
    return next(_versions)


class UsesTables(Protocol):
    """What runs a module, and uses its tables beside whoever exchanges weights."""

    def between_lookups(self) -> AbstractContextManager[Any]:
        """Return a context within which tables may be read and written."""


class OtherWeights(Protocol):
    """Weights that can take the place of a module's trained ones: averages of them."""

    version: int  # from `next_version` whenever they change

    def exchange(self) -> None:
        """Exchange the module's weights and these, in place; the second time brings every bit back."""


@dataclass(frozen=True, eq=False)
class Request:
    """Somebody wants a module to have certain weights."""

    weights: OtherWeights | None  # None: the trained ones
    by_user: bool  # whether saves take these weights as well, not only lookups and reads


@contextmanager
def uninterrupted() -> Iterator[None]:
    """Put a Ctrl-C off to the end of this context, in which weights are neither trained ones nor averages."""
    before = signal.getsignal(signal.SIGINT)
    if threading.current_thread() is not threading.main_thread() or not callable(before):
        yield
        return
    heard: list[tuple[int, FrameType | None]] = []
    signal.signal(signal.SIGINT, lambda *what: heard.append(what))
    try:
        yield
    finally:
        signal.signal(signal.SIGINT, before)
    if heard:
        before(*heard[0])


class Ledger:
    """Knows which weights a module has, and is the only one to exchange them.

    The module has what the newest request that has not ended asks for, and its trained weights without any. So requests
    of several callbacks may be nested, and end in any order. All ranks make the same requests.
    """

    def __init__(self, module: nn.Module) -> None:
        self._module = weakref.ref(module)
        self._requests: list[Request] = []
        self._user: Callable[[], UsesTables | None] = lambda: None
        self.inside: OtherWeights | None = None  # what the module has; None: its trained weights

    @property
    def version(self) -> int:
        """The version of the weights that the module has."""
        return TRAINED if self.inside is None else self.inside.version

    @property
    def asked(self) -> OtherWeights | None:
        """What the user has asked for last, None for the trained weights, which also an evaluation does not change."""
        of_user = [one.weights for one in self._requests if one.by_user]
        return of_user[-1] if of_user else None

    def exchange_beside(self, user: UsesTables) -> None:
        """From now on exchange weights within `between_lookups` of the strategy that runs the module."""
        self._user = weakref.ref(user)  # it has the module

    def ask(self, weights: OtherWeights | None, *, by_user: bool = False) -> Request:
        """Let the module have these weights until `end`, or None for its trained ones."""
        request = Request(weights, by_user)
        self._requests.append(request)
        try:
            self._put()
        except BaseException:
            self.end(request)
            raise
        return request

    def end(self, request: Request) -> None:
        """Let the module have what it would have without this request; do nothing if it has ended."""
        if request in self._requests:
            self._requests.remove(request)
            self._put()

    @contextmanager
    def holding(self, weights: OtherWeights | None, *, by_user: bool = False) -> Iterator[None]:
        """Within this context the module has these weights, or with None its trained ones."""
        request = self.ask(weights, by_user=by_user)
        try:
            yield
        finally:
            self.end(request)

    def _put(self) -> None:
        """Exchange weights until the module has what it should have."""
        wanted = self._requests[-1].weights if self._requests else None
        if wanted is self.inside:
            return
        user = self._user()
        with nullcontext() if user is None else user.between_lookups(), uninterrupted():
            if self.inside is not None:
                self.inside.exchange()
                self._note(None)
            if wanted is not None:
                wanted.exchange()
                self._note(wanted)

    def _note(self, inside: OtherWeights | None) -> None:
        self.inside = inside
        module = self._module()
        assert module is not None, "the averages of a module that is gone"
        for one in sharded_modules(module).values():
            _version_in(one)[0] = self.version

    def check_trained(self, what: str) -> None:
        """Raise a RuntimeError that says `what` would do if the module does not have its trained weights."""
        if self.inside is not None:
            raise RuntimeError(
                f"{what}: ExponentialMovingAverage.averaged() is active, so the module has averages in the place of "
                "its weights. Leave its context first."
            )


@read_once
def _ledgers(module: Any) -> list[Ledger]:
    return [Ledger(module)]


def ledger_of(module: nn.Module) -> Ledger:
    """Return the only ledger of a module with sharded modules in it; a copy of the module gets one of its own."""
    return _ledgers(module)[0]


@read_once
def _version_in(module: Any) -> list[int]:
    return [TRAINED]


def version_in(module: Any) -> int:
    """Return the version of the weights that a sharded module has now; fast, for each of its calls."""
    return _version_in(module)[0]
