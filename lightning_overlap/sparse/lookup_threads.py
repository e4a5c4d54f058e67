"""Worker threads for the kernels of early lookups on a CPU, where no stream overlaps them with the backward."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from concurrent.futures import Future, ThreadPoolExecutor, wait
from contextlib import suppress
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor

from ..runtime import InFlightBatch


class LookedUp(NamedTuple):
    """What a thread has looked up."""

    by_part: Mapping[int, Tensor]
    num_lookups: list[int]
    """What the kernels have counted."""


@dataclass(frozen=True, slots=True)
class Job:
    """One module's lookup under way."""

    module: str
    inflight: InFlightBatch
    result: Future[LookedUp]


class LookupThreads:
    """Runs kernels in threads; whoever starts a collective or writes a table takes the results first.

    Source: `threads_num` of DeepRec's asynchronous embedding lookup; there the threads send the embeddings, too.

    Args:
        num_threads: Modules that are looked up at the same time, at most.
    """

    def __init__(self, num_threads: int) -> None:
        self._pool = ThreadPoolExecutor(num_threads, thread_name_prefix="embedding_lookup")
        self._jobs: list[Job] = []

    def submit(self, module: str, inflight: InFlightBatch, look_up: Callable[[], LookedUp]) -> None:
        """Begin a lookup with the caller's autograd and autocast modes, which belong to a thread.

        Args:
            module: Name of the sharded module.
            inflight: The batch.
            look_up: Runs the kernels, in a thread of the pool.
        """
        grad, cast = torch.is_grad_enabled(), torch.is_autocast_enabled("cpu")
        dtype = torch.get_autocast_dtype("cpu")

        def run() -> LookedUp:
            with torch.set_grad_enabled(grad), torch.autocast("cpu", dtype=dtype, enabled=cast):
                return look_up()

        self._jobs.append(Job(module, inflight, self._pool.submit(run)))

    def take(self) -> list[Job]:
        """Return the lookups under way, in the order of their begin."""
        jobs, self._jobs = self._jobs, []
        return jobs

    def wait(self, *_: Any) -> None:
        """Wait until no kernel reads a table; a lookup that failed says so when it is taken. Also a tensor's hook."""
        wait([job.result for job in self._jobs])

    def abandon(self) -> None:
        """Wait, and forget what was looked up and what failed."""
        for job in self.take():
            with suppress(Exception):
                job.result.result()

    def shutdown(self) -> None:
        """End the threads."""
        self.abandon()
        self._pool.shutdown()
