"""Steps of the schedule that run inside a backward, and updates of tables that come after it."""

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from ..runtime import Made, ModulePart
from ..schedules import Stage, StreamName, WeightOwner
from ..tables import owners_of_parts, tbes
from .deferred_update import before_gradients
from .flight import SparseFlight
from .module_context import ModuleContext, Progress
from .pipelined_forward import PipelinedForwards
from .update_rates import take_back


class TableUpdates:
    """Updates the tables of batches whose backward stopped at the received embeddings; see `SparsePipeline`."""

    def __init__(self, forwards: PipelinedForwards) -> None:
        self._streams, self._telemetry = forwards.streams, forwards.telemetry
        options, group = forwards.options, forwards.group
        self._multi_node, is_async = options.multi_node, self._streams.is_async
        # Only on a CPU, where the host itself waits for the gradient all-to-all.
        self._fills_waits = options.fills_waits and options.trains and group is not None and not is_async
        self.can_defer_updates = options.trains and (group is not None or is_async)
        """Whether an update can come later than its backward; on a CPU with one rank there is nothing to hide."""
        self._hooks: list[RemovableHandle] = []
        self._to_come: dict[int, SparseFlight] = {}  # batches whose gradients are sent and whose update is to come

    def register_backward_hook(self, inflight: SparseFlight, stage: Stage, call: Callable[[], None]) -> bool:
        """Let the backward of a batch call a function, perhaps repeatedly, where it waits for ranks before it writes.

        `stage` is the first stage that it issues. Returns whether the backward will call it; else the caller has to.
        """
        for handle in self._hooks:  # some tensors outlive their backward
            handle.remove()
        self._hooks.clear()
        if not self._fills_waits or torch.is_anomaly_enabled():
            # On CUDA the lookup overlaps with the dense part anyway. Anomaly mode would keep this backward alive with
            # each graph that is made inside it.
            return False
        if self._multi_node and stage is Stage.PREFETCH:
            return False  # it waits for ids, which may still be on the link: gradients would queue after them
        if any(state.without_graph for state in inflight.modules.values()):
            return False  # a forward that checkpoint() repeats may write tables before this is called
        if inflight.defers_update:
            if stage is not Stage.INPUT_SPLITS_DIST and not self._multi_node:
                # This backward waits for no gradients, only for the slowest rank at its end. Within a host embeddings
                # gain more if they are sent before the backward.
                return False
            for state in inflight.modules.values():
                self._hooks += state.deferred.call_after_backward(call)
            return bool(self._hooks)
        before: list[torch.Tensor] = []
        for state in inflight.modules.values():
            owners = owners_of_parts(state.module)
            found = before_gradients(state.embeddings, owners.count(WeightOwner.FUSED_BACKWARD))
            if found is None:
                return False
            before += found
        self._hooks += [tensor.register_hook(lambda _: call()) for tensor in before]
        return bool(before)

    def start_update(self, inflight: SparseFlight) -> None:
        """Start the gradient all-to-alls of a batch whose tables are still to be updated, on the current stream."""
        self._to_come[inflight.index] = inflight
        for state in inflight.modules.values():
            # The caller has ordered the two streams.
            self._streams.use(Made(state.deferred.send(), StreamName.COMPUTE, None), on=self._streams.lookup)

    def embedding_update(self, inflight: SparseFlight, updated: Callable[[ModulePart], None] | None = None) -> None:
        """Wait for the gradients of a batch and update the tables; call `updated` after each part of a module."""
        self._to_come.pop(inflight.index, None)
        for state in inflight.modules.values():
            self._make(state, updated)

    def forget_update(self, inflight: SparseFlight) -> None:
        """Leave the tables without the update of a batch, after an error; waits for no rank."""
        self._to_come.pop(inflight.index, None)
        self.count_lookups(inflight, -1)

    def count_lookups(self, inflight: SparseFlight, times: int) -> None:
        """Add a batch's lookups to the iteration counts of fused optimizers; with `times=-1` subtract them."""
        for state in inflight.modules.values():
            take_back(tbes(state.module), [-times * num for num in state.num_lookups], self._streams)

    def forget(self) -> None:
        """Forget the updates that are to come."""
        self._to_come.clear()

    def make_before_forward(self, name: str) -> None:
        """Make the deferred updates of the module `name`, the oldest first."""
        waiting = [self._to_come[index] for index in sorted(self._to_come) if name in self._to_come[index].modules]
        if waiting:
            self._streams.order(
                StreamName.COMPUTE, then=self._streams.lookup
            )  # for the backward, which has left the gradients
            with self._streams.on_lookup():
                for inflight in waiting:
                    self._make(inflight.modules[name])

    def _make(self, state: ModuleContext, updated: Callable[[ModulePart], None] | None = None) -> None:
        if state.deferred:
            self._telemetry.observe("wait", Stage.EMBEDDING_UPDATE, state.batch)
            if updated is None:
                state.deferred.apply()
            else:
                owners = enumerate(owners_of_parts(state.module))
                parts = [part for part, owner in owners if owner is WeightOwner.FUSED_BACKWARD]
                state.deferred.apply(parts, lambda part: updated((state.name, part)))
            state.advance(Progress.UPDATED)
