"""What the ranks tell each other before ids travel: how many there are of each tensor, and of each feature."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrec.distributed.embedding_sharding import KJTSplitsAllToAllMeta
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..distributed import PackedExchange, Part


class PartForm(NamedTuple):
    """The shape of what one all-to-all of ids adds to the exchange of sizes; the same on all ranks."""

    num_sizes: int
    splits: tuple[int, ...]
    """Features that go to each rank."""
    with_lengths: bool
    """Whether the lengths of these features travel with the sizes."""

    @property
    def width(self) -> int:
        """Numbers that go to each rank."""
        return self.num_sizes + (max(self.splits) if self.with_lengths else 0)


Form: TypeAlias = tuple[PartForm, ...]
"""Of a module's input: one for each of its all-to-alls."""


def form_of(request: Any) -> Form:
    """Return the form of what a module's `input_dist` returned under `splits_only`."""
    return tuple(
        PartForm(len(meta.splits_tensors), tuple(meta.splits), not meta._input.variable_stride_per_key())
        for meta in metas_of(request)
    )


def metas_of(request: Any) -> list[KJTSplitsAllToAllMeta]:
    """Return the all-to-alls that a module's `input_dist` described under `splits_only`."""
    return [one for one in request.awaitables if isinstance(one, KJTSplitsAllToAllMeta)]


def is_counted_on_device(kjt: KeyedJaggedTensor) -> bool:
    """Whether only the device knows the lengths of features: it has cut them up by the ids (row-wise tables)."""
    return is_device(kjt.device()) and kjt._length_per_key is None and not kjt.variable_stride_per_key()


def is_device(device: torch.device) -> bool:
    """Whether the host waits where it reads memory of this device."""
    return device.type != "cpu"


@dataclass(frozen=True, slots=True)
class ModuleInput:
    """One module's part in the exchange of sizes of one batch.

    Args:
        form: Of its input, the same on all ranks.
        request: What its `input_dist` returned under `splits_only`; None where this rank's batch has no such input.
        context: The module's for this batch.
        num_found: How many KeyedJaggedTensors of this rank's batch could be its input.
    """

    form: Form
    request: Any = None
    context: Any = None
    num_found: int = 0


class _Counted(NamedTuple):
    """What the device adds to the sizes of one all-to-all: lengths of features, and their sums, the numbers of ids."""

    column: int
    """Where the numbers of this all-to-all begin in a row."""
    part: PartForm
    meta: KJTSplitsAllToAllMeta

    @property
    def of_ids(self) -> range:
        """Which of the sizes are numbers of ids: those of ids and of their weights, between lengths and batch size."""
        return range(1, self.part.num_sizes - 1)

    def add_to(self, rows: Tensor) -> None:
        """Add it to the rows on the device, on the current stream."""
        kjt, splits = self.meta._input, self.part.splits
        lengths = kjt.lengths().view(len(kjt.keys()), kjt.stride()).sum(1)
        even = len(set(splits)) == 1
        by_rank = lengths.view(len(splits), -1) if even else pad_sequence(lengths.split(splits), batch_first=True)
        first = self.column + self.part.num_sizes
        rows[:, first : first + by_rank.shape[1]] = by_rank
        rows[:, self.column + 1 : first - 1] = by_rank.sum(1, keepdim=True)

    def tell(self, sent: Sequence[Sequence[int]]) -> None:
        """Tell TorchRec how many ids go to each rank, from the rows that were sent."""
        for number in self.of_ids:
            self.meta.input_splits[number] = [row[self.column + number] for row in sent]


class KnownSizes(NamedTuple):
    """By module."""

    found: list[tuple[int, ...]]
    """How many inputs each rank's batch has for it."""
    sizes: list[list[list[int]]]
    """What every rank sends to this one, by tensor."""
    lengths: list[list[list[int] | None]]
    """Of what this rank receives by each all-to-all, the sum of each feature's lengths; None: they do not travel."""


class Sizes:
    """The sizes of what a batch is going to send, and the lengths of its features, for every rank.

    A row for each destination: of each module how many inputs this rank has for it, then of each of its all-to-alls to
    come the sizes of what is sent there, then the length of each of the features that it gets, filled up to the largest
    number of features that a rank has: so rows are of one width, on ranks that lack an input too.
    """

    def __init__(self, inputs: Sequence[ModuleInput], group: dist.ProcessGroup) -> None:
        self._group = group
        self._forms = [one.form for one in inputs]
        self._rows = rows = [[] for _ in range(group.size())]  # type: list[list[int]]
        self._exchange: PackedExchange | None = None
        self._number = 0
        self._counted: list[_Counted] = []
        self._sent: Tensor | None = None  # where some of it was counted on the device
        for one in inputs:
            for row in rows:
                row.append(one.num_found)
            if not one.num_found:
                for row in rows:
                    row += [0] * sum(part.width for part in one.form)
                continue
            for part, meta in zip(one.form, metas_of(one.request), strict=True):
                if is_counted_on_device(meta._input):
                    self._counted.append(_Counted(len(rows[0]), part, meta))
                _add(rows, part, meta)

    @property
    def is_sent(self) -> bool:
        """Whether they are on their way."""
        return self._exchange is not None

    def part(self, device: torch.device) -> Part:
        """Return them as they travel: on the device of the ids that they travel with."""
        on_host = torch.tensor(self._rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        one_each = [1] * self._group.size()
        rows = on_host.to(device, non_blocking=True)
        for counted in self._counted:
            counted.add_to(rows)
            self._sent = rows
        return Part(rows, one_each, one_each)

    def send(self) -> None:
        """Send them in an all-to-all of their own."""
        nccl = "nccl" in str(dist.get_backend(self._group))
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.travel_with(PackedExchange([self.part(device)], self._group, even=True), 0)

    def travel_with(self, exchange: PackedExchange, number: int) -> None:
        """Say which part of which exchange they are."""
        self._exchange, self._number = exchange, number

    def wait(self) -> KnownSizes:
        """Read what was received: the one read of the step."""
        if self._exchange is None:  # nothing else has been sent since
            self.send()
        assert self._exchange is not None
        [received] = self._exchange.take(slice(self._number, self._number + 1))
        rows: list[list[int]] = (received if self._sent is None else torch.cat((received, self._sent))).tolist()
        size, rank = self._group.size(), self._group.rank()
        for counted in self._counted:
            counted.tell(rows[size:])
        columns = iter(zip(*rows[:size], strict=True))
        known = KnownSizes([], [], [])
        for form in self._forms:
            known.found.append(next(columns))
            known.sizes.append([])
            known.lengths.append([])
            for part in form:
                known.sizes[-1] += [list(column) for column in itertools.islice(columns, part.num_sizes)]
                filled = list(itertools.islice(columns, part.width - part.num_sizes))
                mine = [sum(column) for column in filled[: part.splits[rank]]]
                known.lengths[-1].append(mine if part.with_lengths else None)
        return known


def _add(rows: list[list[int]], part: PartForm, meta: KJTSplitsAllToAllMeta) -> None:
    """Add the sizes and the lengths of one all-to-all of ids to what goes to each rank."""
    counts = part.with_lengths and not is_counted_on_device(meta._input)
    lengths = meta._input.length_per_key() if counts else []
    first = 0
    for destination, num_features in enumerate(part.splits):
        own = lengths[first : first + num_features]
        sizes = [sizes[destination] for sizes in meta.splits_tensors]
        rows[destination] += sizes + own + [0] * (part.width - len(sizes) - len(own))
        first += num_features
