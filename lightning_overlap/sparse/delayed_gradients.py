"""Apply dense gradients k steps late, so that they are as old as the embeddings of a lookup with staleness k."""

from collections import deque
from collections.abc import Iterator
from weakref import WeakKeyDictionary

from torch import Tensor
from torch.optim import Optimizer
from torchrec.distributed.types import ShardedTensor

Gradients = list[tuple[Tensor, Tensor]]  # parameters that have a gradient, each with its gradient
_STATE = "stashed_gradient_"  # prefix of optimizer state with stashed gradients in a checkpoint, the oldest first


class GradientStash:
    """Keeps the gradients that each optimizer has yet to apply, the oldest first.

    Source: `stash_gradients` of TrainPipelineSemiSync, TorchRec 1.8, which never applies the last batch's.
    """

    def __init__(self) -> None:
        self._waiting: WeakKeyDictionary[Optimizer, deque[Gradients]] = WeakKeyDictionary()

    def num(self, optimizer: Optimizer) -> int:
        """Return the number of steps whose gradients an optimizer has yet to apply."""
        return len(self._waiting.get(optimizer, ()))

    def exchange(self, optimizer: Optimizer, delay: int) -> None:
        """Stash this step's gradients and put those of `delay` steps ago into `.grad`; None in the first steps."""
        waiting = self._waiting.setdefault(optimizer, deque())
        # Copies: gradients may be views of DistributedDataParallel's buckets, which the next backward writes.
        waiting.append([(weight, weight.grad.clone()) for weight in _weights(optimizer) if weight.grad is not None])
        self.show_oldest(optimizer, delay)

    def show_oldest(self, optimizer: Optimizer, delay: int = 0) -> None:
        """Put the oldest gradients into `.grad`; None if no more than `delay` steps are stashed."""
        for weight in _weights(optimizer):
            weight.grad = None
        waiting = self._waiting[optimizer]
        if len(waiting) > delay:
            for weight, gradient in waiting.popleft():
                weight.grad = gradient

    def as_state(self, optimizer: Optimizer) -> dict[Tensor, dict[str, Tensor]]:
        """Return the stashed gradients as optimizer state by parameter, for a checkpoint."""
        state: dict[Tensor, dict[str, Tensor]] = {}
        for index, gradients in enumerate(self._waiting.get(optimizer, ())):
            for weight, gradient in gradients:
                state.setdefault(weight, {})[f"{_STATE}{index}"] = gradient
        return state

    def take_from(self, optimizer: Optimizer, num: int) -> None:
        """Replace the stash by the gradients of `num` steps, which are removed from a loaded optimizer state."""
        waiting: deque[Gradients] = deque([] for _ in range(num))
        for weight in _weights(optimizer):
            for index, gradients in enumerate(waiting):
                gradient = optimizer.state.get(weight, {}).pop(f"{_STATE}{index}", None)
                if gradient is not None:
                    gradients.append((weight, gradient))
            if not optimizer.state.get(weight, True):
                del optimizer.state[weight]  # an optimizer expects its own state in every entry
        self._waiting[optimizer] = waiting


def _weights(optimizer: Optimizer) -> Iterator[Tensor]:
    """Yield the parameters that get a gradient from `backward`: all but sharded tables."""
    for group in optimizer.param_groups:
        yield from (weight for weight in group["params"] if not isinstance(weight, ShardedTensor))
