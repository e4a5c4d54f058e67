"""The exchange of sizes before ids are sent: how many elements of each tensor, and how many ids of each feature."""

from collections.abc import Iterable, Mapping, Sequence
from functools import lru_cache
from itertools import islice
from typing import Any, NamedTuple, TypeAlias
from zlib import crc32

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torch.nn.utils.rnn import pad_sequence

from ..distributed import check_none_batches, gather_if_unequal
from ..runtime import Streams
from .described_input import Described, PartSizes, is_counted_on_device
from .module_flight import ModuleFlight
from .packed_alltoall import Entry, PackedExchange
from .sparse_batch import SparseBatch


class PartForm(NamedTuple):
    """The columns that the sizes of one part of a module take (see `InputSizes`); the same on all ranks."""

    num_sizes: int  # tensors whose sizes are sent (lengths, ids, weights), and the batch size
    splits: tuple[int, ...]  # number of features that go to each rank
    with_lengths: bool  # whether the number of ids of each feature is sent; not where batch sizes vary by feature

    @property
    def num_lengths(self) -> int:
        """Columns of numbers of ids: as many as the rank with most features needs."""
        return max(self.splits) if self.with_lengths else 0


Form: TypeAlias = tuple[PartForm, ...]  # of the input of one module: a `PartForm` for each part that sends ids


def form_of(request: Any) -> Form:
    """Return the form of a module's input from the result of its `input_dist` under `splits_only`."""
    return tuple(
        PartForm(len(meta.splits_tensors), tuple(meta.splits), not meta.input.variable_stride_per_key())
        for meta in _metas_of(request)
    )


def _metas_of(request: Any) -> list[Described]:
    return [one for one in request.awaitables if isinstance(one, Described)]


class _Counted(NamedTuple):
    """Sizes of one part that the device computes: ids per feature, and ids per destination."""

    column: int  # first column of the part
    part: PartForm
    meta: Described  # what this rank sends of the part

    def add_to(self, rows: Tensor) -> None:
        kjt, splits = self.meta.input, self.part.splits
        lengths = kjt.lengths().view(len(kjt.keys()), kjt.stride()).sum(1)
        even = len(set(splits)) == 1
        by_rank = lengths.view(len(splits), -1) if even else pad_sequence(lengths.split(splits), batch_first=True)
        first = self.column + self.part.num_sizes
        rows[:, first : first + by_rank.shape[1]] = by_rank
        # Sizes of ids and weights. The part's column 0 has the size of lengths, its last before `first` the batch size.
        rows[:, self.column + 1 : first - 1] = by_rank.sum(1, keepdim=True)

    def write_splits(self, sent: Sequence[list[int]]) -> None:
        """Write the number of ids for each rank into TorchRec's `input_splits`, from the columns sent."""
        for number in range(1, self.part.num_sizes - 1):
            self.meta.input_splits[number] = sent[self.column + number]


_MOST_FOUND = 1 << 16
"""Each rank sends one number: its number of inputs found plus this constant times a checksum of their types."""


def types_in(labels: Iterable[str], tensors: Iterable[Tensor]) -> str:
    """Return the types of the tensors that an input is sent as, for `check_types`; `labels` are TorchRec's."""
    return _in_words(tuple(labels), tuple([tensor.dtype for tensor in tensors]))


@lru_cache(256)  # in each step the same
def _in_words(labels: tuple[str, ...], dtypes: tuple[torch.dtype, ...]) -> str:
    words = {"values": "ids", "strides": "batch sizes by feature"}
    parts = zip((words.get(label, label) for label in labels), dtypes, strict=True)
    return ", ".join(f"{part} of {str(dtype).removeprefix('torch.')}" for part, dtype in parts)


def check_types(mine: Mapping[str, str], group: dist.ProcessGroup) -> None:
    """Raise a RuntimeError if an input has other types on another rank; `mine` has its `types_in`, by its name."""
    everyone: list[Mapping[str, str]] = gather_if_unequal(mine, group)
    for what in dict.fromkeys(what for theirs in everyone for what in theirs):
        by_rank = {rank: theirs[what] for rank, theirs in enumerate(everyone) if what in theirs}
        if len(set(by_rank.values())) > 1:
            has = "; ".join(f"rank {rank} has {types}" for rank, types in by_rank.items())
            raise RuntimeError(
                f"{what} has different types on different ranks and cannot be sent: {has}. Make the types equal in the "
                "dataset or the collate function, also of empty tensors: torch.tensor([]) has float32."
            )


