"""What is not used after all, on a device: which stream waits for what is under way."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from lightning_overlap.sparse.pipeline import SparsePipeline


def test_gradients_that_are_left_out_are_waited_for_where_their_memory_is_from() -> None:
    """On another stream it would be given to other work before they have arrived."""
    log: list[str] = []

    @contextmanager
    def on_lookup() -> Iterator[None]:
        log.append("on the lookup stream")
        yield
        log.append("elsewhere")

    pipeline: Any = object.__new__(SparsePipeline)
    pipeline.order = SimpleNamespace(on_lookup=on_lookup)
    pipeline._updates = SimpleNamespace(forget=lambda inflight: None)
    pipeline.count_lookups = lambda inflight, times: log.append(f"counted {times}")
    deferred = SimpleNamespace(drop=lambda: log.append("dropped"))
    inflight: Any = SimpleNamespace(modules={"ebc": SimpleNamespace(deferred=deferred)})
    pipeline.drop_update(inflight)
    assert log == ["on the lookup stream", "dropped", "elsewhere", "counted -1"]


def test_sizes_and_ids_are_sent_after_what_the_input_dists_stream_has_made() -> None:
    """Otherwise ranks would be sent lengths that are not there yet, and assemble ids by them."""
    log: list[str] = []
    pipeline: Any = object.__new__(SparsePipeline)
    streams = SimpleNamespace(record=lambda name: name, wait=lambda name, event: log.append(f"{name} after {event}"))
    pipeline.order = SimpleNamespace(streams=streams)
    pipeline.input_data_dist = lambda inflight: log.append("sent")
    pipeline.receive_input = lambda inflight: log.append("received")
    pipeline.drain(SimpleNamespace(modules={}, sizes="under way"))
    assert log == ["compute after data_dist", "sent", "received"]
