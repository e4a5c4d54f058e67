"""TODO."""

from __future__ import annotations

from dataclasses import dataclass, field
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..schedules import WeightOwner
from .deferred_update import DeferredUpdate


@dataclass(slots=True)
class ModuleContext:
    """One batch on its way through one module."""

    kjt: KeyedJaggedTensor
    context: Any = None
    splits: Any = None
    data: Any = None
    dist_input: KJTList | None = None
    outputs: dict[int, Awaitable[torch.Tensor]] = field(default_factory=dict)
    rows: LazyAwaitable[Any] | None = None
    held: DeferredUpdate = field(default_factory=DeferredUpdate)
    """What is left of the way to the tables; nothing where the backward goes all the way."""
    rates: list[float] | None = None
    """The learning rate of each kernel that the batch was trained at, while its deferred update is made."""
    sent: Any = None
    """What the input held when its ids were sent (`write_counts.SentInput`)."""
    num_writes: dict[WeightOwner, tuple[int, ...]] = field(default_factory=dict)
    """How often the tables of each owner had been written by somebody else when they were looked up."""
    autocast: Any = None
    """The autocast that its lookup ran under, where that matters."""
    votes: bool = False
    """Whether all ranks are asked when the module is called: another input of the batch might take this one's place."""
    served: bool = False
    served_in: int = -1
    """The forward that it was served in: an optimizer may ask for several in a step."""
    without_graph: bool = False
    """Whether a call without gradients was served."""
    received: Any = None
    """The rows, once waited for, until the backward is over."""
    received_at: Any = None
    """Event after which they are there, on the lookup's stream."""
    num_lookups: list[int] = field(default_factory=list)
    """What this batch added to the iteration count of each kernel."""
    ids: KJTList | None = None
    """What was looked up, where somebody asked to keep it."""