class InputSizes:
    """The exchange of the sizes of one batch: rows of int64, one row to each rank.

                                    module A                                                        module B
        latest None batch | rates | inputs found | part 0: sizes | ids per feature, 0, .. | part 1 .. | inputs found

    `rates` is a digest of the learning rates. The upper bits of `inputs found` are a checksum of the tensors' types.
    `sizes` are the numbers of elements of lengths, ids and weights that go to that rank, and the batch size. Zeros fill
    the ids per feature up to the largest number of features of any rank. `forms` has the same order on all ranks; a
    rank without an input sends zeros.

    TorchRec 1.8 makes the host wait twice more, for the sizes it sends (an overflow check) and for the received ids per
    feature. Here one read gets both. A kernel adds what only the device knows (ids of row-wise tables).
    """

    def __init__(
        self, forms: Mapping[str, Form], flight: SparseBatch, group: dist.ProcessGroup, streams: Streams
    ) -> None:
        self._forms, self._group, self._streams = forms, group, streams
        self._columns: list[Sequence[int] | NDArray[np.int64]] = [
            [flight.latest_none] * group.size(),
            [flight.rates.digest] * group.size(),
        ]
        self._compare_rates = flight.rates.compare
        self.exchange: PackedExchange | None = None  # the all-to-all with the rows, once it was started
        self.number = 0  # of the rows among its entries
        self._counted: list[_Counted] = []
        self._types: dict[str, str] = {}
        self._sent: Tensor | None = None  # the rows on the device, if it has computed some of them
        for name, form in forms.items():
            self._add_module(name, form, flight.modules.get(name))

    def _add_module(self, name: str, form: Form, module_flight: ModuleFlight | None) -> None:
        """Add the columns of a module; zeros if this rank's batch has no input for it."""
        num_ranks = self._group.size()
        if module_flight is None:
            self._types[name] = ""
            self._columns.append([0] * num_ranks)
            for part in form:
                self._columns += [[0] * num_ranks] * (part.num_sizes + part.num_lengths)
            return
        metas = _metas_of(module_flight.splits_awaitable)
        types = self._types[name] = types_in(metas[0].labels, metas[0].input_tensors) if metas else ""
        self._columns.append([module_flight.num_found + _MOST_FOUND * crc32(types.encode())] * num_ranks)
        for part, meta in zip(form, metas, strict=True):
            if is_counted_on_device(meta.input):
                self._counted.append(_Counted(len(self._columns), part, meta))
            self._columns += meta.splits_tensors
            if not part.with_lengths:
                continue
            if meta.counts is None:  # the device will add them
                self._columns += [[0] * num_ranks] * part.num_lengths
            else:
                self._columns += [*meta.counts.columns(part.splits)]

    def entry(self, device: torch.device) -> Entry:
        """Return the rows as an entry of an exchange: `(num_ranks, num_columns)`, int64, on this device."""
        # By column: rows would take much longer. So would `torch.tensor`.
        on_host = torch.from_numpy(np.array(self._columns, np.int64).T.copy())
        on_host = on_host.pin_memory() if device.type == "cuda" else on_host
        one_each = [1] * self._group.size()
        rows = on_host.to(device, non_blocking=True)
        for counted in self._counted:
            counted.add_to(rows)
            self._sent = rows
        return Entry(rows, one_each, one_each)

    def send(self) -> PackedExchange:
        """Start an all-to-all of the rows alone, if no ids are sent in time to travel with."""
        nccl = "nccl" in str(dist.get_backend(self._group))
        device = torch.device("cuda", torch.cuda.current_device()) if nccl else torch.device("cpu")
        self.exchange = PackedExchange([self.entry(device)], self._group, self._streams, even=True)
        return self.exchange

    def wait(self) -> dict[str, tuple[set[int], list[PartSizes]]]:
        """Wait for all rows; return by module its numbers of inputs on ranks, and what this rank gets of each part."""
        exchange = self.exchange or self.send()  # alone if no ids have been sent since
        [received] = exchange.take(slice(self.number, self.number + 1))
        # The one host sync of a step.
        # By column: a loop over the rows would take longer with many ranks.
        read: list[list[int]] = (received if self._sent is None else torch.cat((received, self._sent))).t().tolist()
        size, rank = self._group.size(), self._group.rank()
        for counted in self._counted:
            counted.write_splits([column[size:] for column in read])
        columns = iter([column[:size] for column in read])
        latest_none = next(columns)
        if len(set(latest_none)) > 1:
            check_none_batches(dict(enumerate(latest_none)))
        if len(set(next(columns))) > 1:  # all ranks see it
            self._compare_rates()
        known = {}
        for name, form in self._forms.items():
            kinds, parts = set(next(columns)), []  # as a rule one for all ranks
            if len({number // _MOST_FOUND for number in kinds if number}) > 1:  # all ranks see it
                mine = {f"the input of {name!r}": self._types[name]}
                check_types(mine if self._types[name] else {}, self._group)
            for part in form:
                by_tensor = [*islice(columns, part.num_sizes)]
                filled = list(islice(columns, part.num_lengths))
                parts.append(PartSizes(by_tensor, filled[: part.splits[rank]] if part.with_lengths else None))
            known[name] = {number % _MOST_FOUND for number in kinds}, parts
        return known
