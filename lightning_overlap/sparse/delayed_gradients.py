"""Gradients of the dense part that are applied some steps after their own, as old as the rows of a stale lookup are."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torchrec.distributed.types import ShardedTensor

Gradients = list[tuple[Tensor, Tensor]]
"""Parameters, and the gradient of each; those without one are left out."""

_STATE = "stashed_gradient_"
"""Kinds of optimizer state that hold stashed gradients in a checkpoint, numbered from the oldest."""


class GradientStash:
    """What each optimizer is still to apply, the oldest first.

    Gradients are copied: DistributedDataParallel, of which TorchRec puts one around data-parallel tables, may have made
    them views of its buckets, which the next backward writes.

    Source: `stash_gradients` of TrainPipelineSemiSync, TorchRec 1.8, which knows one batch and loses the last one's.
    """

    def __init__(self) -> None:
        self._waiting: WeakKeyDictionary[Optimizer, deque[Gradients]] = WeakKeyDictionary()

    def num(self, optimizer: Optimizer) -> int:
        """How many steps' gradients an optimizer has yet to apply."""
        return len(self._waiting.get(optimizer, ()))

    def exchange(self, optimizer: Optimizer, delay: int) -> None:
        """Stash the gradients of this step; show the oldest in their place, or none if there are no more than `delay`.

        A parameter without a gradient is one that the optimizers of torch.optim leave alone, its state too.
        """
        waiting = self._waiting.setdefault(optimizer, deque())
        waiting.append([(weight, weight.grad.clone()) for weight in _weights(optimizer) if weight.grad is not None])
        self.show_oldest(optimizer, delay)

    def show_oldest(self, optimizer: Optimizer, delay: int = 0) -> None:
        """Show the oldest gradients as those of this step, or none if there are no more than `delay`."""
        for weight in _weights(optimizer):
            weight.grad = None
        waiting = self._waiting[optimizer]
        if len(waiting) > delay:
            for weight, gradient in waiting.popleft():
                weight.grad = gradient

    def as_state(self, optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
        """Return what waits as kinds of state of the parameters."""
        state: dict[Tensor, dict[str, Tensor]] = {}
        for index, gradients in enumerate(self._waiting.get(optimizer, ())):
            for weight, gradient in gradients:
                state.setdefault(weight, {})[f"{_STATE}{index}"] = gradient
        return state

    def take_from(self, optimizer: Optimizer, num: int) -> None:
        """Take so many steps' gradients out of a loaded state; they take the place of what waited."""
        waiting: deque[Gradients] = deque([] for _ in range(num))
        for weight in _weights(optimizer):
            for index, gradients in enumerate(waiting):
                gradient = optimizer.state.get(weight, {}).pop(f"{_STATE}{index}", None)
                if gradient is not None:
                    gradients.append((weight, gradient))
            if not optimizer.state.get(weight, True):
                del optimizer.state[weight]  # optimizers take an entry for one that they have filled
        self._waiting[optimizer] = waiting


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    """The parameters that a backward leaves a gradient at."""
    for group in optimizer.param_groups:
        yield from (weight for weight in group["params"] if not isinstance(weight, ShardedTensor))
