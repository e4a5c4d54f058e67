"""One batch on its way through one sharded module: what is under way, and what its early lookup rests on."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..runtime import is_profiled
from ..schedules import WeightOwner
from ..tables import SentInput, num_writes, rates_of, spec_of, tbes
from .deferred_update import DeferredUpdate
from .update_rates import lookup_counts, lookups_since


@dataclass(slots=True)
class ModuleContext:
    """State of one batch in one module, from the exchange of sizes to the end of its backward.

    Source: `TrainPipelineContext`, TorchRec 1.8, whose words the first fields have.
    """

    module: Any
    """The sharded module."""
    kjt: KeyedJaggedTensor
    """Its input in the batch."""
    context: Any = None
    """TorchRec's own, of this module and batch."""
    splits_awaitable: Any = None
    tensors_awaitable: Any = None
    dist_input: KJTList | None = None
    """The ids that this rank has received."""
    output_dist_awaitables: dict[int, Awaitable[torch.Tensor]] = field(default_factory=dict)
    """By sharding, those that have been looked up while others have not."""
    embeddings: LazyAwaitable[Any] | None = None
    """Awaits what was looked up early."""
    deferred: DeferredUpdate = field(default_factory=DeferredUpdate)
    """The deferred part of the backward; empty where the update is not deferred."""
    sent: SentInput | None = None
    """What the input held when its ids were sent."""
    num_writes: dict[WeightOwner, tuple[int, ...]] = field(default_factory=dict)
    """How often the tables of each owner had been written by somebody else when they were looked up."""
    rates: list[float] | None = None
    """The learning rates of its kernels when they were looked up, where nothing else gives its update those of then."""
    autocast: tuple[bool, torch.dtype] | None = None
    """The autocast that its lookup ran under, where that matters."""
    votes: bool = False
    """Whether all ranks are asked when the module is called: another input of the batch might take this one's place."""
    served: bool = False
    served_in: int = -1
    """The forward that it was served in: an optimizer may ask for several in a step."""
    without_graph: bool = False
    """Whether a call without gradients was served."""
    received: Any = None
    """The embeddings, once waited for, until the backward is over."""
    received_at: Any = None
    """Event after which they are there, on the lookup's stream."""
    num_lookups: list[int] = field(default_factory=list)
    """What this batch added to the iteration count of each kernel."""
    num_own_lookups: list[int] = field(default_factory=list)
    """The same of the module's own forward, where its update waits for the optimizer step."""
    ids: KJTList | None = None
    """What was looked up, where somebody asked to keep it."""

    @contextmanager
    def counting(self, counted: list[int]) -> Iterator[None]:
        """Add what the kernels count meanwhile."""
        kernels = tbes(self.module)
        before = lookup_counts(kernels)
        yield
        done = lookups_since(kernels, before)
        counted[:] = [a + b for a, b in zip(counted, done, strict=True)] if counted else done

    def note_lookup(self, owners: frozenset[WeightOwner]) -> None:
        """Note what an early lookup of the tables of these owners rests on."""
        self.num_writes |= {owner: num_writes(self.module, owner) for owner in owners}
        self.autocast = autocast_of(self.module, self.kjt)

    def is_overwritten(self) -> bool:
        """Whether somebody has written tables of this rank, or their rates, since they were looked up."""
        if self.rates is not None and rates_of(self.module) != self.rates:
            return True
        return any(num_writes(self.module, owner) != before for owner, before in self.num_writes.items())


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Let an object of TorchRec's have another attribute meanwhile."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Wait as TorchRec does, but name that to the profiler only where there is one: the name alone takes 5 us."""
    if is_profiled() or type(awaitable).wait is not Awaitable.wait:
        return awaitable.wait()
    found = awaitable._wait_impl()
    for callback in awaitable.callbacks:
        found = callback(found)
    return found


def autocast_of(module: Any, kjt: KeyedJaggedTensor) -> tuple[bool, torch.dtype] | None:
    """Return the autocast that a lookup runs under now, where it may compute something that this changes."""
    kind = spec_of(module)
    if kind is None or kind.feature_processors is None:
        return None
    device = kjt.device().type
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
