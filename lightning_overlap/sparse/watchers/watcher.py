"""The events of a step that watchers are told of, and the lists of those that want each."""

from typing import Any, Protocol, TypeAlias

from ...runtime import Flight
from ..deferred_update import DeferredUpdate

Arguments: TypeAlias = tuple[tuple[Any, ...], dict[str, Any]]
"""Of a call: without and with a name."""


class CalledModule(Protocol):
    """The forward of a sharded module: `ModuleForward`."""

    name: str
    module: Any
    unpipelined_reason: str | None  # why it runs in its own forward; None if it can be looked up early


class LookedUp(Protocol):
    """One batch in one sharded module: `ModuleFlight`."""

    dist_input: Any  # the ids that this rank looks up
    ids: Any  # the same ids, if a watcher keeps them until the batch's step is over


class Watcher:
    """Watches the steps of one pipeline: a subclass overrides the events that it wants to be told of.

    An event is told on the thread that trains, right where it happens. The method of an event may raise an error.
    """

    def looks_up(self, flight: LookedUp) -> None:
        """Some parts of a module are about to be looked up early for a batch."""

    def step_begins(self, number: int, flight: Flight) -> None:
        """The user's step of a batch begins, of number 1 or higher; an optimizer may make several of one batch."""

    def called(self, forward: CalledModule, arguments: Arguments, flight: Flight | None, *, in_backward: bool) -> None:
        """A sharded module is called, in the caller's grad mode, and has not looked up anything.

        `flight` is the batch whose step or backward runs; None outside of a step. Within a backward `checkpoint()`
        repeats a call.
        """

    def collective_begins(self, forward: CalledModule, flight: Flight) -> None:
        """A call of a module that is on all ranks comes to its first collective."""

    def called_quietly(self, forward: CalledModule, flight: Flight) -> None:
        """A call of a module that is on all ranks has no collective in the forward, but one in its backward."""

    def received(self, name: str, embeddings: Any, deferred: DeferredUpdate | None) -> None:
        """A module's embeddings have arrived, and the caller is about to get them.

        `deferred`: the update that comes later than the backward, of an early lookup whose graph may have gaps.
        """

    def answered(self, forward: CalledModule, answer: Any) -> None:
        """A call of a module is about to return; an early answer waits for its embeddings at their first use."""

    def step_ends(self, flight: Flight) -> None:
        """The user's step of a batch has ended, without an error."""

    def phase_ends(self, flight: Flight) -> None:
        """A phase of a step ends: with each backward in it (manual optimization), and with the step."""

    def backward_begins(self) -> None:
        """The backward of a loss begins."""

    def backward_ends(self) -> None:
        """The backward of a loss has ended."""


class Watchers:
    """The watchers of a pipeline by event: each list has those that want it, so that an event without any is free."""

    def __init__(self) -> None:
        self.looks_up: list[Watcher] = []
        self.step_begins: list[Watcher] = []
        self.called: list[Watcher] = []
        self.collective_begins: list[Watcher] = []
        self.called_quietly: list[Watcher] = []
        self.received: list[Watcher] = []
        self.answered: list[Watcher] = []
        self.step_ends: list[Watcher] = []
        self.phase_ends: list[Watcher] = []
        self.backward_begins: list[Watcher] = []
        self.backward_ends: list[Watcher] = []

    def add(self, watcher: Watcher) -> None:
        """Tell a watcher the events that its class overrides, from now on."""
        for event, watching in vars(self).items():
            if getattr(type(watcher), event) is not getattr(Watcher, event):
                watching.append(watcher)

    def remove(self, watcher: Watcher) -> None:
        """Tell a watcher nothing any more."""
        for watching in vars(self).values():
            if watcher in watching:
                watching.remove(watcher)
