"""What the backward of a loss that is not finite sends to tables: zeros, so that their updates change nothing."""

from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...tables import answer_tensors
from .watcher import Watcher


class LossGuard(Watcher):
    """Turns gradients into zeros, on all ranks alike, in a backward whose loss is not finite on some rank.

    `finite` is whether the loss of the backward that runs is finite on all ranks: a bool, or, where the host does not
    know it yet, a bool tensor `()` on the device of the gradients; None outside of a backward.
    """

    def __init__(self) -> None:
        self.finite: bool | Tensor | None = None

    @override
    def received(self, name: str, embeddings: Any, deferred: object) -> None:
        """Let the gradients of a module's embeddings pass `pass_on` before they are sent to the ranks of the tables."""
        for tensor in answer_tensors(embeddings):
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
