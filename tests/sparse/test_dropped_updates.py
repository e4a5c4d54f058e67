"""An update that is left out: its gradients arrive in memory of the lookup stream."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from types import SimpleNamespace
from typing import Any

from lightning_overlap.sparse.pipeline import SparsePipeline


def test_its_gradients_are_waited_for_where_their_memory_is_from() -> None:
    """On another stream it would be given to other work before they have arrived."""
    log: list[str] = []

    @contextmanager
    def on_lookup() -> Iterator[None]:
        log.append("on the lookup stream")
        yield
        log.append("elsewhere")

    pipeline: Any = object.__new__(SparsePipeline)
    pipeline.order = SimpleNamespace(on_lookup=on_lookup)
    pipeline.count_lookups = lambda inflight, times: log.append(f"counted {times}")
    deferred = SimpleNamespace(drop=lambda: log.append("dropped"))
    inflight: Any = SimpleNamespace(modules={"ebc": SimpleNamespace(deferred=deferred)})
    pipeline.drop_update(inflight)
    assert log == ["on the lookup stream", "dropped", "elsewhere", "counted -1"]
