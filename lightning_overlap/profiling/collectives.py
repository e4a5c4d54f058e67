"""Time the collectives that a process issues, under way and waited for on a lane, and count their bytes."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..distributed import Issue, WrappedWork, wrap_collectives
from .spans import EMBEDDINGS, Category
from .timestamps import Record, Timestamps


class Collective:
    """Times one collective: how long it is under way, and how long a lane waits for it.

    Args:
        flight: The record of its time under way; receives its end here.
        marks: Takes the timestamps: the host's for gloo, the current stream's otherwise.
        records: Receives a record for each wait.
        lane: The lane that waits, or a function that returns it when the wait begins.
    """

    def __init__(self, flight: Record, marks: Timestamps, records: list[Record], lane: str | Callable[[], str]) -> None:
        self._flight, self._marks, self._records, self._lane = flight, marks, records, lane

    @property
    def on_host(self) -> bool:
        """Whether a thread of this process runs it (gloo), and not the device."""
        return self._flight.on_host

    def count(self, sent: int, saved_share: float) -> None:
        """Note the bytes that it sends to other ranks, and how many a codec has saved for each of them."""
        self._flight.sent_bytes, self._flight.saved_bytes = sent, int(sent * saved_share)

    def completed(self) -> None:
        """Note the end, from the thread that ran the collective."""
        self._flight.end = time.perf_counter() * 1e3

    @contextmanager
    def waiting(self) -> Iterator[None]:
        """Go around a wait for it: on a CPU the host stands still, on CUDA the current stream does.

        When a collective on CUDA ends nobody is told before its wait. Issued late, that makes the time under way
        too long; what was waited is right in any case.
        """
        flight = self._flight
        lane = self._lane if isinstance(self._lane, str) else self._lane()
        wait = replace(flight, kind=Category.WAIT, lane=lane, start=self._marks.mark(), end=None)
        yield
        wait.end = self._marks.mark()
        if flight.end is None:
            flight.end = wait.end
        self._records.append(wait)


class _TimedWork(WrappedWork):
    """A collective under way, timed."""

    def __init__(self, work: dist.Work, timer: Collective) -> None:
        super().__init__(work)
        self._timer = timer

    @override
    def wait(self, timeout: Any = None) -> bool:
        with self._timer.waiting():
            return super().wait(timeout)


def sent_bytes(name: str, call: Mapping[str, Any]) -> int:
    """Return how many bytes a collective sends from this rank to others; of a reduction, as by a ring.

    Args:
        name: Its function in `torch.distributed`.
        call: The arguments, by name.
    """
    group = call.get("group")
    size, rank = dist.get_world_size(group), dist.get_rank(group)
    if name == "reduce_scatter":
        return sum(part.nbytes for place, part in enumerate(call["input_list"]) if place != rank)
    [sent] = [call[argument] for argument in ("input", "input_tensor", "tensor") if argument in call]
    if splits := call.get("input_split_sizes"):
        return int(sent.nbytes - splits[rank] * sent[:1].nbytes)
    if name == "all_gather_into_tensor":
        return int(sent.nbytes) * (size - 1)
    return int(sent.nbytes) * (size - 1) // size * (2 if name == "all_reduce" else 1)


def saved_share(name: str, sent: Any, compression: Mapping[str, float]) -> float:
    """Return how many bytes a codec has saved, for each byte that is sent.

    Args:
        name: What the collective carries, as `all_to_all_name` says.
        sent: Its input, whose dtype tells whether there was a codec; anything else was sent as it is.
        compression: By how much codecs shrink `embeddings` and `gradients` into bytes.
    """
    if not isinstance(sent, Tensor):
        return 0.0
    if sent.dtype in (torch.float16, torch.bfloat16):
        return 4 / sent.element_size() - 1
    return compression.get(name, 1.0) - 1 if sent.dtype is torch.uint8 else 0.0


def all_to_all_name(sent: Tensor, *splits: Any) -> str:
    """Return what an all-to-all carries: `sizes`, `ids`, `embeddings` or `gradients`.

    The arguments tell, so it works for every pipeline: gradients and embeddings are floats, or bytes that a codec has
    made of them, and gradients are sent within a backward; ids and lengths are sent in parts of given sizes; the sizes
    themselves in equal parts.

    Args:
        sent: The input of the all-to-all, any shape and dtype.
        *splits: Its split sizes, None for equal parts.
    """
    if sent.is_floating_point() or sent.dtype is torch.uint8:
        return "gradients" if torch._C._current_graph_task_id() != -1 else EMBEDDINGS
    return "sizes" if all(split is None for split in splits) else "ids"


def record_collectives(
    make_timer: Callable[[str, str, bool], Collective], compression: Mapping[str, float] | None = None
) -> AbstractContextManager[None]:
    """Time the collectives that this process issues through `torch.distributed`.

    DistributedDataParallel issues its all-reduce from C++, out of sight: it counts as part of the backward.

    Args:
        make_timer: Called for each with its name, its group's description, and whether it sends memory of the host.
        compression: By how much codecs shrink `embeddings` and `gradients`; None where there are none.
    """

    def timed(name: str, call: dict[str, Any], issue: Issue) -> dist.Work | None:
        sent = call.get("input", call.get("input_tensor", call.get("tensor")))
        function = name
        if name == "all_to_all_single":
            assert isinstance(sent, Tensor)
            name = all_to_all_name(sent, call.get("input_split_sizes"), call.get("output_split_sizes"))
        group = call.get("group")
        on_host = isinstance(sent, Tensor) and sent.device.type == "cpu"
        timer = make_timer(name, "default" if group is None else str(group.group_desc), on_host)
        share = 0.0 if compression is None else saved_share(name, sent, compression)
        timer.count(sent_bytes(function, call), share)
        work = issue()
        if work is None:
            return None
        if timer.on_host:
            with suppress(RuntimeError):  # gloo's reduce-scatter has no future: then the wait for it tells
                work.get_future().add_done_callback(lambda _: timer.completed())
        return _TimedWork(work, timer)

    return wrap_collectives(timed)
