"""Updates of tables that come later than their backward: the graph of early rows is cut, and gone on with by hand."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.comm_ops import Request
from torchrec.distributed.types import Awaitable, NoWait

OutputDist = Callable[..., Awaitable[Tensor]]


class _Cut(NamedTuple):
    """A place where a graph is cut, so that a backward stops there."""

    graph: Tensor
    """What its part towards the tables gave."""
    leaf: Tensor
    """What stands in its place: the backward leaves its gradient there."""


class HeldUpdate:
    """The way of a batch's gradients to the tables of one module, cut where rows arrive and where gradients arrive.

    The backward of the dense part ends where the rows were received. `send` goes on until the all-to-alls of gradients
    are under way, `apply` until the tables are updated.
    """

    def __init__(self) -> None:
        self._at_rows: list[_Cut] = []
        self._under_way: list[_Cut] = []

    def __bool__(self) -> bool:
        return bool(self._at_rows or self._under_way)

    def holding(self, output_dist: OutputDist) -> OutputDist:
        """Return an output dist whose rows are cut off."""
        return _HoldingDist(output_dist, self._at_rows, self._under_way)

    def call_behind_backward(self, call: Callable[[], None]) -> list[RemovableHandle]:
        """Have this called when the backward that ends here has run all its nodes; nothing if it does not come here.

        What waits for other ranks at its end comes behind: DistributedDataParallel, for the gradients it has sent.
        """
        engine = torch.autograd.Variable._execution_engine
        return [cut.leaf.register_hook(lambda _: engine.queue_callback(call)) for cut in self._at_rows]

    def send(self) -> list[Tensor]:
        """Start the all-to-alls of the gradients that a backward has left; return these gradients."""
        return _go_on(self._at_rows)

    def apply(self) -> None:
        """Wait for the gradients and update the tables."""
        self.send()
        _go_on(self._under_way)


@dataclass(frozen=True, slots=True)
class _HoldingDist:
    dist: OutputDist
    at_rows: list[_Cut]
    under_way: list[_Cut]

    def __call__(self, rows: Tensor, *context: Any) -> Awaitable[Tensor]:
        started = self.dist(rows, *context)
        parts = list(_under_way(started))
        cuts = list(_cut(parts))
        if rows.requires_grad and not cuts:
            raise RuntimeError(
                f"cannot defer the update of tables whose rows come by {type(started).__name__}: no all-to-all was "
                "found in it. Train without defer_update."
            )
        self.under_way.extend(cuts)
        travels = any(isinstance(part, Request) for part in parts)
        return _CutWhenReceived(started, self.at_rows) if travels else started


class _CutWhenReceived(Awaitable[Tensor]):  # type: ignore[misc]
    """Rows under way, whose graph is cut where they arrive."""

    def __init__(self, started: Awaitable[Tensor], cuts: list[_Cut]) -> None:
        super().__init__()
        self._started = started
        self._cuts = cuts

    def _wait_impl(self) -> Tensor:
        rows: Tensor = self._started.wait()
        if not rows.requires_grad:
            return rows
        leaf: Tensor = rows.detach().requires_grad_()
        self._cuts.append(_Cut(rows, leaf))
        return leaf


def _cut(under_way: Iterable[Request[Any] | NoWait[Any]]) -> Iterator[_Cut]:
    """Cut the graph in everything under way, between sending gradients and receiving them.

    The two halves of a TorchRec collective are joined by an empty tensor: in the backward the second half, which is
    then the first to run, starts the all-to-all of gradients and hands that tensor on to the first half, which waits.
    Without a collective (one rank) the rows themselves are handed on.
    """
    for part in under_way:
        name = "dummy_tensor" if isinstance(part, Request) else "_obj"
        graph = getattr(part, name)
        if isinstance(graph, Tensor) and graph.requires_grad:
            leaf = graph.detach().requires_grad_()
            setattr(part, name, leaf)
            yield _Cut(graph, leaf)


def _under_way(started: object) -> Iterator[Request[Any] | NoWait[Any]]:
    """Find what is under way inside an awaitable."""
    if isinstance(started, Request | NoWait):
        yield started
    elif isinstance(started, Awaitable):
        for part in vars(started).values():
            yield from _under_way(part)
    elif isinstance(started, list):
        for part in started:
            yield from _under_way(part)


def before_gradients(rows: object, num_parts: int) -> list[Tensor] | None:
    """Return the tensors whose gradients are computed where the backward of rows begins to wait for gradients.

    Args:
        rows: What awaits them, waited for or not.
        num_parts: Parts of the module that have to be among them.

    Returns:
        None where fewer parts are found, or no collective: then a backward may update tables without waiting.
    """
    joints = [part.dummy_tensor for part in _under_way(rows) if isinstance(part, Request)]
    found = [joint for joint in joints if isinstance(joint, Tensor) and joint.requires_grad]
    return found if len(found) == len(joints) >= num_parts else None


def _go_on(cuts: list[_Cut]) -> list[Tensor]:
    """Run the backward on from where it was cut; the cuts are gone then, and those of rows without a gradient."""
    reached = [(cut, cut.leaf.grad) for cut in cuts if cut.leaf.grad is not None]
    cuts.clear()
    gradients = [gradient for _, gradient in reached]
    if reached:
        torch.autograd.backward([cut.graph for cut, _ in reached], gradients)
    for cut, _ in reached:
        cut.leaf.grad = None  # the second half of a collective has given it to itself, for one
    return gradients
