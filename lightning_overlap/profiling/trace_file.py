"""Read and write files of timelines in Chrome's trace format, of torch.profiler and of this package."""

import gzip
import json
import math
import re
import sys
import zlib
from collections.abc import Iterable, Mapping, Sequence
from contextlib import suppress
from dataclasses import fields
from pathlib import Path
from typing import Any, NamedTuple

from ..schedules import Stage
from .spans import Category, Span, rows_of

WRITER = "lightning_overlap timeline"  # marks the files of this package

_ADVICE = "Pass a trace of torch.profiler (export_chrome_trace; .json or .json.gz) or of this package."
_NAME = re.compile(r'("name": ")(.*?)(",\s*"(?:pid|ph|tid|ts|cat)":)')  # Kineto does not escape quotes in names
_QUOTE = re.compile(r'(\\.)|"')

_CATEGORIES = {
    *("kernel", "gpu_memcpy", "gpu_memset"),
    *("cuda_runtime", "cuda_driver", "cpu_op", "user_annotation", "python_function"),
    *Category,
}


class TraceError(ValueError):
    """A file is not a readable trace."""


class Event(NamedTuple):
    """A complete event of a trace; times are in microseconds."""

    category: str  # for example "kernel" or "cpu_op"; a `Category` in the files of this package
    name: str
    pid: Any  # process, or the device's number
    tid: Any  # thread or stream
    start_us: float
    end_us: float
    args: Mapping[str, Any]  # only those in `_ARGS`


def load(path: Path) -> tuple[list[Event], Mapping[str, Any]]:
    """Return the complete events of known categories, in the file's order, and the file's other top-level entries."""
    try:
        content = _parsed(_text(path))
    except json.JSONDecodeError as err:
        around = " ".join(err.doc[max(0, err.pos - 60) : err.pos + 40].split())
        raise TraceError(
            f"{path} is not a trace: its JSON is broken.\n  got:  {err.msg} at line {err.lineno}, column {err.colno}: "
            f"{around!r}\n  A run that is killed while it writes leaves such a file. {_ADVICE}"
        ) from err
    except RecursionError as err:
        raise TraceError(f"{path} is not a trace: it is nested too deeply. {_ADVICE}") from err
    about = content if isinstance(content, dict) else {}
    events = content if isinstance(content, list) else about.get("traceEvents")
    if not isinstance(events, list):
        got = f"the keys {', '.join(sorted(about)[:6])}" if about else type(content).__name__
        raise TraceError(f"{path} is not a trace: it has no list of traceEvents.\n  got:  {got}\n  {_ADVICE}")
    kept = [event for event in events if isinstance(event, Event)]
    if not kept:
        raise TraceError(
            f"{path} holds nothing to draw: no kernel, operator or annotation.\n  got:  {len(events)} entries of other "
            "kinds\n  Profile at least one step, with ProfilerActivity.CPU and CUDA among the activities."
        )
    return kept, {key: value for key, value in about.items() if key != "traceEvents"}


def _parsed(text: str) -> Any:
    try:
        return json.loads(text, object_hook=_shorten, strict=False)
    except json.JSONDecodeError:  # has the place in the original file
        mended = _NAME.sub(lambda match: match[1] + _QUOTE.sub(lambda one: one[1] or '\\"', match[2]) + match[3], text)
        with suppress(json.JSONDecodeError):
            return json.loads(mended, object_hook=_shorten, strict=False)
        raise


def _text(path: Path) -> str:
    try:
        raw = path.read_bytes()
        return (gzip.decompress(raw) if raw[:2] == b"\x1f\x8b" else raw).decode("utf-8", "replace").lstrip("\ufeff")
    except FileNotFoundError as err:
        raise TraceError(f"{path} does not exist. {_ADVICE}") from err
    except IsADirectoryError as err:
        traces = sorted(found.name for found in path.iterdir() if found.name.endswith((".json", ".json.gz")))
        there = f"Its traces: {', '.join(traces[:8])}" if traces else "It contains no .json or .json.gz"
        raise TraceError(f"{path} is a folder, not a trace. {there}. {_ADVICE}") from err
    except (EOFError, zlib.error, gzip.BadGzipFile) as err:
        raise TraceError(
            f"{path} is a damaged gzip file: {err}\n  An incomplete copy, or a run that is killed while it writes, "
            "leaves such a file. Copy or record it again."
        ) from err
    except OSError as err:
        raise TraceError(f"{path} cannot be read: {err.strerror or err}") from err


