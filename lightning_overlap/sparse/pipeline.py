"""The sparse stages of a model's sharded modules, put together: inputs, lookups, updates, and the modules' forwards."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torchrec.distributed.types import ShardedModule

from ..runtime import FetchedBatch, Flight, Streams, Telemetry
from ..schedules import StreamName
from ..tables import kernel_parameters, tbes
from .answers import Answers
from .flight import SparseFlight
from .gradient_watch import GradientWatch
from .inputs import SparseInputs
from .lookup import SparseLookups
from .options import SparseOptions
from .pipelined_forward import PipelinedForwards
from .table_updates import TableUpdates


def _hold_leaves(modules: Iterable[Any], streams: Streams) -> list[Any]:
    """Return autograd's nodes of all weights in sharded modules, each on the stream where it belongs."""
    nodes = []
    for module in modules:
        fused = [leaf for kernel in tbes(module) for leaf in kernel.parameters()]
        # Else a backward on the lookup stream would end by waiting for all dense work that is queued, and a backward of
        # the loss for the update of the tables. Kernels that prefetch wait for the stream of their own leaf instead.
        idle = [leaf for kernel in tbes(module) if not kernel.prefetch_pipeline for leaf in kernel.parameters()]
        nodes += streams.hold_leaves(idle, StreamName.IDLE)
        # The optimizer reads gradients of its own weights on the compute stream.
        known = {id(leaf) for leaf in fused}
        dense = [leaf for leaf in (*module.parameters(), *kernel_parameters(module)) if id(leaf) not in known]
        nodes += streams.hold_leaves(dense, StreamName.COMPUTE)
    return nodes


class SparsePipeline:
    """The sparse stages of a model's outermost sharded modules; only the input dist sends its traffic in `group`."""

    def __init__(
        self,
        modules: Mapping[str, ShardedModule[Any, Any, Any, Any]],
        group: dist.ProcessGroup | None,
        streams: Streams,
        telemetry: Telemetry,
        options: SparseOptions,
    ) -> None:
        self.modules, self.streams, self.telemetry = modules, streams, telemetry
        self._leaves: list[Any] = []  # autograd's nodes of the modules' weights while it is attached
        self._forwards = forwards = PipelinedForwards(modules, group, streams, telemetry, options)
        self.inputs, self.updates = SparseInputs(forwards), TableUpdates(forwards)
        self.gradients = GradientWatch(forwards)
        self.answers = Answers(forwards, self.inputs, self.updates, self.gradients)
        self.lookups = SparseLookups(forwards, self.inputs, self.answers)

    @property
    def unpipelined(self) -> dict[str, str]:
        """Names of the modules known so far to run in their own forward, each with the reason."""
        return {name: one.unpipelined_reason for name, one in self._forwards.items() if one.unpipelined_reason}

    def attach(self) -> None:
        """Replace the modules' forwards until `detach`."""
        self._leaves = _hold_leaves(self.modules.values(), self.streams)
        self._forwards.attach(self.answers.answer)

    def detach(self) -> None:
        """Give every module its former forward back and forget all batches, without a collective."""
        self._forwards.detach()
        self._leaves = []
        self.updates.forget()
        self.answers.abandon()
        self.inputs.forget()

    # What a walker asks (`runtime.SparseStages`).

    @property
    def ready(self) -> bool:
        """Whether it is known which input of a batch feeds which module."""
        return self.inputs.ready

    @property
    def can_defer_updates(self) -> bool:
        """Whether an update can come later than its backward."""
        return self.updates.can_defer_updates

    def make_flight(self, index: int, fetched: FetchedBatch) -> SparseFlight:
        """Return a flight for a batch that was copied to the device."""
        return SparseFlight(index, *fetched, pipeline=self)

    def discover(self, current: Flight) -> None:
        """Learn from a forward which input feeds which module; all ranks call this after the same forward."""
        self.inputs.discover()

    def forget_prefetched(self) -> None:
        """Drop prefetches without a lookup."""
        self.lookups.forget_prefetched()

    def are_overwritten(self, flights: Iterable[Flight]) -> bool:
        """Whether tables of this rank, or their rates, were written since one of these batches was looked up."""
        return self.lookups.is_overwritten(flights)  # type: ignore[arg-type]

    def drop_overwritten(self, flights: Iterable[Flight]) -> None:
        """Drop the early lookups of these batches, on all ranks alike: the tables were written afterwards."""
        self.lookups.leave_overwritten(flights)  # type: ignore[arg-type]
