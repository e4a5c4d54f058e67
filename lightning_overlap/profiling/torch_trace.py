"""Read a GPU trace of torch.profiler (Kineto): a kernel belongs to the innermost annotation around its launch."""

import bisect
import re
from collections import Counter, defaultdict
from collections.abc import Iterable, Iterator, Mapping, Sequence
from operator import attrgetter
from pathlib import Path
from typing import Any, NamedTuple, Self

from ..schedules import Stage
from . import trace_names as names
from .spans import EMBEDDINGS, HOST_LANE, Category, Span
from .steps import is_step_mark
from .trace_file import WRITER, Event, TraceError, load, own_spans

BLOCKED_US = 50  # a longer runtime call blocked the host; a launch takes a tenth of it

QUEUED_MS, RELEASED_MS = 0.01, 0.1
"""A kernel waited for another stream if it starts more than `QUEUED_MS` after its launch and after the previous kernel
of its stream. It waited for work that ended at most `RELEASED_MS` earlier; otherwise the cause is unknown."""

_ON_DEVICE = ("kernel", "gpu_memcpy", "gpu_memset")
_RUNTIME = ("cuda_runtime", "cuda_driver")
_DAY_US = 86400e6


def read_trace(path: Path | str) -> dict[int, list[Span]]:
    """Return the spans of a trace by rank, sorted by time.

    Lanes are "host" (the training thread), "autograd", "thread N" and "stream N" (of a GPU). Times are in ms since
    midnight, so that traces of one host share a clock. The rank is 0 if the file does not name it.

    `path` is a trace of torch.profiler on a GPU, or a file of `write_trace`; JSON or gzipped JSON. Raises a TraceError
    for any other file.
    """
    events, about = load(Path(path))
    other = about.get("otherData")
    if isinstance(other, dict) and other.get("writer") == WRITER:
        return own_spans(events)
    if not any(event.category in _ON_DEVICE for event in events):
        found = Counter(event.category for event in events).most_common()
        raise TraceError(
            f"{path} holds no work of a GPU.\n  got:  {', '.join(f'{num} {kind}' for kind, num in found)}\n"
            "  On a CPU use the callback OverlapTimeline (overlap-train callbacks=timeline) and its trace. On a GPU "
            "add ProfilerActivity.CUDA to the profiler's activities."
        )
    info = about.get("distributedInfo")
    rank = info.get("rank") if isinstance(info, dict) else None
    return {rank if isinstance(rank, int) else 0: _Reader(events, about).spans()}


class _Context(NamedTuple):
    """The innermost stage, batch, annotation, operator and source lines around a moment of a thread."""

    stage: Stage | None = None
    batch: int | None = None
    annotation: str = ""
    operator: str = ""
    source: str = ""
    caller: str = ""

    def inside(self, event: Event) -> Self:
        if event.category == "cpu_op":
            return self._replace(operator=event.name, stage=names.of_operator(event.name) or self.stage)
        stage, (batch, name) = names.of_annotation(event.name), names.split_batch(event.name)
        name = name if stage is not None or event.name.startswith("##") else self.annotation
        batch = self.batch if batch is None else batch
        return self._replace(stage=stage or self.stage, batch=batch, annotation=name, operator="")


