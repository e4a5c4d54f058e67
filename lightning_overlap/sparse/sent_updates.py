"""Updates of tables whose gradients are on their way, as a module's own forward finds them."""

from ..runtime import Streams
from ..schedules import StreamName
from .sparse_batch import SparseBatch


class SentUpdates(dict[int, SparseBatch]):
    """Batches whose gradients were sent, by number, until a walker's `DeferredUpdates` makes their update."""

    def __init__(self, streams: Streams) -> None:
        super().__init__()
        self._streams = streams

    def make_before_forward(self, name: str) -> None:
        """Make the deferred updates of the module `name`, the oldest first, before its own forward."""
        waiting = [self[index] for index in sorted(self) if name in self[index].modules]
        if waiting:
            # For the backward, which has left the gradients.
            self._streams.order(StreamName.COMPUTE, then=self._streams.lookup)
            with self._streams.on_lookup():
                for flight in waiting:
                    flight.modules[name].update()
