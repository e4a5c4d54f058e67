"""Backwards of fused kernels that may repeat their lookup: to update at the present rate, or by finite weights."""

import copy
from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import Tensor
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.fbgemm import FusedKernel, lookup_counts, uncount
from ..compat.torchrec import lookups_of, set_weights
from ..runtime import NOTHING, Streams
from ..tables import SetRates, parts_trained_here, tables_of, tbes_within
from .finite_weights import with_finite_weights
from .other_forwards import other_forwards

Kernels: TypeAlias = list[FusedKernel]


def kernel_rates(kernels: Kernels) -> list[float]:
    """Return the learning rate of each kernel, which is kept on the host."""
    return [tbe.get_learning_rate() for tbe in kernels]


def set_kernel_rates(kernels: Kernels, rates: list[float]) -> None:
    """Give each kernel its learning rate."""
    for tbe, rate in zip(kernels, rates, strict=True):
        tbe.set_learning_rate(rate)


def lookups_since(kernels: Kernels, counts: list[int]) -> list[int]:
    """Return how much the iteration count of each kernel has grown since `counts`."""
    return [now - before for now, before in zip(lookup_counts(kernels), counts, strict=True)]


@contextmanager
def counting(kernels: Kernels, counted: list[int]) -> Iterator[None]:
    """Add to `counted` how much the iteration count of each kernel grows within this context."""
    before = lookup_counts(kernels)
    yield
    done = lookups_since(kernels, before)
    counted[:] = [a + b for a, b in zip(counted, done, strict=True)] if counted else done


def take_back(kernels: Kernels, num_lookups: list[int], streams: Streams) -> None:
    """Subtract lookups without an update from the kernels' iteration counts; negative numbers add lookups.

    FBGEMM 1.8 counts lookups, not updates, and Adam corrects its bias by that count.
    """
    if any(num_lookups):
        with streams.on_lookup():
            uncount(kernels, num_lookups)


def updates_at_present_rate(
    module: Any, set_rates: SetRates | None, *, mends_weights: bool = False
) -> AbstractContextManager[None]:
    """Within this context fused tables return embeddings whose backward takes the learning rate of its own time.

    `set_rates` None: that of the lookup. With `mends_weights` it takes 0 for each weight of an id that is not finite.
    """
    if (set_rates is None and not mends_weights) or not torch.is_grad_enabled():
        return NOTHING
    set_rates = set_rates or _leave_rates
    set_rates()
    # Every part with a TBE, also of the dense optimizer, which owns a part if one of its tables has a dense kernel.
    parts = [
        (lookup, _FusedLookup(lookup.forward, tbes_within([lookup]), trains, set_rates, mends_weights))
        for lookup, trains in zip(lookups_of(tables_of(module)), parts_trained_here(module), strict=True)
    ]
    return other_forwards([(lookup, fused) for lookup, fused in parts if fused.kernels])


def _leave_rates() -> None:
    """Take the place of `set_rates` without a scheduler."""


@dataclass(frozen=True, slots=True)
class _FusedLookup:
    """The lookup of one part with fused tables, which the backward can repeat."""

    forward: Callable[[KeyedJaggedTensor], Tensor]
    kernels: Kernels
    trains: bool  # whether they train any table
    set_rates: SetRates
    mends_weights: bool

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        # There is no backward without an input that requires a gradient, as weights of feature processors do.
        weights = features.weights_or_none()
        trained_weights = weights if weights is not None and weights.requires_grad else None
        if trained_weights is None and not self.trains:
            return self.forward(features)  # of frozen tables: they have no graph
        anchor = torch.zeros((), requires_grad=True) if trained_weights is None else trained_weights
        embeddings: Tensor = _AtPresentRate.apply(anchor, self, features)  # type: ignore[no-untyped-call]
        return embeddings

    def run(self, features: KeyedJaggedTensor) -> tuple[Tensor, GradientEdge]:
        """Return the embeddings, detached, and the edge at which their graph begins."""
        # A copy: TorchRec writes weights that scale gradients into its input, and must not do so twice.
        with torch.enable_grad():
            embeddings = self.forward(copy.copy(features))
        return embeddings.detach(), get_gradient_edge(embeddings)

    def run_again(self, features: KeyedJaggedTensor, counts: list[int]) -> GradientEdge:
        """Look up again with the iteration counts of the first lookup, then restore the present counts."""
        ahead = lookups_since(self.kernels, counts)  # this lookup, and lookups of later batches
        uncount(self.kernels, ahead)
        _, edge = self.run(features)
        repeated = lookups_since(self.kernels, counts)
        uncount(self.kernels, [a - b for a, b in zip(repeated, ahead, strict=True)])
        return edge


class _AtPresentRate(torch.autograd.Function):
    """Embedding lookup whose TBE backward uses the learning rate at backward time.

    FBGEMM 1.8 keeps the rate of the forward for the backward, but batch N is looked up before the scheduler steps to N.
    If the rate has changed by the backward, the kernels' forward runs again on the same ids, and its graph takes the
    gradient. The repeated embeddings may be newer, but the gradient of a row does not depend on them.

    On CUDA a backward runs on the stream of its forward, here the lookup stream, and so do the repeated forward and the
    inner backward: after the last update and before the next lookup. The only leaves of the inner graph are the
    kernels' weights, which accumulate nothing and are no part of DDP. The inner backward ends by waiting for the stream
    of their nodes, which is an idle one (`Streams.hold_leaves`), and not the compute stream.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: _FusedLookup, features: KeyedJaggedTensor) -> Tensor:
        weights, ctx.weights = features.weights_or_none(), None
        if weights is not None and weights.requires_grad:  # the graph of feature processors begins here
            features = copy.copy(features)
            ctx.weights = weights.detach().requires_grad_()
            set_weights(features, ctx.weights)
        ctx.lookup, ctx.features = lookup, features
        ctx.counts, ctx.rates = lookup_counts(lookup.kernels), kernel_rates(lookup.kernels)
        embeddings, ctx.edge = lookup.run(features)
        return embeddings

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        lookup: _FusedLookup = ctx.lookup
        edge, ctx.edge = ctx.edge, None  # a second backward (retain_graph=True) finds this graph used up
        lookup.set_rates()
        features = with_finite_weights(ctx.features) if lookup.mends_weights else ctx.features
        if features is not ctx.features and ctx.weights is not None:
            ctx.weights = features.weights()
        if edge is None or features is not ctx.features or kernel_rates(lookup.kernels) != ctx.rates:
            edge = lookup.run_again(features, ctx.counts)
        torch.autograd.backward(edge, grad)
        if ctx.weights is None:
            return None, None, None
        of_weights, ctx.weights.grad = ctx.weights.grad, None
        return of_weights, None, None