class _Reader:
    def __init__(self, events: Sequence[Event], about: Mapping[str, Any]) -> None:
        self._events = events
        base = about.get("baseTimeNanoseconds", 0)
        base_us = float(base) / 1e3 if isinstance(base, (int, float, str)) and str(base).isdigit() else 0.0
        self._first_us = min(event.start_us for event in events)
        self._midnight_ms = (self._first_us % _DAY_US + base_us % _DAY_US) % _DAY_US / 1e3
        self._launches: dict[object, tuple[float, _Context]] = {}  # correlation -> end of the call, and its context
        self._spans: list[Span] = []

    def spans(self) -> list[Span]:
        threads: defaultdict[tuple[object, object], list[Event]] = defaultdict(list)
        on_device = []
        for event in self._events:
            if event.category in _ON_DEVICE:
                on_device.append(event)
            elif not event.name.startswith("gloo:"):  # consensus of the ranks; no step waits for it
                threads[event.pid, event.tid].append(event)
        for lane, events in _lanes(threads).items():
            events.sort(key=lambda event: (event.start_us, -event.end_us))
            for event, around, inside in _nest(_without_closures(events)):
                self._on_host(lane, event, around, inside)
        self._on_device(on_device)
        return sorted(self._spans, key=attrgetter("start_ms", "end_ms"))

    def _ms(self, time_us: float) -> float:
        return (time_us - self._first_us) / 1e3 + self._midnight_ms

    def _add(self, event: Event, kind: Category, lane: str, name: str, context: _Context, detail: str = "") -> Span:
        start, end = self._ms(event.start_us), self._ms(event.end_us)
        self._spans.append(Span(start, end, kind, lane, name, context.stage, context.batch, detail))
        return self._spans[-1]

    def _on_host(self, lane: str, event: Event, around: _Context, inside: _Context) -> None:
        if event.category in _RUNTIME:
            self._launches[event.args.get("correlation")] = event.end_us, around
            if event.end_us - event.start_us < BLOCKED_US or not names.BLOCKING_CALL.match(event.name):
                return
            if around.annotation or around.operator or "DeviceSynchronize" not in event.name:  # the profiler's own
                self._add(event, Category.WAIT, lane, around.operator or event.name, around, _where(around, event.name))
        elif event.category == "cpu_op":
            if lane != HOST_LANE and inside.stage is not around.stage:  # autograd issues kernels
                name = event.name.removeprefix("autograd::engine::evaluate_function: ")
                self._add(event, Category.HOST, lane, name, inside)
        elif around.stage is None or (inside.stage, inside.batch) != (around.stage, around.batch):
            self._add(event, Category.HOST, lane, event.name.strip("# ") or event.name, inside)

    def _on_device(self, events: list[Event]) -> None:
        devices = {event.args.get("device") for event in events}
        on_host = [span for span in self._spans if span.lane == HOST_LANE and span.batch is not None]
        backwards = [span for span in on_host if span.stage is Stage.BACKWARD]
        streams: defaultdict[str, list[tuple[Span, float]]] = defaultdict(list)
        for event in sorted(events, key=attrgetter("start_us")):
            launched_us, context = self._launches.get(event.args.get("correlation"), (float("inf"), _Context()))
            launched_ms = self._ms(launched_us)
            if context.stage is Stage.BACKWARD and context.batch is None:
                around = (span.batch for span in backwards if span.start_ms <= launched_ms <= span.end_ms)
                context = context._replace(batch=next(around, None))
            kind = names.kind_of_kernel(event.name) if event.category == "kernel" else Category.COPY
            device = f"gpu {event.args.get('device')} " if len(devices) > 1 else ""
            lane = f"{device}stream {event.args.get('stream', event.tid)}"
            name = str(event.args.get("Collective name") or _kernel_name(event.name))
            streams[lane].append((self._add(event, kind, lane, name, context, _where(context)), launched_ms))
        self._spans += _waits_of_kernels(streams)


