"""Points in time on the host or on a CUDA stream, taken without making the host wait."""

from __future__ import annotations

import time
from dataclasses import dataclass
from typing import Any

import torch

from ..schedules import Stage
from .spans import Category, Span


class HostTimestamps:
    """Points in time of the calling thread."""

    shift_ms = 0.0
    """What is added to them, to be compared with another clock's."""

    def mark(self) -> float:
        """Return the time now, milliseconds."""
        return time.perf_counter() * 1e3

    def ms(self, mark: float) -> float:
        """Return the mark, shifted."""
        return mark + self.shift_ms

    def wait(self) -> None:
        """Do nothing: every mark can be read."""


class CudaTimestamps:
    """Points in time of the current CUDA stream, by timing events.

    Args:
        device: The CUDA device whose streams are timed.
    """

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = self.mark()

    def mark(self) -> torch.cuda.Event:
        """Return an event after all work that the current stream has been given."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms(self, mark: torch.cuda.Event) -> float:
        """Return when that was, counted from the first mark."""
        return float(self._zero.elapsed_time(mark))

    def wait(self) -> None:
        """Wait for the device, so that every mark can be read."""
        torch.cuda.synchronize(self._device)


Timestamps = HostTimestamps | CudaTimestamps
"""Takes points in time on a lane, which are read later."""


def timestamps_of(device: torch.device) -> Timestamps:
    """Return the clock of a device's work: timing events on CUDA, the host's clock on a CPU."""
    return CudaTimestamps(device) if device.type == "cuda" else HostTimestamps()


@dataclass(slots=True)
class Record:
    """A span to be: begin and end are points in time that are read later.

    Attributes:
        kind: As of a `Span`, like the next four.
        clock: Takes its times.
        start: When it began.
        end: When it ended; None before that.
        sent_bytes: What it sends to other ranks, if it is a collective.
        saved_bytes: What it would have sent besides, in full precision.
    """

    kind: Category
    lane: str
    name: str
    stage: Stage | None
    batch: int | None
    clock: Timestamps
    start: Any
    end: Any = None
    sent_bytes: int = 0
    saved_bytes: int = 0

    @property
    def is_on_host(self) -> bool:
        """Whether the host's clock takes its times, and not a device's."""
        return isinstance(self.clock, HostTimestamps)

    @property
    def start_ms(self) -> float:
        """When it began, milliseconds."""
        return self.clock.ms(self.start)

    def span(self) -> Span:
        """Return the span of a record that has ended."""
        start_ms = self.start_ms
        end_ms = max(start_ms, self.clock.ms(self.end))
        return Span(start_ms, end_ms, self.kind, self.lane, self.name, self.stage, self.batch)
