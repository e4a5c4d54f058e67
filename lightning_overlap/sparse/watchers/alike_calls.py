"""Check that all ranks make the same calls of sharded modules in a step: their collectives are those of all ranks."""

from collections import defaultdict
from collections.abc import Sequence
from typing import TypeAlias

from typing_extensions import override

from ...distributed import Mismatches, Point
from ...runtime import Flight
from ..options import SparseOptions
from .watcher import CalledModule, Watcher

_ADVICE = (
    "All ranks have to call sharded modules alike, since they wait for each other. On a rank that does not need the "
    "embeddings, call the module too (with an empty KeyedJaggedTensor, lengths of zero) and add 0 times their sum to "
    "the loss."
)


_Phase: TypeAlias = tuple[int, int]  # whether the batch had a step before, and the number of backwards in this step


class AlikeCalls(Watcher):
    """Compares the calls of sharded modules on all ranks, where they differ from those of the last step.

    A rank that makes the same calls as in the last step compares nothing. Another one waits for the others: before a
    call that it did not make, and if it leaves calls out, before its next collective. Ranks that have made the call may
    wait for it there, in the module's own forward or for its gradients; they report all the same (`Mismatches`).

    Calls with a collective have an order. Quiet calls have none in the forward: they get early embeddings, or have
    data-parallel tables. A phase of a step ends with each backward in it (manual optimization), and with the step.
    """

    def __init__(self, mismatches: Mismatches, names: Sequence[str], options: SparseOptions) -> None:
        self._mismatches, self._names, self._options = mismatches, names, options
        self._step, self._batch, self._phase = 0, -1, (0, 0)
        self._num_calls = 0  # with a collective, in this phase
        self._num_quiet = dict.fromkeys(names, 0)  # quiet calls in this phase
        # What all ranks do, by phase: modules in the order of calls with a collective, and numbers of quiet calls.
        self._order: defaultdict[_Phase, list[str]] = defaultdict(list)
        self._quiet: defaultdict[_Phase, dict[str, int]] = defaultdict(lambda: dict.fromkeys(names, 0))

    @override
    def step_begins(self, number: int, flight: Flight) -> None:
        is_again = int(flight.index == self._batch)
        self._step, self._batch, self._phase = number, flight.index, (is_again, 0)
        self._num_calls, self._num_quiet = 0, dict.fromkeys(self._names, 0)

    @override
    def collective_begins(self, forward: CalledModule, flight: Flight) -> None:
        """Note a call with a collective; raises a RuntimeError if another rank does something else."""
        name = forward.name
        order, place = self._order[self._phase], self._num_calls
        point, self._num_calls = self._point(place), place + 1
        if place < len(order) and order[place] == name:
            self._mismatches.passed(point, self._step)
            return
        usual = order[place] if place < len(order) else ""
        is_later = name in order[place:]
        if (other := self._mismatches.other(point, self._step, name, waits=f"before its call of {name!r}")) is not None:
            theirs = usual if other.what is None else other.what
            if not theirs:
                is_again = name in order[:place] or self._num_quiet[name] > 0
                raise self._left_out(name, flight, other.rank, self._options.rank, is_again)
            if is_later:
                raise self._left_out(theirs, flight, self._options.rank, other.rank)
            raise self._error(f"calls {name!r}", flight, self._options.rank, f"rank {other.rank} calls {theirs!r}")
        if is_later:  # all ranks leave out the calls before it
            del order[place : order.index(name, place)]
        else:  # all ranks make it in addition
            order.insert(place, name)

    @override
    def called_quietly(self, forward: CalledModule, flight: Flight) -> None:
        """Note a quiet call; raises a RuntimeError if it is more than usual and another rank does not make it."""
        name = forward.name
        before, usual = self._num_quiet[name], self._quiet[self._phase]
        self._num_quiet[name] = before + 1
        if before == usual[name]:
            waits = f"before its call of {name!r}"
            if (other := self._mismatches.other(self._quiet_call(name, before), self._step, waits=waits)) is not None:
                raise self._left_out(name, flight, other.rank, self._options.rank, before > 0)
            usual[name] = before + 1
        self._mismatches.passed(self._quiet_end(name, before), self._step)

    @override
    def phase_ends(self, flight: Flight) -> None:
        """Raises a RuntimeError if another rank has made a call in the phase that this rank has left out."""
        mismatches, step = self._mismatches, self._step
        order, place, usual = self._order[self._phase], self._num_calls, self._quiet[self._phase]
        point = self._point(place)
        # In the first step nothing is usual yet.
        if place == len(order) and step > 1:
            mismatches.passed(point, step)
        elif (other := mismatches.other(point, step, waits=self._end)) is not None:
            theirs = order[place] if other.what is None else other.what
            raise self._left_out(theirs, flight, self._options.rank, other.rank, theirs in order[:place])
        del order[place:]
        for name, num in self._num_quiet.items():
            if num < usual[name]:
                waits = f"{self._end}, in which it has not called {name!r}"
                if (other := mismatches.other(self._quiet_end(name, num), step, waits=waits)) is not None:
                    raise self._left_out(name, flight, self._options.rank, other.rank, num > 0)
                usual[name] = num
            mismatches.passed(self._quiet_call(name, num), step)
        self._num_calls = 0
        self._num_quiet = dict.fromkeys(self._names, 0)
        self._phase = self._phase[0], self._phase[1] + 1

    @property
    def _end(self) -> str:
        num_backwards = self._phase[1]
        return f"at the end of its forward after {num_backwards} backwards" if num_backwards else "after its forward"

    def _left_out(self, name: str, flight: Flight, rank: int, other: int, is_again: bool = False) -> RuntimeError:
        """Return the error about a call that a rank leaves out and another rank makes."""
        again = " once more" if is_again else ""
        return self._error(f"does not call {name!r}{again}", flight, rank, f"rank {other} does")

    def _error(self, does: str, flight: Flight, rank: int, other: str) -> RuntimeError:
        num_backwards = self._phase[1]
        phase = f", after {num_backwards} backwards of the step" if num_backwards else ""
        place = f"{self._options.method} of batch {flight.index}{phase}"
        return RuntimeError(f"rank {rank} {does} in {place}, {other}. {_ADVICE}")

    def _point(self, place: int) -> Point:
        return ("call", place + 1, "in phase", *self._phase)

    def _quiet_call(self, name: str, num_before: int) -> Point:
        return ("early call", num_before + 1, "of", name, "in phase", *self._phase)

    def _quiet_end(self, name: str, num_calls: int) -> Point:
        return ("the end after", num_calls, "early calls of", name, "in phase", *self._phase)
