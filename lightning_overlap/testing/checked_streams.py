"""Find races between streams in a real run on a CPU: simulated streams that see every operator and its memory.

All work runs on the calling thread, as with `Streams`, but each operator counts as work of the stream that would be
current on a device, reads and writes by its schema the memory of its tensors, and allocates that of its results. So a
race shows in every run, whether or not it would have gone wrong on some device.
"""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef

from ..runtime import leaves
from ..schedules import Stage, StreamName
from .race_detector import RacingStreams
from .stream_tracing import FollowedStreams, tensors_of


class CheckedStreams(RacingStreams, FollowedStreams):
    """Streams of a run on one rank that raise a `RaceError` where an operator uses what nothing ordered.

    Autograd runs a node after all that its backward has run so far, and hands gradients over itself; at its end no
    stream waits for another.

    Args:
        lookup: As of `SimulatedStreams`.
    """

    def __init__(self, lookup: StreamName = StreamName.LOOKUP) -> None:
        super().__init__(lookup)
        self._memory = _Memory()
        self._ran_in_backward: set[StreamName] = set()
        self._weights: list[str] = []
        self._doing = "start"

    def memory_of(self, value: Any) -> Iterable[str]:
        """Return the names of the storages of all tensors, of any shape, in a nested value."""
        return map(self._memory.name, _all_tensors(value))

    def observe(self, kind: str, stage: Stage, batch: int) -> None:
        """Remember the last event of the executor, which errors name as their place: an `Observer`."""
        self._doing = f"{kind} of {stage} of batch {batch}"

    @contextmanager
    def watching(self, weights: Mapping[str, Tensor]) -> Iterator[None]:
        """Follow all operators of the calling thread.

        Args:
            weights: Parameters and tables of any shape, by name; written on the compute stream before the run.
        """
        self._weights = [self._memory.name(tensor, label) for label, tensor in weights.items()]
        self._races.do("the load of the weights", StreamName.COMPUTE, writes=self._weights)
        with self.following():
            yield

    def take(self, batch: Any) -> None:
        """Take a batch that was copied to the device on the current stream: its tensors are new memory there."""
        names = [self._memory.name(tensor, "a tensor of a batch", anew=True) for tensor in _all_tensors(batch)]
        self._races.do(f"the copy of a batch after the {self._doing}", self._current, makes=names)

    def read_weights(self, by: str) -> None:
        """Read all weights on the compute stream, as what comes between two steps may."""
        self._races.do(by, StreamName.COMPUTE, reads=self._weights)

    def ran(self, func: Any, args: Iterable[Any], result: Any) -> None:
        """Check the memory that an operator has read, written and made.

        Raises:
            RaceError: Nothing orders it after an earlier use of the same memory on another stream.
        """
        stream, in_backward = self.stream_of_operator()
        reads: list[str] = []
        writes: list[str] = []
        for argument, value in zip(func._schema.arguments, args, strict=False):
            is_written = argument.alias_info is not None and argument.alias_info.is_write
            (writes if is_written else reads).extend(map(self._memory.name, tensors_of(value)))
        used = {*reads, *writes}
        made = [self._memory.name(tensor, str(func)) for tensor in tensors_of(result)]
        if in_backward:
            self._races.record_stream(used, stream)
        by = f"{func} after the {self._doing}"
        self._races.do(by, stream, reads=reads, writes=writes, makes=[name for name in made if name not in used])

    def stream_of_operator(self) -> tuple[StreamName, bool]:
        """Return the stream of the operator that has just run, and whether a backward ran it."""
        stream, in_backward = super().stream_of_operator()
        if not in_backward:
            self._ran_in_backward.clear()
            return stream, False
        for other in {*self._ran_in_backward, self._current}:
            self._races.wait(stream, self._races.event(other))
        self._ran_in_backward.add(stream)
        return stream, True


class _Memory:
    """Names of storages; a storage that is gone gives its address to another one, which has another name."""

    def __init__(self) -> None:
        self._known: dict[int, tuple[StorageWeakRef, str]] = {}
        self._num = 0

    def name(self, tensor: Tensor, label: str = "a tensor", *, anew: bool = False) -> str:
        storage = tensor.untyped_storage()
        key = storage._cdata
        known = self._known.get(key)
        if known is None or anew or known[0].expired():
            self._num += 1
            text = f"{label} {tuple(tensor.shape)} (number {self._num})"
            known = self._known[key] = StorageWeakRef(storage), text
        return known[1]


def _all_tensors(value: Any) -> list[Tensor]:
    return [leaf for _, leaf in leaves(value, lambda node: False) if isinstance(leaf, Tensor)]
