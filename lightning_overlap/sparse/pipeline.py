"""The sparse stages of a model's sharded modules, put together: inputs, lookups, updates, and the modules' forwards."""

from collections.abc import Iterable, Mapping
from typing import Any

import torch.distributed as dist
from torchrec.distributed.types import ShardedModule

from ..runtime import LookupOrder, SparseStages, Streams
from ..schedules import StreamName
from ..tables import kernel_parameters, tbes
from .answers import Answers
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
        order: LookupOrder,
        options: SparseOptions,
    ) -> None:
        self.modules, self.order = modules, order
        self._leaves: list[Any] = []  # autograd's nodes of the modules' weights while it is attached
        self._forwards = forwards = PipelinedForwards(modules, group, order, options)
        self.inputs, self.updates = SparseInputs(forwards), TableUpdates(forwards)
        self.gradients = GradientWatch(forwards)
        self.answers = Answers(forwards, self.inputs, self.updates, self.gradients)
        self.lookups = SparseLookups(forwards, self.inputs, self.answers)
        self.stages = SparseStages(self.inputs, self.lookups, self.updates)  # what an executor issues

    @property
    def unpipelined(self) -> dict[str, str]:
        """Names of the modules known so far to run in their own forward, each with the reason."""
        return {name: one.unpipelined_reason for name, one in self._forwards.items() if one.unpipelined_reason}

    def attach(self) -> None:
        """Replace the modules' forwards until `detach`."""
        self._leaves = _hold_leaves(self.modules.values(), self.order.streams)
        self._forwards.attach(self.answers.answer)

    def detach(self) -> None:
        """Give every module its former forward back and forget all batches, without a collective."""
        self._forwards.detach()
        self._leaves = []
        self.updates.forget()
        self.answers.abandon()
        self.inputs.forget()
        self.order.reset()
