"""Deferred updates: autograd stops at the received embeddings; `send` and `apply` run the rest of it later."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from functools import partial
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.types import Awaitable

from ..compat.torch import call_after_backward, current_backward
from ..compat.torchrec import Collective, collectives_in, is_sent, joint_of, set_joint, work_of
from ..tables import SetRates
from .update_rates import Kernels, kernel_rates, set_kernel_rates


class _Gap(NamedTuple):
    """A gap in a graph, between the two autograd functions of a collective: a backward stops there."""

    graph: Tensor  # output of the first function: an empty tensor, or on one rank the embeddings
    leaf: Tensor  # the input of the second function in its place: a leaf, whose `.grad` a backward sets
    collective: Any  # TorchRec's, whose two functions the gap is between; None on one rank
    part: int


@dataclass(slots=True)
class _Backward:
    """The gradients that one backward of the dense part has left, each with the graph from whose output to go on."""

    rates: list[float]  # the learning rate of each kernel at that time, if a scheduler moves them; else empty
    to_send: list[tuple[int, Tensor, Tensor]] = field(default_factory=list)  # part and pair: its backward sends them
    to_apply: list[tuple[Tensor, Tensor]] = field(default_factory=list)  # pairs on one rank, where nothing is sent


class DeferredUpdate:
    """The deferred backward of one batch through one sharded module.

    The graph has two gaps: at the embeddings that the output dist returns, where `loss.backward()` stops, and between
    sending and receiving their gradients. A second backward of the same step is a second update, as in modes that defer
    none.
    """

    def __init__(self) -> None:
        self._set_present: SetRates = lambda: None  # gives the kernels the scheduler's present rates
        self._kernels: Kernels = []  # none without a scheduler
        self._rates: list[float] | None = None  # rates of the batch's backward, while its update is made
        self._at_embeddings: list[Tensor] = []  # leaves that replace received embeddings
        self._gaps: list[_Gap] = []  # of the collectives, until the update is made
        self._backwards: dict[int, _Backward] = {}  # by autograd's id of the backward; not sent yet
        self._sent: _Backward | None = None  # its gradients are under way
        self.got_gradient = False  # whether any backward has left gradients

    def __bool__(self) -> bool:
        """Whether a graph with gaps is still to be applied or dropped."""
        return bool(self._at_embeddings or self._gaps)

    def with_rates(self, set_present: SetRates, kernels: Kernels) -> SetRates:
        """Return a function that gives kernels the backward's rates while `apply` runs, else the present rates."""
        self._set_present, self._kernels = set_present, kernels
        return self._set_rates

    def _set_rates(self) -> None:
        if self._rates is None:
            self._set_present()
        else:
            set_kernel_rates(self._kernels, self._rates)

    def open_gaps(self, part: int, output_dist: nn.Module, args: tuple[Any, ...], started: Awaitable[Tensor]) -> None:
        """Open gaps in the graph of a part's embeddings, where they are sent: a forward hook of its output dist.

        Raise a RuntimeError if nothing sends embeddings that need a gradient.
        """
        collectives = list(collectives_in(started))
        gaps = [gap for one in collectives if (gap := self._open_gap(one, part)) is not None]
        if args[0].requires_grad and not gaps:
            raise RuntimeError(
                f"cannot defer the update of tables whose embeddings come by {type(started).__name__}: no "
                "all-to-all was found in it. Train without defer_update."
            )
        self._gaps += gaps
        if any(map(is_sent, collectives)):
            started.callbacks.append(partial(self._open_gap_at_embeddings, part))

    def call_after_backward(self, call: Callable[[], None]) -> list[RemovableHandle]:
        """Call a function once a backward has run all its nodes, before DistributedDataParallel waits; return hooks."""
        return [leaf.register_hook(lambda _: call_after_backward(call)) for leaf in self._at_embeddings]

    def _open_gap_at_embeddings(self, part: int, received: Tensor) -> Tensor:
        if not received.requires_grad:
            return received
        leaf: Tensor = received.detach().requires_grad_()
        self._at_embeddings.append(leaf)
        leaf.register_post_accumulate_grad_hook(partial(self._keep_gradient, part, received, sends=True))
        return _at_leaf(leaf)

    def _open_gap(self, collective: Collective, part: int) -> _Gap | None:
        graph = joint_of(collective)
        if graph is None or not graph.requires_grad:
            return None
        leaf = graph.detach().requires_grad_()
        if is_sent(collective):
            set_joint(collective, leaf)
            return _Gap(graph, leaf, collective, part)
        set_joint(collective, _at_leaf(leaf))
        leaf.register_post_accumulate_grad_hook(partial(self._keep_gradient, part, graph, sends=False))
        return _Gap(graph, leaf, None, part)

    def _keep_gradient(self, part: int, graph: Tensor, leaf: Tensor, *, sends: bool) -> None:
        """Take the gradient that a backward has left at `leaf`; with `sends` that of `graph` starts an all-to-all."""
        if leaf.grad is None:  # the loss does not depend on these embeddings
            return
        self.got_gradient = True
        task = current_backward()
        if task not in self._backwards:
            self._set_present()
            self._backwards[task] = _Backward(kernel_rates(self._kernels))
        left = self._backwards[task]
        if sends:
            left.to_send.append((part, graph, leaf.grad))
        else:
            left.to_apply.append((graph, leaf.grad))
        leaf.grad = None

    def send(self) -> list[Tensor]:
        """Send the gradients of the last backward, and return all; first send and apply those of earlier backwards."""
        backwards, self._backwards = list(self._backwards.values()), {}
        for left in backwards:
            is_last = left is backwards[-1]
            for _, graph, gradient in sorted(left.to_send, key=lambda sent: sent[0]):  # as `apply` waits for them
                _go_on([(graph, gradient)], retain_graph=not is_last)
            self._sent = left
            if not is_last:
                self._apply_sent(self._gaps, retain_graph=True)
                self._sent = None
        self._at_embeddings.clear()
        left = self._sent or _Backward([])
        return [*(gradient for _, _, gradient in left.to_send), *(gradient for _, gradient in left.to_apply)]

    @property
    def works(self) -> list[dist.Work]:
        """The collectives that are under way."""
        works = [work_of(gap.collective) for gap in self._gaps if gap.collective is not None]
        return [work for work in works if work is not None]

    def apply(self) -> None:
        """Wait for the gradients and update the tables, at the learning rates of their backward."""
        self.send()
        if self._sent is not None:
            self._apply_sent(self._gaps, retain_graph=False)
        self._forget_sent()

    def apply_parts(self, parts: Sequence[int], after_part: Callable[[int], None]) -> None:
        """Do the same for the module's fused parts, each once its own gradients are there; then call `after_part`.

        It is called for the same parts on all ranks, also on a rank that has nothing to update in one.
        """
        self.send()
        if self._sent is not None and self._sent.to_apply:  # nothing was sent
            self._apply_sent(self._gaps, retain_graph=False)
        elif self._sent is not None:
            for part in parts:
                self._apply_sent([gap for gap in self._gaps if gap.part == part], retain_graph=False)
                after_part(part)
        self._forget_sent()

    def abandon(self) -> list[Any]:
        """Drop the update; return what holds the tensors of its collectives that may be under way.

        Hooks of its leaves lead to the trainer, and back here. Python frees no such cycle: it is partly autograd's.
        """
        sent = [] if self._sent is None else [gradient for _, _, gradient in self._sent.to_send]
        held = [*sent, *(gap.collective for gap in self._gaps)]
        self._at_embeddings.clear()
        self._backwards.clear()
        self._forget_sent()
        return held

    def _forget_sent(self) -> None:
        self._sent = None
        self._gaps.clear()

    def _apply_sent(self, gaps: list[_Gap], *, retain_graph: bool) -> None:
        assert self._sent is not None
        # The second half of each collective has given its dummy tensor a gradient.
        received = [(gap.graph, gap.leaf.grad) for gap in gaps if gap.leaf.grad is not None]
        present, self._rates = kernel_rates(self._kernels), self._sent.rates
        set_kernel_rates(self._kernels, self._rates)
        try:
            _go_on([*received, *self._sent.to_apply], retain_graph=retain_graph)
        finally:
            self._rates = None
            set_kernel_rates(self._kernels, present)
        for gap in gaps:
            gap.leaf.grad = None
            if gap.collective is not None:
                # TorchRec has dropped it, but needs it for the gradient of the next backward.
                set_joint(gap.collective, gap.leaf)


