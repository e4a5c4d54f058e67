"""The input of one module as its all-to-alls would send it: `InputExchange` sends those of all modules together."""

from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from functools import lru_cache, partial
from itertools import accumulate, islice
from typing import Any, NamedTuple

import numpy as np
import torch
import torch.distributed as dist
from numpy.typing import NDArray
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.sharding.tw_sharding import TwSparseFeaturesDist
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torchrec import all_to_all_of, features_order, splits_of, stagger_of, stay_here
from ..tables import input_dists_of, num_ids
from .other_forwards import other_forwards
from .packed_alltoall import Entry, Places

FEW_SEGMENTS, MANY_IDS = 16, 512
"""A segment costs 1.6 us (one thread), so many segments with few ids each are left to TorchRec's kernel."""


class PartSizes(NamedTuple):
    """What this rank receives of one part."""

    by_tensor: list[list[int]]
    """Elements of lengths, ids and weights from each rank; then batch sizes by rank, unless these vary by feature."""
    by_feature: list[list[int]] | None  # ids of each feature of this rank, from each rank, if these were sent


class Counts:
    """The number of ids of each feature that a part sends, as the host knows them.

    Arrays, not lists: with row-wise tables each rank is sent as many features as there are tables.
    """

    def __init__(self, kjt: KeyedJaggedTensor, order: tuple[int, ...] | None) -> None:
        known, num_features = kjt.length_per_key_or_none(), len(kjt.keys())
        if known is not None and len(known) == num_features:
            self.of_input: NDArray[np.int64] = np.array(known, np.int64)
        else:  # `length_per_key` would make a list of it
            self.of_input = kjt.lengths().view(num_features, kjt.stride()).sum(1, dtype=torch.int64).numpy()
        self._in_order = self.of_input if order is None else self.of_input[[*order]]

    def by_rank(self, splits: Sequence[int]) -> list[int]:
        """Return the number of ids for each rank; `splits` has the number of its features."""
        ends = np.zeros(len(self._in_order) + 1, np.int64)
        self._in_order.cumsum(out=ends[1:])
        numbers: list[int] = np.diff(ends[[0, *accumulate(splits)]]).tolist()
        return numbers

    def columns(self, splits: Sequence[int]) -> NDArray[np.int64]:
        """Return the number of ids by feature of a rank, and by rank, int64; 0 where a rank has fewer features."""
        padded = np.zeros((len(splits), max(splits)), np.int64)
        padded[np.arange(max(splits)) < np.array(splits)[:, None]] = self._in_order
        return padded.T


@dataclass(slots=True)
class Described:
    """What an all-to-all of the ids of one part would send. Source: `KJTSplitsAllToAllMeta`, TorchRec 1.8."""

    pg: dist.ProcessGroup
    input: KeyedJaggedTensor
    splits: list[int]  # number of features that go to each rank
    splits_tensors: list[list[int]]  # what the exchange of sizes sends to each rank: by tensor, and batch sizes
    input_splits: list[list[int]]  # elements of each tensor that go to each rank
    input_tensors: list[Tensor]  # lengths, ids, ...
    labels: list[str]  # names of these tensors
    keys: list[str]  # features of this rank
    device: torch.device
    stagger: int  # TorchRec's order of ranks
    order: tuple[int, ...] | None  # in which the input's features are sent; None: in the input's own
    counts: Counts | None  # of ids; None if only the device knows them, or if batch sizes vary by feature

    @property
    def pieces(self) -> list[list[int]]:
        """Lengths, then ids of each of the input's features; empty without an order."""
        if self.order is None or self.counts is None:
            return []
        return [[self.input.stride()] * len(self.order), self.counts.of_input.tolist()]

    def entries(self, sizes: PartSizes, segments: Sequence[Any]) -> list[Entry]:
        """Return lengths, ids and weights as entries of an all-to-all; `sizes` and `segments` are of what arrives."""
        entries = []
        places = None if self.order is None else _features_by_rank(self.order, tuple(self.splits))
        for number, tensor in enumerate(self.input_tensors):
            sent, received = self.input_splits[number], sizes.by_tensor[number]
            pieces = self.pieces[number] if self.pieces else None
            entries.append(Entry(tensor, sent, received, segments[number], pieces, places))
        return entries


@lru_cache(256)  # in each step the same
def _features_by_rank(order: tuple[int, ...], splits: tuple[int, ...]) -> Places:
    features = iter(order)
    return tuple([tuple(islice(features, num)) for num in splits])


def is_counted_on_device(kjt: KeyedJaggedTensor) -> bool:
    """Whether only the device knows the number of ids of each feature: it has bucketized them (row-wise tables)."""
    return is_device(kjt.device()) and kjt.length_per_key_or_none() is None and not kjt.variable_stride_per_key()


def is_device(device: torch.device) -> bool:
    """Whether a read of this device's memory makes the host wait."""
    return device.type != "cpu"


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


def is_faster_in_segments(num_segments: int, num_ids: int) -> bool:
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
        and is_faster_in_segments(len(order), kjt.values().numel())
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
