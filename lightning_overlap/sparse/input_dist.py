"""The input dist of all sharded modules: one exchange of sizes, then lengths, ids and weights in one all-to-all."""

from typing import Any

import torch.distributed as dist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from ..compat.torchrec import IdsAwaitable, set_lengths, set_values, tell_lookups
from ..distributed import gather_if_unequal
from ..runtime import Streams
from .described_input import Described, PartSizes, is_device, is_faster_in_segments
from .input_sizes import Form, InputSizes, form_of
from .packed_alltoall import Entry, PackedExchange
from .sparse_batch import SparseBatch


class InputExchange:
    """Exchanges the inputs of all modules, batch by batch: first the sizes, then lengths, ids and weights."""

    def __init__(self, group: dist.ProcessGroup, streams: Streams) -> None:
        self._group, self._streams = group, streams
        self._forms: dict[str, Form] = {}  # agreed on at the first batch in which any rank has an input for the module
        self.waiting: list[InputSizes] = []  # of batches whose ids are to be sent, the oldest first; alike on all ranks

    def send_sizes(self, taking_part: list[str], flight: SparseBatch) -> None:
        """Start the exchange of sizes of modules, the same on all ranks, whether or not this batch has their inputs.

        With it the ranks compare their None batches, even if no module takes part. The sizes travel with the ids of an
        earlier batch if these are still to be sent. A module whose input lacks the agreed form is removed from the
        batch; its own forward then raises TorchRec's error.
        """
        described = {name: form_of(one.splits_awaitable) for name, one in flight.modules.items()}
        if any(name not in self._forms for name in taking_part):
            for theirs in gather_if_unequal(described, self._group):  # a rank's first batch may lack a module's input
                self._forms = {**theirs, **self._forms}
        for name, form in described.items():
            if self._forms.get(name) != form:  # for example with per-id weights that the first one lacked
                del flight.modules[name]
        forms = {name: self._forms[name] for name in taking_part if name in self._forms}
        flight.sizes = InputSizes(forms, flight, self._group, self._streams)
        if not self.waiting:
            flight.sizes.send()
        self.waiting.append(flight.sizes)

    def send_ids(self, flight: SparseBatch) -> None:
        """Read a batch's sizes; start one all-to-all for all. Source: `FusedKJTListSplitsAwaitable`, TorchRec 1.8."""
        sizes, flight.sizes = flight.sizes, None
        if sizes in self.waiting:
            self.waiting.remove(sizes)
        coming: list[_Received] = []
        entries: list[Entry] = []
        for name, (num_found, sizes_of_parts) in sizes.wait().items():
            if not all(num_found):  # what some rank lacks is not sent
                flight.modules.pop(name, None)
                flight.missing |= {name} if any(num_found) else set()
                continue
            module_flight, following = flight.modules[name], iter(sizes_of_parts)
            awaitables: list[Any] = []  # by part
            for described in module_flight.splits_awaitable.awaitables:
                if not isinstance(described, Described):  # data-parallel tables: nothing is sent
                    awaitables.append(described.wait())
                    continue
                sizes_of_part = next(following)
                received = _Received(described, sizes_of_part, first=len(entries))
                entries += described.entries(sizes_of_part, received.segments)
                coming.append(received)
                awaitables.append(received)
                if described.order is not None:  # else TorchRec has copied the ids, and may read the copy again
                    set_values(described.input, described.input.values().new_empty(0))
            module_flight.expect_ids(tell_lookups(awaitables, module_flight.context), votes=max(num_found) > 1)
        if entries:
            unsent = [later for later in self.waiting if later.exchange is None]
            entries += [later.entry(entries[0].tensor.device) for later in unsent]  # gloo may send tensors of a GPU
            exchange = PackedExchange(entries, self._group, self._streams)
            for number, later in enumerate(unsent, len(entries) - len(unsent)):
                later.exchange, later.number = exchange, number
            for received in coming:
                received.exchange = exchange


class _Received(IdsAwaitable):
    """TorchRec's awaitable of the ids that one part of a module receives; its tensors come by a `PackedExchange`."""

    exchange: PackedExchange  # set once it is started; its entries from number `first` on are lengths, ids, weights

    def __init__(self, meta: Described, sizes: PartSizes, first: int) -> None:
        varies = meta.input.variable_stride_per_key()
        super().__init__(
            pg=meta.pg,
            input=meta.input,
            splits=meta.splits,
            input_splits=meta.input_splits,
            output_splits=sizes.by_tensor if varies else sizes.by_tensor[:-1],
            labels=meta.labels,
            keys=meta.keys,
            device=meta.device,
            stagger=meta.stagger,
            stride_per_rank=None if varies else sizes.by_tensor[-1],
        )
        self._place = slice(first, first + len(meta.input_tensors))
        self._num_ids = None if sizes.by_feature is None else [*map(sum, sizes.by_feature)]
        self.segments: list[Any] = [None] * len(meta.input_tensors)
        if not (self.staggered or is_device(meta.device)) and (segments := _by_feature(sizes)) is not None:
            of_lengths, of_ids = segments  # weights are as many as ids
            self.segments = [of_lengths, *[of_ids] * (len(meta.input_tensors) - 1)]

    @override
    def receive(self) -> KeyedJaggedTensor:
        in_order = self.segments[0] is not None  # TorchRec would copy them once more
        kjt = self.assemble(self.exchange.take(self._place), self._num_ids, in_order=in_order)
        set_lengths(kjt, kjt.lengths().to(self.sent.lengths().dtype))  # sent as int32, perhaps
        set_values(kjt, kjt.values().to(self.sent.values().dtype))
        return kjt


def _by_feature(sizes: PartSizes) -> tuple[list[list[int]], list[tuple[int, ...]]] | None:
    """Return, by rank, the numbers of lengths and of ids of each feature; None if not known, or slower."""
    by_feature, num_ranks = sizes.by_feature, len(sizes.by_tensor[-1])
    if not by_feature or not is_faster_in_segments(len(by_feature) * num_ranks, sum(sizes.by_tensor[1])):
        return None
    of_ids = [*zip(*by_feature, strict=True)]
    if [*map(sum, of_ids)] != sizes.by_tensor[1]:  # somebody has written the lengths since
        return None
    return [[batch_size] * len(by_feature) for batch_size in sizes.by_tensor[-1]], of_ids
