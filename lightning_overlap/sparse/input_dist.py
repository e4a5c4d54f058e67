"""The input dist of all sharded modules: one exchange of sizes, then lengths, ids and weights in one all-to-all."""

from __future__ import annotations

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor
from typing_extensions import override

from ..compat.torchrec import (
    IdsAwaitable,
    all_to_all_of,
    features_order,
    set_lengths,
    set_values,
    splits_of,
    stagger_of,
    stay_here,
    tell_lookups,
)
from ..distributed import gather_if_unequal
from ..runtime import Streams
from ..tables import input_dists_of, num_ids
from .input_sizes import Counts, Described, Form, InputSizes, PartSizes, form_of, is_counted_on_device, is_device
from .other_forwards import other_forwards
from .packed_alltoall import Entry, PackedExchange

if TYPE_CHECKING:
    from .flight import SparseFlight

FEW_SEGMENTS, MANY_IDS = 16, 512
"""A segment costs 1.6 us (one thread), so many segments with few ids each are left to TorchRec's kernel."""


@contextmanager
def splits_only(
    module: Any, kjt: KeyedJaggedTensor, group: dist.ProcessGroup | None, *, narrow: bool = False
) -> Iterator[Callable[[Any, KeyedJaggedTensor], Awaitable[Any]]]:
    """Yield a module's `input_dist`, which here describes its all-to-alls of sizes, for `InputExchange` to start.

    `narrow`: ids and lengths are sent as 32-bit integers.
    """
    dists = input_dists_of(module)
    all_to_alls = [one for each in dists if (one := all_to_all_of(each)) is not None]
    if group is None:
        with other_forwards([(one, partial(stay_here, one)) for one in all_to_alls]):
            yield module.input_dist
        return
    order = _order_when_packed(module, dists, kjt)
    with other_forwards([(one, partial(_describe, one, group, narrow, order)) for one in all_to_alls]):
        yield module.input_dist if order is None else module.input_dist.unordered


def _is_faster(num_segments: int, num_ids: int) -> bool:
    """Whether ids are put in order sooner as segments of a packed tensor than by TorchRec's kernel."""
    return num_segments <= FEW_SEGMENTS or num_ids >= MANY_IDS * num_segments


def _order_when_packed(module: Any, dists: list[Any], kjt: KeyedJaggedTensor) -> tuple[int, ...] | None:
    """Return the order of a module's features by rank, if ids can be put in it as they are packed, without a copy."""
    if not isinstance(module, ShardedEmbeddingBagCollection):
        return None
    order = features_order(module)
    is_ordered = (
        order is not None
        and [type(one) for one in dists] == [TwSparseFeaturesDist]  # other kinds read the ids themselves
        and len(kjt.keys()) == len(order)  # else TorchRec would cut the input
        and _is_faster(len(order), kjt.values().numel())
        and not is_device(kjt.device())
        and not kjt.variable_stride_per_key()
        and kjt.weights_or_none() is None
        and sum(num_ids(kjt)) == kjt.values().numel()  # else ids at its end are unused
    )
    return tuple(order) if order is not None and is_ordered else None


def _describe(
    all_to_all: KJTAllToAll,
    group: dist.ProcessGroup,
    narrow: bool,
    order: tuple[int, ...] | None,
    kjt: KeyedJaggedTensor,
) -> Described:
    """Return what an all-to-all of sizes would exchange, on the host. Source: `KJTAllToAll.forward`, TorchRec 1.8."""
    splits = splits_of(all_to_all)
    first, keys, varies = sum(splits[: group.rank()]), kjt.keys(), kjt.variable_stride_per_key()
    batch_size = 0 if varies else kjt.stride()
    counts = None
    with torch.no_grad():
        if is_counted_on_device(kjt):
            of_lengths = [batch_size * num for num in splits]
            input_splits = [of_lengths if label == "lengths" else [0] * len(splits) for label in kjt.dist_labels()]
        elif varies:
            input_splits = kjt.dist_splits(splits)
        else:
            if order is not None:
                keys = [keys[feature] for feature in order]
            counts = Counts(kjt, order)
            # Not by `dist_splits`, whose time grows with the square of the number of ranks.
            ids_by_rank = counts.by_rank(splits)
            of_lengths = [batch_size * num for num in splits]
            input_splits = [of_lengths if label == "lengths" else ids_by_rank for label in kjt.dist_labels()]
        batch_sizes = [] if varies else [[batch_size] * group.size()]
        return Described(
            pg=group,
            input=kjt,
            splits=splits,
            splits_tensors=[*input_splits, *batch_sizes],
            input_splits=input_splits,
            input_tensors=_narrowed(kjt) if narrow else kjt.dist_tensors(),
            labels=kjt.dist_labels(),
            keys=keys[first : first + splits[group.rank()]],
            device=kjt.device(),
            stagger=stagger_of(all_to_all),
            order=order,
            counts=counts,
        )


def _narrowed(kjt: KeyedJaggedTensor) -> list[Tensor]:
    limits = torch.iinfo(torch.int32)  # an id outside is no row of its table, nor is its clamped value
    tensors = dict(zip(kjt.dist_labels(), kjt.dist_tensors(), strict=True))
    for label in ("lengths", "values"):
        if tensors[label].dtype is torch.int64:
            tensors[label] = tensors[label].clamp(limits.min, limits.max).int()
    return list(tensors.values())


class InputExchange:
    """Exchanges the inputs of all modules, batch by batch: first the sizes, then lengths, ids and weights."""

    def __init__(self, group: dist.ProcessGroup, streams: Streams) -> None:
        self._group, self._streams = group, streams
        self._forms: dict[str, Form] = {}  # agreed on at the first batch in which any rank has an input for the module
        self.waiting: list[InputSizes] = []  # of batches whose ids are to be sent, the oldest first; alike on all ranks

    def send_sizes(self, taking_part: list[str], flight: SparseFlight) -> None:
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

    def send_ids(self, flight: SparseFlight) -> None:
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
    if not by_feature or not _is_faster(len(by_feature) * num_ranks, sum(sizes.by_tensor[1])):
        return None
    of_ids = [*zip(*by_feature, strict=True)]
    if [*map(sum, of_ids)] != sizes.by_tensor[1]:  # somebody has written the lengths since
        return None
    return [[batch_size] * len(by_feature) for batch_size in sizes.by_tensor[-1]], of_ids
