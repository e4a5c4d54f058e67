"""Time stamps of the host or of a CUDA stream, without host-device syncs."""

from __future__ import annotations

import time

import torch


class HostTimestamps:
    """Time stamps of the host's clock."""

    shift_ms = 0.0  # added by `ms`, to align with another clock

    def mark(self) -> float:
        """Return the time now in ms."""
        return time.perf_counter() * 1e3

    def ms(self, mark: float) -> float:
        """Return the mark, shifted."""
        return mark + self.shift_ms

    def wait(self) -> None:
        """Do nothing; `CudaTimestamps` waits for the device."""


class CudaTimestamps:
    """Timing events on the current stream of a CUDA device; they must be over when `ms` reads them."""

    def __init__(self, device: torch.device) -> None:
        self._device = device
        self._zero = self.mark()

    def mark(self) -> torch.cuda.Event:
        """Record an event on the current stream and return it."""
        event = torch.cuda.Event(enable_timing=True)
        event.record(torch.cuda.current_stream(self._device))
        return event

    def ms(self, mark: torch.cuda.Event) -> float:
        """Return the time of a mark in ms since this object was made."""
        return float(self._zero.elapsed_time(mark))

    def wait(self) -> None:
        """Wait for the device, so that every mark can be read."""
        torch.cuda.synchronize(self._device)


Timestamps = HostTimestamps | CudaTimestamps


def timestamps_of(device: torch.device) -> Timestamps:
    """Return timing events for CUDA, the host's clock for a CPU."""
    return CudaTimestamps(device) if device.type == "cuda" else HostTimestamps()
