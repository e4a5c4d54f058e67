"""Points in time on the host or on a CUDA stream, taken without making the host wait."""

from __future__ import annotations

import time

import torch


class HostTimestamps:
    """Points in time of the calling thread."""

    shift_ms = 0.0  # what is added to them, to be compared with another clock's

    def mark(self) -> float:
        """Return the time now, milliseconds."""
        return time.perf_counter() * 1e3

    def ms(self, mark: float) -> float:
        """Return the mark, shifted."""
        return mark + self.shift_ms

    def wait(self) -> None:
        """Do nothing: every mark can be read."""


class CudaTimestamps:
    """Points in time of the current stream of a CUDA device, by timing events."""

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
