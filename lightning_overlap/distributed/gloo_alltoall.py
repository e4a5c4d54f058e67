"""A gloo backend whose all-to-alls use both directions of a link at once, whichever rank arrives first."""

import threading
from collections.abc import Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

from ..compat.torch import OverGloo

BACKEND = "gloo_receives_first"  # the name for `torch.distributed.new_group`


class ReceivesFirst(OverGloo):
    """gloo with all-to-alls that post point-to-point receives first and sends second.

    gloo's own all-to-all posts the send first, and a connection keeps that order: the later rank sends all its data
    before it announces that it is ready to receive, so a link of limited bandwidth takes twice as long.

    All ranks issue a group's all-to-alls in the same order.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int) -> None:
        super().__init__(gloo, rank, size)
        self._num = 0

    def alltoall_base(
        self,
        output: Tensor,
        input: Tensor,
        output_split_sizes: Sequence[int],
        input_split_sizes: Sequence[int],
        opts: Any = None,
    ) -> dist.Work:
        """Start an all-to-all of contiguous tensors of one dtype on the host; empty split sizes: equal parts."""
        me, size = self.rank(), self.size()
        received, sent = (
            tensor.detach().split(list(split_sizes) or [len(tensor) // size] * size)
            for tensor, split_sizes in ((output, output_split_sizes), (input, input_split_sizes))
        )
        # Each all-to-all has its own tag: with a shared tag, a send that waits until the other rank is ready and a send
        # posted at that moment may be received in either order.
        tag, self._num = self._num, (self._num + 1) % (1 << 31)
        others = [(me + shift) % size for shift in range(1, size)]
        works = [self.gloo.recv([received[rank]], rank, tag) for rank in others if received[rank].numel()]
        works += [self.gloo.send([sent[rank]], rank, tag) for rank in others if sent[rank].numel()]
        if sent[me].numel():  # empty tensors may have different shapes
            with torch.no_grad():
                received[me].copy_(sent[me])
        return Exchange(works, (output, input))

    all_to_all_single = alltoall_base  # type: ignore[assignment]
    """`torch.distributed.all_to_all_single` calls this from 2.13 on; earlier versions call the other name."""


class Exchange(dist.Work):
    """The receives and sends of one all-to-all; gloo allows a single wait for each."""

    def __init__(self, works: list[dist.Work], tensors: tuple[Tensor, Tensor]) -> None:
        super().__init__()
        self._works, self._tensors = works, tensors  # keeps the all-to-all's input and output alive
        self._turn = threading.Lock()
        self._error: RuntimeError | None = None
        self._future: torch.futures.Future[None] | None = None

    def wait(self, timeout: timedelta | None = None) -> bool:
        """Wait on the host until all data was received and sent; every later wait raises the same RuntimeError."""
        with self._turn:  # a second thread waits for the first one
            if self._error is not None:
                raise self._error
            try:
                for work in self._works:
                    work.wait() if timeout is None else work.wait(timeout)
            except RuntimeError as error:
                self._error = error
                raise
            finally:
                self._works = []
        return True

    def is_completed(self) -> bool:
        """Whether the all-to-all is over. gloo tells only a wait: the first question starts a thread that waits."""
        if self._works:
            self.get_future()
        return not self._works

    def get_future(self) -> torch.futures.Future[None]:
        """Return a future that a waiting thread completes at the end; `wait` raises a failure, the future does not."""
        if self._future is None:
            self._future = torch.futures.Future()
            threading.Thread(target=self._complete, daemon=True, name="end of an all-to-all").start()
        return self._future

    def _complete(self) -> None:
        with suppress(RuntimeError):
            self.wait()
        assert self._future is not None
        self._future.set_result(None)


def register() -> str:
    """Register the backend with `torch.distributed`, once, and return its name."""

    def create(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
        return ReceivesFirst(dist.ProcessGroupGloo(store, rank, size, timeout=timeout), rank, size)

    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, create, devices=["cpu"])
    return BACKEND
