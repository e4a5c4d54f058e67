"""Timers of training steps, for a run and for a benchmark, and peak memory."""

import ctypes
import gc
import resource
import time
from collections.abc import Mapping, Sequence
from contextlib import ExitStack, suppress
from itertools import pairwise
from pathlib import Path
from statistics import median
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torchrec import KeyedJaggedTensor
from typing_extensions import override

from ..plugin import OverlapEmbeddingStrategy
from ..profiling import HOST_LANE, Category, Interval, Span, SpanRecorder, break_down, timestamps_of
from ..runtime import Streams, leaves
from ..schedules import StreamName
from .bench_report import Turn
from .config_checks import Config, per_step


class StepTimer(Callback):
    """Times every training step, from the end of the step before, and keeps its loss, without host-device syncs."""

    def __init__(self) -> None:
        self.step_ms: list[float] = []
        self.losses: list[Tensor | float] = []  # by step
        self.num_samples: list[int | None] = []  # by step, on this rank; None where a batch does not tell
        self._last = 0.0

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        timestamps_of(pl_module.device).wait()

    @override
    def on_train_epoch_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._last = time.perf_counter()

    on_validation_end = on_train_epoch_start

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        now = time.perf_counter()
        self.step_ms.append((now - self._last) * 1e3)
        self.num_samples.append(samples_in(batch))
        self._last = now
        self.losses.append(to_keep(loss_of(trainer, outputs)))

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self.step_ms:  # the last step includes the device's remaining work
            start = time.perf_counter()
            timestamps_of(pl_module.device).wait()
            self.step_ms[-1] += (time.perf_counter() - start) * 1e3


def samples_in(batch: Any) -> int | None:
    """Return the number of samples in any batch: of its first KeyedJaggedTensor, or else the rows of a tensor."""
    parts = [part for _, part in leaves(batch, lambda part: isinstance(part, KeyedJaggedTensor))]
    for part in parts:
        if isinstance(part, KeyedJaggedTensor):
            return int(part.stride())
    return next((len(part) for part in parts if isinstance(part, Tensor) and part.dim()), None)


def loss_of(trainer: Trainer, outputs: Any) -> Tensor:
    """Return the loss of a batch, `()`, without Lightning's division by accumulated batches; NaN if there is none."""
    loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
    loss = loss.detach() if isinstance(loss, Tensor) else torch.tensor(float("nan"))
    return loss * trainer.accumulate_grad_batches if trainer.accumulate_grad_batches > 1 else loss


def to_keep(loss: Tensor) -> Tensor | float:
    """Return a step's loss to keep for the whole run; on a CPU a number, as small kept tensors make a process grow."""
    return loss.item() if loss.device.type == "cpu" else loss.detach()


