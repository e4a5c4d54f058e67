"""What a rank does once its batches to evaluate have ended, while other ranks have more: it joins their lookups.

A lookup of sharded tables needs all ranks. In an evaluation, as under DistributedDataParallel, each rank evaluates all
of its own batches, so a rank with fewer calls the sharded modules as in its last step, with inputs that have no ids.
Their batch size is that of its first batch: lookups without a backward take any.
"""

from __future__ import annotations

from typing import TYPE_CHECKING, Any

import torch
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .options import SparseOptions

if TYPE_CHECKING:
    from .flight import SparseFlight
    from .module_forward import ModuleForward


class PaddingCalls:
    """The calls of sharded modules in the last step of an evaluation, with their inputs without ids."""

    def __init__(self, options: SparseOptions) -> None:
        self._options = options
        self._calls: list[tuple[ModuleForward, KeyedJaggedTensor | None]] = []  # None: the input is of another type
        self._num_calls = 0  # in the step that runs

    def begin_step(self) -> None:
        """Begin a step of the user's."""
        self._num_calls = 0

    def note(self, forward: ModuleForward, given: Any) -> None:
        """Note a call in the step."""
        at, self._num_calls = self._num_calls, self._num_calls + 1
        kjt = given if isinstance(given, KeyedJaggedTensor) else None
        if at < len(self._calls) and self._calls[at][0] is forward and _has_form(self._calls[at][1], kjt):
            return
        self._calls[at : at + 1] = [(forward, None if kjt is None else without_ids(kjt))]

    def end_step(self) -> None:
        """End a step: the ranks call modules alike, so the next one is expected to make the same calls."""
        del self._calls[self._num_calls :]

    def input_of(self, forward: ModuleForward) -> KeyedJaggedTensor | None:
        """Return the input without ids of a module's first call; None if the last step did not call it."""
        return next((kjt for called, kjt in self._calls if called is forward), None)

    def repeat(self, flight: SparseFlight) -> None:
        """Make the calls of the last step; raises a RuntimeError if an input is no KeyedJaggedTensor."""
        for forward, kept in self._calls:
            sent = flight.modules.get(forward.name)
            kjt = sent.kjt if sent is not None and not sent.served else kept  # what was sent early is looked up
            if kjt is None:
                raise RuntimeError(
                    f"rank {self._options.rank} has no further batch for {self._options.method}, other ranks have, and "
                    f"it cannot take part in the lookup of {forward}, whose input is no KeyedJaggedTensor: samples of "
                    "the other ranks would be lost. Give all ranks equally many batches (use_distributed_sampler=True "
                    "with a sampler that pads), or evaluate on one rank."
                )
            found = forward.module(kjt)
            for answer in found if isinstance(found, tuple) else (found,):
                if isinstance(answer, Awaitable):
                    answer.wait()


def without_batches(method: str) -> str:
    """Return the error about an evaluation in which only some ranks have batches; `method` is the user's step."""
    return (
        f"some ranks have no batch for {method}, others have: a rank without a batch does not know which lookups of "
        "sharded tables it has to take part in, and the samples of the others would be lost. Give each rank at least "
        "one batch (fewer ranks, smaller batches), or evaluate on one rank."
    )


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