_OWN_ARGS = [field for field in fields(Span) if field.name not in ("kind", "name")]
_ARGS = ("correlation", "stream", "device", "Collective name", *(field.name for field in _OWN_ARGS))


def _shorten(parsed: dict[str, Any]) -> Any:
    """Turn an event into an `Event` or None while parsing, which saves memory: a trace may have 100 MB."""
    if "ph" not in parsed:
        return parsed
    category: Any = parsed.get("cat")
    if parsed["ph"] != "X" or category not in _CATEGORIES:
        return None
    try:
        start = float(parsed["ts"])
        end = start + max(0.0, float(parsed.get("dur", 0)))  # Kineto sometimes writes negative durations
    except (KeyError, TypeError, ValueError):
        return None
    if not math.isfinite(end - start):
        return None
    noted = parsed.get("args") or {}
    args = {key: noted[key] for key in _ARGS if key in noted}
    name = sys.intern(str(parsed.get("name", "")))
    return Event(sys.intern(category), name, parsed.get("pid"), parsed.get("tid"), start, end, args)


def own_spans(events: Iterable[Event]) -> dict[int, list[Span]]:
    """Return the spans of a file of `write_trace` by rank; raise a TraceError for other events."""
    ranks: dict[int, list[Span]] = {}
    for event in events:
        args = dict(event.args)
        try:
            times = float(args.pop("start_ms")), float(args.pop("end_ms"))
            stage = Stage(args.pop("stage")) if "stage" in args else None
            span = Span(*times, Category(event.category), args.pop("lane"), event.name, stage, **args)
            ranks.setdefault(int(event.pid), []).append(span)
        except (KeyError, TypeError, ValueError) as err:
            raise TraceError(
                f"the event {event.name!r} was not written by {WRITER}: its {err} is missing or wrong. "
                "Write the file again, without events of other tools."
            ) from err
    return ranks


def write_trace(path: Path | str, ranks: Mapping[int, Iterable[Span]]) -> None:
    """Write each rank's spans for Perfetto, chrome://tracing and `overlap-timeline`; gzip if it ends in `.gz`."""
    events = [event for rank, spans in sorted(ranks.items()) for event in _events_of(rank, list(spans))]
    content = {"displayTimeUnit": "ms", "otherData": {"writer": WRITER, "version": 1}, "traceEvents": events}
    raw = json.dumps(content, separators=(",", ":"), allow_nan=False, default=str).encode()
    Path(path).write_bytes(gzip.compress(raw, 6) if str(path).endswith(".gz") else raw)


def _events_of(rank: int, spans: Sequence[Span]) -> Iterable[dict[str, Any]]:
    def event(kind: str, name: str, tid: int, args: Mapping[str, Any], **others: Any) -> dict[str, Any]:
        return {"ph": kind, "name": name, "pid": rank, "tid": tid, "args": args, **others}

    yield event("M", "process_name", 0, {"name": f"rank {rank}"})
    yield event("M", "process_sort_index", 0, {"sort_index": rank})
    tid = 0
    for lane in dict.fromkeys(span.lane for span in spans):
        # Viewers nest the spans of a row; spans that overlap without nesting need another row.
        for number, row in enumerate(rows_of([span for span in spans if span.lane == lane], nested=True)):
            tid += 1
            yield event("M", "thread_name", tid, {"name": lane if number == 0 else f"{lane} ({number + 1})"})
            yield event("M", "thread_sort_index", tid, {"sort_index": tid})
            for span in row:
                found = ((field, getattr(span, field.name)) for field in _OWN_ARGS)
                args = {field.name: value for field, value in found if value != field.default}
                times = {"ts": span.start_ms * 1e3, "dur": span.duration_ms * 1e3}
                yield event("X", span.name, tid, args, cat=span.kind, **times)
