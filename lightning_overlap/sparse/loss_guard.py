"""What the backward of a loss that is not finite sends to tables: zeros, so that their updates change nothing."""

import copy
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torchrec import set_weights
from ..tables import answer_tensors


class LossGuard:
    """Turns gradients into zeros, on all ranks alike, in a backward whose loss is not finite on some rank.

    `finite` is whether the loss of the backward that runs is finite on all ranks: a bool, or, where the host does not
    know it yet, a bool tensor `()` on the device of the gradients; None outside of a backward.
    """

    def __init__(self) -> None:
        self.finite: bool | Tensor | None = None

    def watch(self, answer: Any) -> None:
        """Let the gradients of a module's answer pass `pass_on` before they are sent to the ranks of the tables."""
        for tensor in answer_tensors(answer):
            tensor.register_hook(self.pass_on)

    def pass_on(self, gradient: Tensor | None) -> Tensor | None:
        """Return a gradient of the backward that runs: the same one, or zeros. The host waits for nothing."""
        finite = self.finite
        if gradient is None or finite is None or finite is True:
            return gradient
        if finite is False:
            return torch.zeros_like(gradient)
        if gradient.is_cuda:
            finite.record_stream(torch.cuda.current_stream())  # of the lookup, perhaps
        # A product would leave NaN: 0 times NaN is NaN.
        return torch.where(finite, gradient, 0.0)


def with_finite_weights(features: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return ids whose weights are all finite, 0 in the place of others; the same object if the host knows they are.

    A kernel's backward multiplies gradients by the weights of ids, and zero times NaN is NaN. On CUDA the host cannot
    see whether there is such a weight, and always gets a new object.
    """
    weights = features.weights_or_none()
    if weights is None or (not weights.is_cuda and bool(torch.isfinite(weights).all())):
        return features
    mended = copy.copy(features)
    with torch.no_grad():
        own = torch.where(torch.isfinite(weights), weights, 0.0)
    set_weights(mended, own.requires_grad_(weights.requires_grad))
    return mended
