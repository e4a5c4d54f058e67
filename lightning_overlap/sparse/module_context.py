"""One batch in one sharded module: what is under way, and what has to stay unchanged for its early lookup to hold."""

from collections.abc import Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass, field
from enum import IntEnum, auto
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..runtime import NOTHING, Made, is_profiled
from ..schedules import WeightOwner
from ..tables import num_writes, owners_of_parts, rates_of, spec_of
from .deferred_update import DeferredUpdate


class Progress(IntEnum):
    """How far a batch has come in a module; `ModuleContext.advance` takes it one step further."""

    SENT = auto()  # its sizes are exchanged, then its ids are sent
    RECEIVED = auto()  # the ids that this rank looks up are there; some parts may be looked up already
    LOOKED_UP = auto()  # all parts were looked up, and their embeddings are under way
    SERVED = auto()  # a call of the module got them
    DROPPED = auto()  # no call will get them: the module runs in its own forward
    UPDATED = auto()  # the tables have its update; another backward of the same step is another update

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


_NEXT = {
    Progress.SENT: (Progress.RECEIVED, Progress.DROPPED),
    Progress.RECEIVED: (Progress.LOOKED_UP, Progress.DROPPED),
    Progress.LOOKED_UP: (Progress.SERVED, Progress.DROPPED),
    Progress.SERVED: (Progress.UPDATED,),
    Progress.DROPPED: (),
    Progress.UPDATED: (Progress.UPDATED,),
}


@dataclass(slots=True)
class ModuleContext:
    """State of one batch in one module, from the exchange of sizes to the end of its backward.

    Source: `TrainPipelineContext`, TorchRec 1.8, which has the same names for the first fields.
    """

    name: str  # the module's name in the model
    batch: int  # the batch's number
    module: Any
    kjt: KeyedJaggedTensor  # the module's input in the batch
    progress: Progress = Progress.SENT  # changed by `advance`
    context: Any = None  # TorchRec's own context of this module and batch, from `create_context`
    splits_awaitable: Any = None  # what `input_dist` returned; None once its sizes have been read
    tensors_awaitable: Any = None  # the all-to-all of lengths, ids and weights, while it is under way
    dist_input: KJTList | None = None  # received ids, a KeyedJaggedTensor for each part; None once all were looked up
    output_dist_awaitables: dict[int, Awaitable[torch.Tensor]] = field(default_factory=dict)  # by part, until all are
    embeddings: LazyAwaitable[Any] | None = None  # the module's output, once all parts were looked up early
    deferred: DeferredUpdate = field(default_factory=DeferredUpdate)  # empty where the update is not deferred
    sent: Any = None  # the `SentInput` of its ids, once they were sent
    outside: str | None = None  # the error about an id that is no row, for which row 0 was looked up
    num_writes: dict[WeightOwner, tuple[int, ...]] = field(default_factory=dict)  # `tables.num_writes` at the lookup
    rates: list[float] | None = None  # learning rates of its kernels at the lookup, if `SparseOptions.holds_rates`
    autocast: tuple[bool, torch.dtype] | None = None  # `autocast_of` at the lookup
    num_found: int = 1  # how many KeyedJaggedTensors of this rank's batch have the keys of the module's input
    votes: bool = False  # whether all ranks vote at the call: on some rank another input has the same keys
    served_in: int = -1  # forward that got the embeddings (`PipelinedForwards.num_steps`); LBFGS runs several in a step
    without_graph: bool = False  # whether a call under `no_grad` got them: a reentrant `checkpoint()` repeats it later
    received: Made | None = None  # the embeddings, once waited for, until the backward is over
    num_lookups: list[int] = field(default_factory=list)  # what the early lookup added to each kernel's iteration count
    ids: KJTList | None = None  # the ids that were looked up, if `SparseLookups.keep_ids` is set

    def advance(self, to: Progress) -> None:
        """Enter the next state; raise a RuntimeError if that state cannot follow the present one."""
        if to not in _NEXT[self.progress]:
            raise RuntimeError(
                f"batch {self.batch} in module {self.name!r} cannot become {to}: it is {self.progress}, and only "
                f"{' or '.join(map(str, _NEXT[self.progress]))} can follow. Stages were issued twice or out of order."
            )
        self.progress = to

    @property
    def served(self) -> bool:
        """Whether a call got the early embeddings, or they were dropped."""
        return self.progress >= Progress.SERVED

    @property
    def has_lookups(self) -> bool:
        """Whether a lookup of any part was issued early."""
        return self.embeddings is not None or bool(self.output_dist_awaitables)

    def deferring_update(self) -> AbstractContextManager[None]:
        """Within this context output dists cut the graph of fused tables' embeddings, for `deferred`."""
        owners = owners_of_parts(self.module)
        if WeightOwner.FUSED_BACKWARD not in owners:
            return NOTHING
        dists = [
            self.deferred.deferring(dist, part) if owner is WeightOwner.FUSED_BACKWARD else dist
            for part, (dist, owner) in enumerate(zip(self.module._output_dists, owners, strict=True))
        ]
        return replaced(self.module, "_output_dists", dists)

    def note_lookup(self, owner: WeightOwner) -> None:
        """Note what has to stay unchanged until the call, after an early lookup of this owner's tables."""
        self.num_writes[owner] = num_writes(self.module, owner)
        self.autocast = autocast_of(self.module, self.kjt)

    def is_overwritten(self) -> bool:
        """Whether tables of this rank, or their learning rates, were written since the lookup."""
        if self.rates is not None and rates_of(self.module) != self.rates:
            return True
        return any(num_writes(self.module, owner) != before for owner, before in self.num_writes.items())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object or module of TorchRec's within this context."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Return `awaitable.wait()`; without a profiler, skip its profiler range, which takes 5 us."""
    if is_profiled() or type(awaitable).wait is not Awaitable.wait:
        return awaitable.wait()
    found = awaitable._wait_impl()
    for callback in awaitable.callbacks:
        found = callback(found)
    return found


def autocast_of(module: Any, kjt: KeyedJaggedTensor) -> tuple[bool, torch.dtype] | None:
    """Return whether autocast is on and its dtype; None for modules whose lookup does not depend on it."""
    kind = spec_of(module)
    if kind is None or kind.feature_processors is None:
        return None
    device = kjt.device().type
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
