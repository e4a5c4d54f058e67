"""What others than the steps do with the tables of a fit: callbacks that copy rows, and the user's own writes."""

from collections.abc import Callable
from dataclasses import dataclass, field
from typing import Any

from ..schedules import StreamName
from .streams import Streams


@dataclass(slots=True)
class TableAccess:
    """The streams of a fit's tables, and who uses the tables beside the steps."""

    streams: Streams
    num_changed: int = 0  # calls of `tables_changed()`
    # Waits of those that read tables beside the steps (copies of rows): called before tables are written in place.
    readers: list[Callable[[], None]] = field(default_factory=list)

    def give_to_updates(self, value: Any) -> None:
        """Let updates use new memory, which nothing else uses; does not order streams."""
        self.streams.use_ordered(value, StreamName.COMPUTE, on=self.streams.lookup)