def before_gradients(embeddings: object, num_parts: int, num_without: int) -> list[Tensor] | None:
    """Return the tensors on which a hook runs right before the backward of an early lookup waits for gradients.

    None if the backward may update without such a wait: if some of `num_parts` fused parts have none. `num_without`
    parts are sent without a graph.
    """
    # The empty tensors of `_open_gap`.
    joints = [joint_of(one) for one in collectives_in(embeddings) if is_sent(one)]
    found = [joint for joint in joints if joint is not None and joint.requires_grad]
    return found if num_parts <= len(found) == len(joints) - num_without else None


class _AtLeaf(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, leaf: Tensor, held: list[Tensor]) -> Tensor:
        return held[0]

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        return gradient.detach(), None  # `AccumulateGrad` keeps a tensor that nobody else holds, and copies others


def _at_leaf(leaf: Tensor) -> Tensor:
    """Return a leaf's values in a tensor that a step may change in place, which autograd forbids of a leaf."""
    values: Tensor = _AtLeaf.apply(leaf, [leaf.data])  # type: ignore[no-untyped-call]
    return values


def _go_on(stopped: list[tuple[Tensor, Tensor]], *, retain_graph: bool) -> None:
    """Let a backward that has stopped at gaps go on: from each graph's output, with its gradient."""
    if stopped:
        graphs, gradients = zip(*stopped, strict=True)
        torch.autograd.backward(graphs, gradients, retain_graph=retain_graph)
