"""Time the collectives that a process issues, under way and waited for on a lane, and count their bytes."""

from __future__ import annotations

from collections.abc import Callable, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from typing_extensions import override

from ..distributed import WrappedWork
from .spans import EMBEDDINGS, Category
from .timestamps import Record


class TimedWork(WrappedWork):
    """A collective under way that notes when it ends, and how long a lane waits for it.

    Args:
        work: The collective.
        flight: The record of its time under way; receives its end here.
        records: Receives a record for each wait.
        lane: Returns the lane that waits, when the wait begins.
    """

    def __init__(self, work: dist.Work, flight: Record, records: list[Record], lane: Callable[[], str]) -> None:
        super().__init__(work)
        self._flight, self._records, self._lane = flight, records, lane
        if flight.is_on_host:  # a thread of this process runs it (gloo), and not the device
            with suppress(RuntimeError):  # gloo's reduce-scatter has no future: then the wait for it tells
                work.get_future().add_done_callback(lambda _: setattr(flight, "end", flight.clock.mark()))

    @override
    def wait(self, timeout: Any = None) -> bool:
        """Wait for it: on a CPU the host stands still, on CUDA the current stream does.

        When a collective on CUDA ends nobody is told before its wait. Issued late, that makes the time under way
        too long; what was waited is right in any case.
        """
        flight = self._flight
        wait = replace(flight, kind=Category.WAIT, lane=self._lane(), start=flight.clock.mark(), end=None)
        done = super().wait(timeout)
        wait.end = flight.clock.mark()
        if flight.end is None:
            flight.end = wait.end
        self._records.append(wait)
        return done


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
