"""A gloo backend whose all-to-alls use both directions of a link at once, whichever rank arrives first."""

import threading
from collections.abc import Callable, Sequence
from contextlib import suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor

BACKEND = "gloo_receives_first"  # the name for `torch.distributed.new_group`


class ReceivesFirst(dist.ProcessGroup):
    """gloo with all-to-alls that post point-to-point receives first and sends second.

    gloo's own all-to-all posts the send first, and a connection keeps that order: the later rank sends all its data
    before it announces that it is ready to receive, so a link of limited bandwidth takes twice as long.

    All other calls go to gloo directly and not through the base class: that would hold Python's lock, for which a gloo
    thread with its own lock may wait. All ranks issue a group's all-to-alls in the same order.
    """

    def __init__(self, gloo: dist.ProcessGroupGloo, rank: int, size: int) -> None:
        super().__init__(rank, size)  # type: ignore[call-arg]
        self._gloo: Any = gloo  # torch's annotations lack methods that every backend has
        self._num = 0
        self._register_backend(torch.device("cpu"), dist.ProcessGroup.BackendType.GLOO, gloo)

    def _get_backend_name(self) -> str:
        return "gloo"  # PyTorch's sharded tensors take this name for host memory, and any other name for a device's

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
        works = [self._gloo.recv([received[rank]], rank, tag) for rank in others if received[rank].numel()]
        works += [self._gloo.send([sent[rank]], rank, tag) for rank in others if sent[rank].numel()]
        if sent[me].numel():  # empty tensors may have different shapes
            with torch.no_grad():
                received[me].copy_(sent[me])
        return Exchange(works, (output, input))

    all_to_all_single = alltoall_base  # type: ignore[assignment]
    """`torch.distributed.all_to_all_single` calls this from 2.13 on; earlier versions call the other name."""


_COLLECTIVES = (
    *("allreduce", "allreduce_coalesced", "broadcast", "reduce", "gather", "scatter", "alltoall", "barrier"),
    *("allgather", "_allgather_base", "allgather_coalesced", "reduce_scatter", "_reduce_scatter_base"),
    *("send", "recv", "recv_anysource", "gather_single"),
)
_OLDER = {"all_gather_single": "_allgather_base", "reduce_scatter_single": "_reduce_scatter_base"}
"""Process group method in torch 2.13 and 2.14 -> gloo's older name for it."""


def _hand_on(group: type, gloo: type) -> None:
    def handed_on(name: str) -> Callable[..., Any]:
        return lambda self, *args, **kwargs: getattr(self._gloo, name)(*args, **kwargs)

    for name in (*_COLLECTIVES, *_OLDER):
        method = name if hasattr(gloo, name) else _OLDER.get(name, name)
        if hasattr(gloo, method):
            setattr(group, name, handed_on(method))


_hand_on(ReceivesFirst, dist.ProcessGroupGloo)


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
