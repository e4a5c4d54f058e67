"""Which calls of sharded modules the last step of an evaluation made: a rank may have to repeat them without ids."""

from typing import NamedTuple

import torch
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from ...runtime import Flight
from ..batch_inputs import only_input
from .watcher import Arguments, CalledModule, Watcher


class KnownCall(NamedTuple):
    """A call of a step."""

    forward: CalledModule
    kjt: KeyedJaggedTensor | None  # an input like its own without ids; None if it was of another type


class LastCalls(Watcher):
    """The calls of sharded modules in the last step of an evaluation, with their inputs without ids."""

    def __init__(self) -> None:
        self.calls: list[KnownCall] = []
        self._num_calls = 0  # in the step that runs

    @override
    def step_begins(self, number: int, flight: Flight) -> None:
        if not flight.is_padding:
            self._num_calls = 0

    @override
    def called(self, forward: CalledModule, arguments: Arguments, flight: Flight | None, *, in_backward: bool) -> None:
        if flight is None or flight.is_padding or in_backward:
            return
        at, self._num_calls = self._num_calls, self._num_calls + 1
        given = only_input(*arguments)
        kjt = given if isinstance(given, KeyedJaggedTensor) else None
        if at < len(self.calls) and self.calls[at].forward is forward and _has_form(self.calls[at].kjt, kjt):
            return
        self.calls[at : at + 1] = [KnownCall(forward, None if kjt is None else without_ids(kjt))]

    @override
    def step_ends(self, flight: Flight) -> None:
        """The ranks call modules alike, so the next step is expected to make the same calls."""
        if not flight.is_padding:
            del self.calls[self._num_calls :]

    def input_of(self, forward: CalledModule) -> KeyedJaggedTensor | None:
        """Return the input without ids of a module's first call; None if the last step did not call it."""
        return next((kjt for called, kjt in self.calls if called is forward), None)


def _has_form(kept: KeyedJaggedTensor | None, given: KeyedJaggedTensor | None) -> bool:
    """Whether an input that was kept stands for this one too; the size of a batch need not be the same."""
    if kept is None or given is None:
        return kept is given
    if kept.variable_stride_per_key() or given.variable_stride_per_key():
        return False
    return kept.keys() == given.keys() and (kept.weights_or_none() is None) is (given.weights_or_none() is None)


def without_ids(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return an input of the same form and batch size, in which no sample has an id."""
    weights, varies = kjt.weights_or_none(), kjt.variable_stride_per_key()
    return KeyedJaggedTensor(
        keys=kjt.keys(),
        values=kjt.values().new_empty(0),
        weights=None if weights is None else weights.new_empty((0, *weights.shape[1:])),
        lengths=torch.zeros_like(kjt.lengths()),
        stride=None if varies else kjt.stride(),
        stride_per_key_per_rank=kjt.stride_per_key_per_rank() if varies else None,
        inverse_indices=kjt.inverse_indices_or_none(),
    )
