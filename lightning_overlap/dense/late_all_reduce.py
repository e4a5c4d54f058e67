"""Wait for the all-reduce of dense gradients later than in the backward that issues it."""

from typing import Any

import torch
import torch.distributed as dist
from torch.futures import Future
from torch.nn.parallel import DistributedDataParallel


class LateAllReduce:
    """A communication hook of DistributedDataParallel on a CPU: `wait` waits for all buckets, the backward does not."""

    def __init__(self, model: DistributedDataParallel) -> None:
        self._group: Any = model.process_group
        self._factor = 1.0 / self._group.size()
        self._under_way: list[tuple[dist.Work, Any]] = []
        self.is_late = False  # whether `wait` waits for the gradients of the present step; else the backward does
        self._model: DistributedDataParallel | None = model  # until the hook is registered

    def register(self) -> None:
        """Register the hook before the first forward, unless the user has registered one, in `on_train_start` say."""
        model, self._model = self._model, None
        if model is not None and not model._comm_hooks:
            model.register_comm_hook(self, lambda late, bucket: late.start(bucket))

    def start(self, bucket: Any) -> Future[torch.Tensor]:
        """Start the all-reduce of a bucket; return the future for which DistributedDataParallel waits."""
        buffer = bucket.buffer()
        buffer.mul_(self._factor)
        work: Any = dist.all_reduce(buffer, group=self._group, async_op=True)
        if not self.is_late:
            return work.get_future().then(lambda done: done.value()[0])  # type: ignore[no-any-return]
        self._under_way.append((work, bucket))
        over: Future[torch.Tensor] = Future()
        over.set_result(buffer)
        return over

    def wait(self) -> None:
        """Wait for the gradients of all ranks, and give them to the weights."""
        for work, bucket in self._under_way:
            work.wait()
            for weight, gradient in zip(bucket.parameters(), bucket.gradients(), strict=True):
                if weight.grad is not None:
                    weight.grad.copy_(gradient)
        self.forget()

    def forget(self) -> None:
        """Forget the all-reduces under way."""
        self._under_way.clear()