class Meter:
    """Times one turn's steps; the host waits for the device only before the first and after the last timed step."""

    def __init__(self, device: torch.device, config: Config) -> None:
        self._device, self._per_optimizer_step, measured = device, per_step(config), config["measured_steps"]
        self._first, self._last = config["warm_up"], config["warm_up"] + config["steps"]
        # Then collectives are recorded. One extra step first: it issues what the first measured step waits for.
        self._measured = range(self._last + 1, self._last + 2 + measured) if measured else range(0)
        self._recorder: SpanRecorder | None = None
        self._recording = ExitStack()
        self.close = self._recording.close  # stops the recorder, also after a failure
        self._clock = timestamps_of(device)
        self._marks: list[Any] = []
        self._cpu_marks: list[float] = []
        self._losses: list[Tensor | float] = []
        self._memory: dict[str, int] = {}

    def after_step(self, loss: Tensor, strategy: OverlapEmbeddingStrategy | None) -> None:
        """Note the end of a step; the loss is read after the run. `strategy` is None if it is not ours."""
        self._losses.append(to_keep(loss))
        step = len(self._losses)
        if step == self._first:
            self._clock.wait()
            self._clock = timestamps_of(self._device)  # CUDA's times are float32: count from here
            reset_peak_memory(self._device)
        if self._first <= step <= self._last:
            self._marks.append(self._clock.mark())
            self._cpu_marks.append(time.process_time() * 1e3)
        if step == self._last:
            self._clock.wait()
            self._memory = peak_memory(self._device)
            streams = Streams() if self._device.type == "cpu" else None if strategy is None else strategy.streams
            if self._measured and streams is not None:  # on CUDA, only if our strategy trains
                self._recorder = SpanRecorder(streams)
                self._recorder.start()
                self._recording.callback(self._recorder.stop)
                if strategy is not None:
                    strategy.watch(self._recorder)
                    self._recording.callback(strategy.watch, None)
        if self._recorder is not None and step in self._measured:
            self._recorder.step()
            if step == self._measured[-1]:
                self.close()

    def turn(self) -> tuple[Turn, list[Span]]:
        """Return the measurements, and the spans to draw: none if no stages were recorded."""
        self._clock.wait()
        losses_S = torch.tensor([*map(float, self._losses)])  # S steps
        num, lane = self._per_optimizer_step, HOST_LANE if self._device.type == "cpu" else str(StreamName.COMPUTE)
        spans, steps = ([], []) if self._recorder is None else (self._recorder.spans(), self._recorder.windows())
        breakdowns = [break_down(spans, step, host_lane=lane) for step in steps]
        # A step's time is the mean over the batches of an optimizer step.
        turn = Turn(
            step_ms=[(late - early) / num for early, late in pairwise(map(self._clock.ms, self._marks[::num]))],
            cpu_ms=[(late - early) / num for early, late in pairwise(self._cpu_marks[::num])],
            losses=losses_S.numpy().tobytes(),
            final_loss=float(losses_S[-1]),
            peak_memory=self._memory,
            busy_ms=[one.step_ms - one.blocked_ms for one in breakdowns],
            wire_ms=[one.categories[Category.COMMUNICATION].busy_ms for one in breakdowns],
            exposed_ms=[one.blocked_ms for one in breakdowns],
            collectives=by_name(spans, steps, lane),
        )
        return turn, spans if any(span.kind is Category.DENSE for span in spans) else []


def by_name(spans: Sequence[Span], steps: Sequence[Interval], lane: str) -> dict[str, tuple[float, float]]:
    """Return collective -> median ms by step in which it was in progress, and in which `lane` waited for it."""
    under_way = [span for span in spans if span.kind is Category.COMMUNICATION]
    waits = [span for span in spans if span.kind is Category.WAIT and span.lane == lane]

    def typical(name: str, seen: list[Span]) -> float:
        times = [(span.start_ms, span.duration_ms) for span in seen if span.name == name]
        return median(sum(ms for start, ms in times if begin <= start < end) for begin, end in steps)

    names = dict.fromkeys(span.name for span in under_way + waits)
    return {name: (typical(name, under_way), typical(name, waits)) for name in names}


def free_memory(device: torch.device) -> None:
    """Return free memory to the system, so that it does not count in the next run's peak."""
    gc.collect()
    if device.type == "cuda":
        torch.cuda.empty_cache()
    else:
        with suppress(AttributeError):  # the C library is not glibc
            ctypes.CDLL(None).malloc_trim(0)


def reset_peak_memory(device: torch.device) -> None:
    """Restart `peak_memory`, if the system allows it."""
    if device.type == "cuda":
        torch.cuda.reset_peak_memory_stats(device)
        return
    with suppress(OSError):  # without this file or permission, the peak is since the start of the process
        Path("/proc/self/clear_refs").write_text("5")  # sets the peak to the resident memory now; see proc(5)


def peak_memory(device: torch.device) -> dict[str, int]:
    """Return the process's peak memory in bytes: allocated and reserved on CUDA, resident on a CPU."""
    if device.type == "cuda":
        return {
            "allocated": torch.cuda.max_memory_allocated(device),
            "reserved": torch.cuda.max_memory_reserved(device),
        }
    return {"resident": resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * 1024}
