"""What the tests of the executor have in common: modules, and the modes that overlap."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import pytest
from hypothesis import strategies as st

from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.schedule import Schedule
from lightning_overlap.schedules.stages import EARLY_OWNERS, StreamName, WeightOwner
from lightning_overlap.testing.race_detector import RecordedEvent

from ..support.fakes import Mark, RecordingStreams
from ..support.schedules import random_schedule

FUSED, DENSE = WeightOwner.FUSED_BACKWARD, WeightOwner.DENSE_OPTIMIZER
ONE_FUSED = {"ebc": frozenset({FUSED})}
ONE_MIXED = {"ebc": EARLY_OWNERS}

OVERLAPPING = {name: mode for name, mode in MODES.items() if mode.has_sparse_stages}
random_schedules = st.randoms(use_true_random=False).map(random_schedule)

TWO_AHEAD = Schedule.parse(
    "two_ahead: input_splits_dist+3/data_dist dense_forward+0/compute copy_batch_to_device+4/memcpy "
    "embedding_lookup+2/lookup input_data_dist+3/data_dist backward+0/compute optimizer_step+0/compute"
)

overlapping = pytest.mark.parametrize("schedule", OVERLAPPING.values(), ids=OVERLAPPING.keys())


class LoggedStreams(RecordingStreams):
    """Notes in `log` what the streams are told: (what, stream, an event, a mark or a text)."""

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        super().__init__(lookup)
        self.log: list[tuple[str, StreamName, Any]] = []

    @contextmanager
    def on(self, name: StreamName) -> Iterator[None]:
        with super().on(name):
            self.log.append(("on", self._current, None))
            yield

    def record(self, name: StreamName) -> RecordedEvent:
        event = super().record(name)
        self.log.append(("record", self[name], event))
        return event

    def wait(self, name: StreamName, event: RecordedEvent | None) -> None:
        super().wait(name, event)
        if event is not None:
            self.log.append(("wait", self[name], event))

    def record_stream(self, value: Any, name: StreamName) -> None:
        super().record_stream(value, name)
        text = f"batch {value.index}" if hasattr(value, "index") and not isinstance(value, list) else "input"
        self.log.append(("record_stream", self[name], text))

    def begin_step(self) -> None:
        self.log.append(("begin_step", StreamName.COMPUTE, None))

    def do(self, mark: Mark, **uses: Any) -> None:
        self.log.append(("do", self._current, mark))
        super().do(mark, **uses)
