"""The exchange of sizes in front of the input dist: one all-to-all for all modules, and one read of it on the host.

And what then travels: between hosts ids in half their bytes.

TorchRec 1.8 reads what it sends back from the device, for an overflow check, and later the lengths of what it received,
feature by feature, which makes the host wait until the ids are there. Here the sizes go to the device in one copy from
pinned memory, and the lengths of the features travel with them: the host knows both from its one read.
"""

from __future__ import annotations

import functools
from collections.abc import Callable, Iterator, Sequence
from contextlib import contextmanager
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed import dist_data
from torchrec.distributed.collective_utils import validate_collectives_enabled
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.distributed.embedding_sharding import FusedKJTListSplitsAwaitable, KJTSplitsAllToAllMeta
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .kinds import ids_fit_32_bits, input_dists_of

MAX_RECATS = 256
"""Orders of received features kept at most: one for each sharding of each module."""


@contextmanager
def splits_only(module: Any, group: dist.ProcessGroup | None, *, narrow: bool = False) -> Iterator[None]:
    """Make a module's input dist describe its all-to-all of sizes instead of starting it, so it can be fused.

    Args:
        module: A sharded module.
        group: Of the input dist; None on one rank, where nothing travels.
        narrow: Whether ids and lengths are to travel in 32 bits, if all of the module's ids fit. The same on all ranks.
    """
    if group is None:
        yield
        return
    all_to_alls = [
        input_dist._dist
        for input_dist in input_dists_of(module)
        if isinstance(getattr(input_dist, "_dist", None), KJTAllToAll)
    ]
    narrow = narrow and ids_fit_32_bits(module) and not validate_collectives_enabled()
    for all_to_all in all_to_alls:
        all_to_all.forward = partial(_describe, all_to_all, group, narrow)
    try:
        yield
    finally:
        for all_to_all in all_to_alls:
            del all_to_all.forward


def _describe(
    all_to_all: KJTAllToAll, group: dist.ProcessGroup, narrow: bool, kjt: KeyedJaggedTensor
) -> KJTSplitsAllToAllMeta:
    """Return what an all-to-all of sizes would exchange, on the host. Source: `KJTAllToAll.forward`, TorchRec 1.8."""
    splits, device = all_to_all._splits, kjt.device()
    first = sum(splits[: group.rank()])
    with torch.no_grad():
        input_splits = kjt.dist_splits(splits)
        sizes = list(input_splits)
        if not kjt.variable_stride_per_key():
            sizes.append([kjt.stride()] * group.size())
        return KJTSplitsAllToAllMeta(
            pg=group,
            _input=kjt,
            splits=splits,
            splits_tensors=sizes,  # of which TorchRec takes the number
            input_splits=input_splits,
            input_tensors=_narrowed(kjt) if narrow else kjt.dist_tensors(),
            labels=kjt.dist_labels(),
            keys=kjt.keys()[first : first + splits[group.rank()]],
            device=device,
            stagger=all_to_all._stagger,
        )


def _narrowed(kjt: KeyedJaggedTensor) -> list[Tensor]:
    """Return what travels, ids and lengths in 32 bits. An id that does not fit is of no row, and stays so."""
    limits = torch.iinfo(torch.int32)
    tensors = dict(zip(kjt.dist_labels(), kjt.dist_tensors(), strict=True))
    for label in ("lengths", "values"):
        if tensors[label].dtype is torch.int64:
            tensors[label] = tensors[label].clamp(limits.min, limits.max).int()
    return list(tensors.values())


class InputSizes:
    """The sizes of the input dists of all modules on their way to the other ranks.

    Args:
        requests: What each module's `input_dist` returned under `splits_only`.
        contexts: The modules' contexts.
        group: The process group.
    """

    def __init__(self, requests: list[Any], contexts: list[Any], group: dist.ProcessGroup) -> None:
        described = [one for request in requests for one in request.awaitables]
        metas = [one for one in described if isinstance(one, KJTSplitsAllToAllMeta)]
        self._is_meta = [isinstance(one, KJTSplitsAllToAllMeta) for one in described]
        self._dtypes = [(meta._input.lengths().dtype, meta._input.values().dtype) for meta in metas]
        self._sizes: _Sizes | None = None
        if validate_collectives_enabled():  # a debugging aid of TorchRec's: its tags travel with the sizes
            for meta in metas:
                meta.splits_tensors = [torch.tensor(sizes, device=meta.device) for sizes in meta.splits_tensors]
            self._fused = FusedKJTListSplitsAwaitable(requests, contexts, group)
            return
        self._fused = FusedKJTListSplitsAwaitable(requests, contexts, None)  # without a group it starts nothing
        if metas:
            self._sizes = self._fused._splits_awaitable = _Sizes(metas, group)

    def wait(self) -> list[Any]:
        """Read the sizes; start the all-to-alls of lengths, ids and weights. Returns an awaitable for each module."""
        with _recats_kept():
            modules: list[Any] = self._fused.wait()
        if self._sizes is not None:
            known = zip(self._sizes.lengths, self._dtypes, strict=True)
            is_meta = iter(self._is_meta)
            for module in modules:
                module.awaitables = [
                    _Received(awaitable, *next(known)) if next(is_meta) else awaitable
                    for awaitable in module.awaitables
                ]
        return modules