def _waits_of_kernels(streams: Mapping[str, Sequence[tuple[Span, float]]]) -> Iterator[Span]:
    """Yield the compute stream's waits between a kernel's launch and its start, and for which other stream's work."""
    compute = max(
        streams, key=lambda lane: sum(span.duration_ms for span, _ in streams[lane] if span.kind is Category.DENSE)
    )
    others = [span for lane, found in streams.items() if lane != compute for span, _ in found]
    others.sort(key=attrgetter("end_ms"))
    free_ms = streams[compute][0][0].end_ms
    for span, launched_ms in streams[compute][1:]:
        could_ms, free_ms = max(free_ms, launched_ms), max(free_ms, span.end_ms)
        if round(span.start_ms - could_ms, 6) <= QUEUED_MS:
            continue
        name, stage, detail = f"{span.name} waits in the queue", None, ""
        last = bisect.bisect_right(others, span.start_ms + 1e-3, key=attrgetter("end_ms")) - 1
        if last >= 0 and others[last].end_ms > max(could_ms, span.start_ms - RELEASED_MS):
            held_by = others[last]
            name, stage, detail = f"waits for {held_by.name}", held_by.stage, f"on {held_by.lane}"
            if stage is Stage.EMBEDDING_LOOKUP and held_by.kind is not Category.COPY:
                name = f"{EMBEDDINGS}: {name}"
        yield Span(could_ms, span.start_ms, Category.WAIT, compute, name, stage, span.batch, detail)


def _lanes(threads: Mapping[tuple[object, object], list[Event]]) -> dict[str, list[Event]]:
    def marks(events: Sequence[Event]) -> tuple[int, int]:
        ranges = [event.name for event in events if event.category == "user_annotation"]
        return sum(name.startswith("##") or is_step_mark(name) for name in ranges), len(events)

    training = max(threads, key=lambda thread: marks(threads[thread]), default=None)
    lanes: dict[str, list[Event]] = {}
    for thread, events in threads.items():
        runs_backward = any(event.name.startswith("autograd::engine") for event in events)
        lane = "autograd" if runs_backward and "autograd" not in lanes else f"thread {thread[1]}"
        lanes[HOST_LANE if thread == training else lane] = events
    return lanes


def _without_closures(events: Sequence[Event]) -> list[Event]:
    """Drop PyTorch's ranges of optimizer steps around a forward: Lightning passes forward and backward as a closure."""
    ranges = [event for event in events if event.category == "user_annotation"]
    forwards = [event.start_us for event in ranges if names.of_annotation(event.name) is Stage.DENSE_FORWARD]

    def is_closure(event: Event) -> bool:
        is_step = event.name.startswith("Optimizer.step#")
        return is_step and any(event.start_us <= start_us < event.end_us for start_us in forwards)

    return [event for event in events if not is_closure(event)]


def _nest(events: Iterable[Event]) -> Iterator[tuple[Event, _Context, _Context]]:
    """Yield each event of a thread with the contexts around and inside it."""
    stack: list[tuple[float, _Context]] = []
    frames: list[tuple[float, str, str]] = []  # a separate stack: an annotation may outlive the function that began it
    for event in events:
        while stack and stack[-1][0] <= event.start_us:
            stack.pop()
        while frames and frames[-1][0] <= event.start_us:
            frames.pop()
        _, source, caller = frames[-1] if frames else (0.0, "", "")
        if event.category == "python_function":
            if names.is_frame(event.name):
                of_library = names.is_frame(event.name, of_library=True)
                frames.append((event.end_us, event.name, caller if of_library else event.name))
            continue
        around = (stack[-1][1] if stack else _Context())._replace(source=source, caller=caller)
        if event.category in _RUNTIME:
            yield event, around, around
            continue
        inside = around if is_step_mark(event.name) else around.inside(event)
        yield event, around, inside
        stack.append((event.end_us, inside))


def _where(context: _Context, call: str = "") -> str:
    """Describe a place: the call, the annotation around it, the source line, and the user's line above."""
    under = f"under {context.annotation}" if context.annotation else ""
    at = f"at {context.source}" if context.source else ""
    if context.caller and context.caller != context.source:
        at += f", called from {context.caller}"
    return " ".join(filter(None, (call, under, at)))


def _kernel_name(name: str) -> str:
    if not name.startswith("void "):
        return name if name.startswith("Mem") else name.split("(")[0]
    return re.split(r"[<(]", name.removeprefix("void "), maxsplit=1)[0]
