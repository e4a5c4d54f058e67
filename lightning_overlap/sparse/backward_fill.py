"""Rows of the schedule that run inside a backward on a CPU, while autograd waits there for other ranks."""

from collections.abc import Callable

import torch
from torch.utils.hooks import RemovableHandle

from ..runtime import Streams
from ..schedules import Stage, WeightOwner
from ..tables import frozen_parts, frozen_sent_parts, owners_of_parts
from .deferred_update import before_gradients
from .options import SparseOptions
from .sparse_batch import SparseBatch


class BackwardFill:
    """Registers hooks of the current backward."""

    def __init__(self, options: SparseOptions, streams: Streams, *, num_ranks: int) -> None:
        self._multi_node = options.multi_node
        # Only on a CPU, where the host itself waits for the gradient all-to-all.
        self._fills_waits = options.fills_waits and options.trains and num_ranks > 1 and not streams.is_async
        self._hooks: list[RemovableHandle] = []

    def forget(self) -> None:
        """Call nothing in a backward that is still to come, or to end: some tensors outlive it."""
        for handle in self._hooks:
            handle.remove()
        self._hooks.clear()

    def register(self, flight: SparseBatch, stage: Stage, call: Callable[[], None]) -> bool:
        """Let the backward of a batch call a function, perhaps repeatedly, where it waits for ranks before it writes.

        `stage` is the first stage that it issues. Returns whether the backward will call it; else the caller has to.
        """
        self.forget()
        if not self._fills_waits or torch.is_anomaly_enabled():
            # On CUDA the lookup overlaps with the dense part anyway. Anomaly mode would keep this backward alive with
            # each graph that is made inside it.
            return False
        if self._multi_node and stage is Stage.PREFETCH:
            return False  # it waits for ids, which may still be on the link: gradients would queue after them
        if any(one.without_graph for one in flight.modules.values()):
            return False  # a forward that checkpoint() repeats may write tables before this is called
        if flight.defers_update:
            if stage is not Stage.INPUT_SPLITS_DIST and not self._multi_node:
                # This backward waits for no gradients, only for the slowest rank at its end. Within a host embeddings
                # gain more if they are sent before the backward.
                return False
            for one in flight.modules.values():
                self._hooks += one.deferred.call_after_backward(call)
            return bool(self._hooks)
        before: list[torch.Tensor] = []
        for one in flight.modules.values():
            parts = zip(owners_of_parts(one.module), frozen_parts(one.module), strict=True)
            num_parts = sum(owner is WeightOwner.FUSED_BACKWARD and not is_frozen for owner, is_frozen in parts)
            found = before_gradients(one.embeddings, num_parts, num_without=len(frozen_sent_parts(one.module)))
            if found is None:
                return False
            before += found
        self._hooks += [tensor.register_hook(lambda _: call()) for tensor in before]
        return bool(before)