class _Sizes:
    """One all-to-all of sizes, and of the lengths of features.

    A row for each destination: of each all-to-all to come the sizes of what is sent there, then the length of each of
    the features that it gets, filled up to the largest number of features that a rank has: so rows are of one width.
    """

    def __init__(self, metas: Sequence[KJTSplitsAllToAllMeta], group: dist.ProcessGroup) -> None:
        self._rank = group.rank()
        self._metas = [(len(meta.splits_tensors), list(meta.splits)) for meta in metas]
        self.lengths: list[list[int] | None] = [None] * len(metas)
        """Of what this rank received, the sum of each feature's lengths; None where they did not travel."""
        self._with_lengths = [not meta._input.variable_stride_per_key() for meta in metas]
        rows: list[list[int]] = [[] for _ in range(group.size())]
        for meta, with_lengths in zip(metas, self._with_lengths, strict=True):
            lengths = meta._input.length_per_key() if with_lengths else []
            first, width = 0, max(meta.splits) if with_lengths else 0
            for destination, num_features in enumerate(meta.splits):
                own = lengths[first : first + num_features]
                rows[destination] += (
                    [sizes[destination] for sizes in meta.splits_tensors] + own + [0] * (width - len(own))
                )
                first += num_features
        device = metas[0].device
        on_host = torch.tensor(rows, dtype=torch.int64, pin_memory=device.type == "cuda")
        sent = on_host.to(device, non_blocking=True)
        self._received = torch.empty_like(sent)
        self._work = dist.all_to_all_single(self._received, sent, group=group, async_op=True)

    def wait(self) -> list[list[int]]:
        """Return what every rank sends to this one, by tensor: the one read of the step."""
        assert self._work is not None
        self._work.wait()
        rows: list[list[int]] = self._received.tolist()
        columns = list(zip(*rows, strict=True))
        sizes: list[list[int]] = []
        place = 0
        for number, (num_sizes, splits) in enumerate(self._metas):
            sizes += [list(column) for column in columns[place : place + num_sizes]]
            place += num_sizes
            if self._with_lengths[number]:
                mine = columns[place : place + splits[self._rank]]
                self.lengths[number] = [sum(column) for column in mine]
                place += max(splits)
        return sizes


class _Received(Awaitable[KeyedJaggedTensor]):  # type: ignore[misc]
    """The ids of one all-to-all, whose lengths by feature are known before they are there.

    Args:
        awaitable: Gives them.
        lengths: Of each feature, summed up; None where they are not known.
        dtypes: Of lengths and of ids, as they were before they travelled.
    """

    def __init__(
        self,
        awaitable: Awaitable[KeyedJaggedTensor],
        lengths: list[int] | None,
        dtypes: tuple[torch.dtype, torch.dtype],
    ) -> None:
        super().__init__()
        self._awaitable, self._lengths, self._dtypes = awaitable, lengths, dtypes

    def _wait_impl(self) -> KeyedJaggedTensor:
        with _lengths_known(self._lengths):
            kjt = self._awaitable.wait()
        of_lengths, of_values = self._dtypes
        kjt._lengths, kjt._values = kjt.lengths().to(of_lengths), kjt.values().to(of_values)
        return kjt


@contextmanager
def _lengths_known(lengths: list[int] | None) -> Iterator[None]:
    """Have TorchRec take the lengths of the features it assembles from here, where they are of these ids."""
    own = KeyedJaggedTensor.sync

    def sync(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        fits = lengths is not None and len(lengths) == len(kjt.keys()) and sum(lengths) == kjt.values().numel()
        if fits and kjt._length_per_key is None:
            kjt._length_per_key = lengths
        return own(kjt)

    KeyedJaggedTensor.sync = sync
    try:
        yield
    finally:
        KeyedJaggedTensor.sync = own


@contextmanager
def _recats_kept() -> Iterator[None]:
    """Let TorchRec take the order of received features from a memory: it would copy the same one in every step."""
    own = getattr(dist_data, "_get_recat", None)
    if own is None:  # then it copies
        yield
        return
    dist_data._get_recat = partial(_kept_recat, own)
    try:
        yield
    finally:
        dist_data._get_recat = own


def _kept_recat(
    own: Callable[..., torch.Tensor | None],
    local_split: int,
    num_splits: int,
    stagger: int = 1,
    device: torch.device | None = None,
    batch_size_per_rank: list[int] | None = None,
) -> torch.Tensor | None:
    if batch_size_per_rank and any(size != batch_size_per_rank[0] for size in batch_size_per_rank):
        return own(local_split, num_splits, stagger, device, batch_size_per_rank)  # depends on the sizes
    return _recat(own, local_split, num_splits, stagger, device)


@functools.lru_cache(MAX_RECATS)
def _recat(
    own: Callable[..., torch.Tensor | None],
    local_split: int,
    num_splits: int,
    stagger: int,
    device: torch.device | None,
) -> torch.Tensor | None:
    with torch.inference_mode(False):  # an evaluation may come first, training uses it too
        return own(local_split, num_splits, stagger, device)
