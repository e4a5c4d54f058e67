"""The sparse stages of a model's sharded modules, put together: what a walker and its flights use."""

from collections.abc import Iterable, Mapping
from functools import partial
from typing import Any

import torch.distributed as dist
from torchrec.distributed.types import ShardedModule

from ..compat.fbgemm import locks_rows
from ..distributed import Mismatches
from ..runtime import FetchedBatch, Flight, Streams, TableAccess, Telemetry
from ..schedules import StreamName
from ..tables import forget_prefetched, kernel_parameters, tbes
from .backward_fill import BackwardFill
from .discovery import Discovery
from .flight import SparseFlight
from .input_dist import InputExchange
from .module_forwards import ModuleForwards
from .options import SparseOptions
from .overwritten import OverwrittenLookups
from .padding import without_batches
from .present_step import PresentStep
from .sent_updates import SentUpdates
from .shared import Shared
from .unread_gradients import leave_out_unread_gradients
from .watchers.alike_calls import AlikeCalls
from .watchers.gradient_watch import GradientWatch
from .watchers.last_calls import LastCalls
from .watchers.watcher import Watchers


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
        self.modules, self.options = modules, options
        self.streams, self.telemetry, self.table_access = streams, telemetry, TableAccess(streams)
        mismatches = None
        if group is not None and options.store is not None:
            key = f"lightning_overlap/{options.store.next_number('pipelines')}"  # all ranks make as many
            mismatches = Mismatches(options.store, key, group.rank(), group.size(), options.timeout_s)
        # Between hosts on a CPU, where the link is idle once all early embeddings of a step have arrived.
        sends_within = options.multi_node and options.fills_waits and options.trains and not streams.is_async
        step = PresentStep(streams, sends_within=sends_within)
        self.watchers = Watchers()
        self.shared = Shared(group, streams, telemetry, options, step, self.watchers, mismatches)
        self._updates = SentUpdates(streams)
        self.forwards = ModuleForwards(modules, self.shared, self._updates)
        self.gradients = GradientWatch(modules, options) if options.trains else None
        last_calls = None if group is None or options.trains else LastCalls()
        compared = [one.name for one in self.forwards.values() if one.is_on_all_ranks]
        alike = None if mismatches is None else AlikeCalls(mismatches, compared, options)
        for watcher in (self.gradients, options.guard, last_calls, alike):
            if watcher is not None:
                self.watchers.add(watcher)
        self.discovery = Discovery(self.forwards, self.shared, last_calls)
        self._exchange = None if group is None else InputExchange(group, streams)
        self._overwritten = OverwrittenLookups(self.forwards, self.discovery, options)
        self._flight = partial(
            SparseFlight,
            shared=self.shared,
            discovery=self.discovery,
            forwards=self.forwards,
            exchange=self._exchange,
            backward_fill=BackwardFill(options, streams, num_ranks=1 if group is None else group.size()),
            updates=self._updates,
            last_calls=last_calls,
        )
        self._leaves: list[Any] = []  # autograd's nodes of the modules' weights while it is attached
        self._hooks: list[Any] = []  # on the modules' kernels while it is attached

    @property
    def unpipelined(self) -> dict[str, str]:
        """Names of the modules known so far to run in their own forward, each with the reason."""
        return {name: one.unpipelined_reason for name, one in self.forwards.items() if one.unpipelined_reason}

    def attach(self) -> None:
        """Replace the modules' forwards until `detach`."""
        self._leaves = _hold_leaves(self.modules.values(), self.streams)
        self._remove_hooks()
        self._hooks = leave_out_unread_gradients(self.modules.values())
        self.forwards.attach()

    def detach(self) -> None:
        """Give every module its former forward back and forget all batches, without a collective."""
        self.forwards.detach()
        self._remove_hooks()
        if self.shared.mismatches is not None:
            self.shared.mismatches.end()
        self._leaves = []
        self._updates.clear()
        self.shared.step.abandon()
        if self._exchange is not None:
            self._exchange.waiting.clear()

    def _remove_hooks(self) -> None:
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    def backward_begins(self) -> None:
        """Tell watchers that the backward of a loss begins."""
        for watcher in self.watchers.backward_begins:
            watcher.backward_begins()

    def backward_ends(self) -> None:
        """Tell watchers that the backward of a loss has ended."""
        for watcher in self.watchers.backward_ends:
            watcher.backward_ends()

    # What a walker calls (`runtime.SparseStages`).

    @property
    def ready(self) -> bool:
        """Whether it is known which input of a batch feeds which module."""
        return self.discovery.ready

    @property
    def can_defer_updates(self) -> bool:
        """Whether an update can come later than its backward; on a CPU with one rank there is nothing to hide."""
        return self.options.trains and (self.shared.group is not None or self.streams.is_async)

    def make_flight(self, index: int, fetched: FetchedBatch) -> SparseFlight:
        """Return a flight for a batch that was copied to the device."""
        return self._flight(index, *fetched)

    def make_padding(self, index: int) -> SparseFlight:
        """Return the flight of a rank whose batches to evaluate have ended, while other ranks have more.

        All ranks call this if any lacks the batch. Raises a RuntimeError on all of them if it is the first one of all.
        """
        if index == 0 and not self.shared.step.number:
            raise RuntimeError(without_batches(self.options.method))
        return self._flight(index, None)

    def all_called(self) -> bool:
        """Whether every rank has called all modules that may be looked up early in this step; all ranks call this."""
        return not self.options.any_rank(not self.forwards.all_called())

    def discover(self, current: Flight) -> None:
        """Learn from a forward which input feeds which module; all ranks call this after the same forward."""
        self.discovery.discover()

    def forget_prefetched(self) -> None:
        """Drop prefetches without a lookup: FBGEMM matches prefetches to lookups by their order alone."""
        with self.streams.on(StreamName.PREFETCH):
            for module in self.modules.values():
                forget_prefetched(module)

    def are_overwritten(self, flights: Iterable[Flight]) -> bool:
        """Whether tables of this rank, or their rates, were written since one of these batches was looked up."""
        return self._overwritten.are_there(flights)  # type: ignore[arg-type]

    def drop_overwritten(self, flights: Iterable[Flight]) -> None:
        """Drop the early lookups of these batches, on all ranks alike: the tables were written afterwards."""
        self._overwritten.drop(flights)  # type: ignore[arg-type]


def _hold_leaves(modules: Iterable[Any], streams: Streams) -> list[Any]:
    """Return autograd's nodes of all weights in sharded modules, each on the stream where it belongs."""
    nodes = []
    for module in modules:
        fused = [leaf for kernel in tbes(module) for leaf in kernel.parameters()]
        # Else a backward on the lookup stream would end by waiting for all dense work that is queued, and a backward of
        # the loss for the update of the tables. Kernels that prefetch wait for the stream of their own leaf instead.
        idle = [leaf for kernel in tbes(module) if not locks_rows(kernel) for leaf in kernel.parameters()]
        nodes += streams.hold_leaves(idle, StreamName.IDLE)
        # The optimizer reads gradients of its own weights on the compute stream.
        known = {id(leaf) for leaf in fused}
        dense = [leaf for leaf in (*module.parameters(), *kernel_parameters(module)) if id(leaf) not in known]
        nodes += streams.hold_leaves(dense, StreamName.COMPUTE)
    return nodes
