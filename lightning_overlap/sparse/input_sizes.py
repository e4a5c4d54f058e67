"""What the ranks tell each other before ids travel: how many there are of each tensor, and of each feature.

TorchRec 1.8 reads what it sends back from the device, for an overflow check, and later the lengths of what it received,
feature by feature, which makes the host wait until the ids are there. Here the sizes go to the device in one copy from
pinned memory, and the lengths of the features travel with them: the host knows both from its one read. What a device
alone knows, how many ids of a row-wise table go to each rank, it adds itself, and the host reads it with the rest.
"""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from itertools import islice
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence
from torchrec.distributed.embedding_sharding import KJTSplitsAllToAllMeta
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..distributed import PackedExchange, Part
from .module_context import ModuleContext


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
        for meta in _metas_of(request)
    )


def _metas_of(request: Any) -> list[KJTSplitsAllToAllMeta]:
    return [one for one in request.awaitables if isinstance(one, KJTSplitsAllToAllMeta)]


def is_counted_on_device(kjt: KeyedJaggedTensor) -> bool:
    """Whether only the device knows the lengths of features: it has cut them up by the ids (row-wise tables)."""
    return is_device(kjt.device()) and kjt._length_per_key is None and not kjt.variable_stride_per_key()


def is_device(device: torch.device) -> bool:
    """Whether the host waits where it reads memory of this device."""
    return device.type != "cpu"


class _Counted(NamedTuple):
    """What the device adds to the sizes of one all-to-all: lengths of features, and their sums, the numbers of ids."""

    column: int
    """Where the numbers of this all-to-all begin in a row."""
    part: PartForm
    meta: KJTSplitsAllToAllMeta

    def add_to(self, rows: Tensor) -> None:
        """Add it to the rows on the device, on the current stream."""
        kjt, splits = self.meta._input, self.part.splits
        lengths = kjt.lengths().view(len(kjt.keys()), kjt.stride()).sum(1)
        even = len(set(splits)) == 1
        by_rank = lengths.view(len(splits), -1) if even else pad_sequence(lengths.split(splits), batch_first=True)
        first = self.column + self.part.num_sizes
        rows[:, first : first + by_rank.shape[1]] = by_rank
        # Ids and weights: their sizes stand between that of lengths and the batch size.
        rows[:, self.column + 1 : first - 1] = by_rank.sum(1, keepdim=True)

    def tell(self, sent: Sequence[Sequence[int]]) -> None:
        """Tell TorchRec how many ids go to each rank, from the rows that were sent."""
        for number in range(1, self.part.num_sizes - 1):
            self.meta.input_splits[number] = [row[self.column + number] for row in sent]


class PartSizes(NamedTuple):
    """What this rank receives by one all-to-all of ids."""

    by_tensor: list[list[int]]
    """From every rank; the last one may be of no tensor: batch sizes."""
    lengths: list[int] | None
    """Of each feature, summed up; None: they do not travel."""


class InputSizes:
    """The sizes of what a batch is going to send, and the lengths of its features, for every rank.

    A row for each destination: of each module how many inputs this rank has for it, then of each of its all-to-alls to
    come the sizes of what is sent there, then the length of each of the features that it gets, filled up to the largest
    number of features that a rank has: so rows are of one width, on ranks that lack an input too.

    Args:
        forms: Of the modules' inputs, in an order that is the same on all ranks.
        states: Of the modules whose input this rank's batch has.
        num_found: How many KeyedJaggedTensors of this rank's batch could be the input of each.
        group: Of the input dist.
    """

    def __init__(
        self,
        forms: Mapping[str, Form],
        states: Mapping[str, ModuleContext],
        num_found: Mapping[str, int],
        group: dist.ProcessGroup,
    ) -> None:
        self._forms, self._group = forms, group
        self._rows: list[list[int]] = [[] for _ in range(group.size())]
        self._exchange: PackedExchange | None = None
        self._number = 0
        self._counted: list[_Counted] = []
        self._sent: Tensor | None = None  # where the device has counted some of it
        for name, form in forms.items():
            state = states.get(name)
            for row in self._rows:
                row.append(0 if state is None else num_found[name])
            metas = [None] * len(form) if state is None else _metas_of(state.splits_awaitable)
            for part, meta in zip(form, metas, strict=True):
                if meta is not None and is_counted_on_device(meta._input):
                    self._counted.append(_Counted(len(self._rows[0]), part, meta))
                    self._add(part, meta, [])
                else:
                    self._add(part, meta, meta._input.length_per_key() if meta and part.with_lengths else [])

    def _add(self, part: PartForm, meta: KJTSplitsAllToAllMeta | None, of_features: Iterable[int]) -> None:
        """Add what one all-to-all sends to each rank; nothing where this rank lacks the input."""
        lengths = iter(of_features)
        for destination, (row, num_features) in enumerate(zip(self._rows, part.splits, strict=True)):
            sizes = [] if meta is None else [sizes[destination] for sizes in meta.splits_tensors]
            sizes += islice(lengths, num_features)
            row += sizes + [0] * (part.width - len(sizes))

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

    def wait(self) -> dict[str, tuple[tuple[int, ...], list[PartSizes]]]:
        """Read what was received, the one read of the step: by module how many inputs each rank has, and the sizes."""
        if self._exchange is None:  # nothing else has been sent since
            self.send()
        assert self._exchange is not None
        [received] = self._exchange.take(slice(self._number, self._number + 1))
        rows: list[list[int]] = (received if self._sent is None else torch.cat((received, self._sent))).tolist()
        size, rank = self._group.size(), self._group.rank()
        for counted in self._counted:
            counted.tell(rows[size:])
        columns = iter(zip(*rows[:size], strict=True))
        known = {}
        for name, form in self._forms.items():
            found, parts = next(columns), []
            for part in form:
                by_tensor = [list(column) for column in islice(columns, part.num_sizes)]
                filled = list(islice(columns, part.width - part.num_sizes))
                lengths = [sum(column) for column in filled[: part.splits[rank]]]
                parts.append(PartSizes(by_tensor, lengths if part.with_lengths else None))
            known[name] = found, parts
        return known
