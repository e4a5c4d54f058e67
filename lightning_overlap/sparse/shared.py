"""What the sharded modules of a model, and all batches in flight in them, have in common."""

from dataclasses import dataclass
from typing import Any

import torch.distributed as dist

from ..distributed import Mismatches
from ..runtime import Streams, Telemetry
from ..tables import caching_tbes, spec_of, takes_weights
from .deferred_update import DeferredUpdate
from .options import SparseOptions
from .present_step import PresentStep
from .watchers.watcher import Watchers


@dataclass(frozen=True, slots=True)
class Shared:
    """The parts of a `SparsePipeline` that each of its modules uses."""

    group: dist.ProcessGroup | None  # of the input dist; None on one rank
    streams: Streams
    telemetry: Telemetry
    options: SparseOptions
    step: PresentStep
    watchers: Watchers
    mismatches: Mismatches | None  # None on one rank

    def received(self, name: str, embeddings: Any, *, in_step: bool, deferred: DeferredUpdate | None = None) -> None:
        """Order the coming backward of a module's embeddings with the lookup stream; tell watchers of them.

        `deferred`: the update that comes later than the backward, of an early lookup whose graph may have gaps.
        """
        self.step.order_backward(embeddings, in_step=in_step)
        for watcher in self.watchers.received:  # `order_backward` holds the gradient that `LossGuard` reads
            watcher.received(name, embeddings, deferred)

    def mends_weights(self, module: Any) -> bool:
        """Whether the backward of a module leaves out weights of ids that are not finite."""
        # A backward may repeat its lookup. By then a cache may hold other rows.
        has_weights = self.options.guard is not None and spec_of(module) is not None and takes_weights(module)
        return has_weights and not caching_tbes(module)
