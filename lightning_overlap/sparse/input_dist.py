"""The input dist of all sharded modules: one exchange of sizes, then lengths, ids and weights in one all-to-all."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from itertools import accumulate, islice
from typing import TYPE_CHECKING, Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import KJTSplitsAllToAllMeta
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torchrec import IdsAwaitable, splits_of, stagger_of, stay_here, tell_lookups
from ..distributed import Entry, PackedExchange, gather_objects
from ..runtime import Streams
from ..tables import ids_fit_32_bits, input_dists_of, num_ids
from .input_sizes import Form, InputSizes, PartSizes, form_of, is_counted_on_device, is_device
from .replacing import other_forwards

if TYPE_CHECKING:
    from .flight import SparseFlight

FEW_SEGMENTS, MANY_IDS = 16, 512
"""A segment costs 1.6 us (one thread), so many segments with few ids each are left to TorchRec's kernel."""


@dataclass
class Described(KJTSplitsAllToAllMeta):  # type: ignore[misc]
    """What an all-to-all of the ids of one part would send."""

    order: list[int] | None  # in which the input's features are sent; None: in the input's own
    num_ids: list[int]  # of each of the input's features, if it has an order

    @property
    def pieces(self) -> list[list[int]]:
        """Lengths, then ids of each of the input's features; empty without an order."""
        return [] if self.order is None else [[self._input.stride()] * len(self.num_ids), self.num_ids]

    @property
    def places(self) -> list[list[int]] | None:
        """By rank, the numbers of the input's features that go there."""
        features = iter(self.order or ())
        return None if self.order is None else [[*islice(features, num)] for num in self.splits]

    def entries(self, sizes: PartSizes, segments: Sequence[Any]) -> list[Entry]:
        """Return lengths, ids and weights as entries of an all-to-all; `sizes` and `segments` are of what arrives."""
        entries = []
        for number, tensor in enumerate(self.input_tensors):
            sent, received = self.input_splits[number], sizes.by_tensor[number]
            pieces = self.pieces[number] if self.pieces else None
            entries.append(Entry(tensor, sent, received, segments[number], pieces, self.places))
        return entries


@contextmanager
def splits_only(
    module: Any, kjt: KeyedJaggedTensor, group: dist.ProcessGroup | None, *, narrow: bool = False
) -> Iterator[None]:
    """Within this context a module's `input_dist` describes its all-to-alls of sizes, for `InputExchange` to start."""
    dists = input_dists_of(module)
    all_to_alls = [one for each in dists if isinstance(one := getattr(each, "_dist", None), KJTAllToAll)]
    if group is None:
        with other_forwards([(one, partial(stay_here, one)) for one in all_to_alls]):
            yield
        return
    narrow = narrow and ids_fit_32_bits(module)
    order = module._features_order if _is_ordered_when_packed(module, dists, kjt) else None
    if order is not None:
        vars(module)["_has_features_permute"] = False
    try:
        with other_forwards([(one, partial(_describe, one, group, narrow, order)) for one in all_to_alls]):
            yield
    finally:
        if order is not None:
            vars(module)["_has_features_permute"] = True


def _is_faster(num_segments: int, num_ids: int) -> bool:
    """Whether ids are put in order sooner as segments of a packed tensor than by TorchRec's kernel."""
    return num_segments <= FEW_SEGMENTS or num_ids >= MANY_IDS * num_segments


def _is_ordered_when_packed(module: Any, dists: list[Any], kjt: KeyedJaggedTensor) -> bool:
    """Whether a module's ids can be put in the order of their ranks while they are packed, without another copy."""
    return (
        isinstance(module, ShardedEmbeddingBagCollection)
        and [type(one) for one in dists] == [TwSparseFeaturesDist]  # other kinds read the ids themselves
        and module._has_features_permute
        and len(kjt.keys()) == len(module._features_order)  # else TorchRec would cut the input
        and _is_faster(len(module._features_order), kjt.values().numel())
        and not module._has_uninitialized_input_dist
        and not module._enabled_feature_score_auto_collection
        and not module._free_features_storage_early
        and not is_device(kjt.device())
        and not kjt.variable_stride_per_key()
        and kjt.weights_or_none() is None
        and sum(num_ids(kjt)) == kjt.values().numel()  # else ids at its end are unused
    )


def _describe(
    all_to_all: KJTAllToAll, group: dist.ProcessGroup, narrow: bool, order: list[int] | None, kjt: KeyedJaggedTensor
) -> Described:
    """Return what an all-to-all of sizes would exchange, on the host. Source: `KJTAllToAll.forward`, TorchRec 1.8."""
    splits = splits_of(all_to_all)
    first, keys, varies = sum(splits[: group.rank()]), kjt.keys(), kjt.variable_stride_per_key()
    batch_size = 0 if varies else kjt.stride()
    of_features: list[int] = []
    with torch.no_grad():
        if is_counted_on_device(kjt):
            of_lengths = [batch_size * num for num in splits]
            input_splits = [of_lengths if label == "lengths" else [0] * len(splits) for label in kjt.dist_labels()]
        elif order is None:
            input_splits = kjt.dist_splits(splits)
        else:
            keys, of_features = [keys[feature] for feature in order], num_ids(kjt)
            ids_in_order = [of_features[feature] for feature in order]
            ends = [*accumulate(splits)]  # of the features of each rank
            ids_by_rank = [sum(ids_in_order[end - num : end]) for num, end in zip(splits, ends, strict=True)]
            input_splits = [[batch_size * num for num in splits], ids_by_rank]
        batch_sizes = [] if varies else [[batch_size] * group.size()]
        return Described(
            pg=group,
            _input=kjt,
            splits=splits,
            splits_tensors=[*input_splits, *batch_sizes],
            input_splits=input_splits,
            input_tensors=_narrowed(kjt) if narrow else kjt.dist_tensors(),
            labels=kjt.dist_labels(),
            keys=keys[first : first + splits[group.rank()]],
            device=kjt.device(),
            stagger=stagger_of(all_to_all),
            order=order,
            num_ids=of_features,
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
            for theirs in gather_objects(described, self._group):  # a rank's first batch may lack a module's input
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
                    described._input._values = described._input.values().new_empty(0)
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
        varies = meta._input.variable_stride_per_key()
        super().__init__(
            pg=meta.pg,
            input=meta._input,
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

    def _wait_impl(self) -> KeyedJaggedTensor:
        in_order = self.segments[0] is not None  # TorchRec would copy them once more
        kjt = self.assemble(self.exchange.take(self._place), self._num_ids, in_order=in_order)
        kjt._lengths = kjt.lengths().to(self.sent.lengths().dtype)  # sent as int32, perhaps
        kjt._values = kjt.values().to(self.sent.values().dtype)
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
