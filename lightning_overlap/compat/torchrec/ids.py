"""TorchRec's private names in the exchange of ids: awaitables of ids that TorchRec has not sent itself."""

from collections.abc import Mapping, Sequence
from functools import lru_cache
from typing import Any

import torch
import torch.distributed as dist
from torch import Tensor
from torch.profiler import record_function
from torchrec.distributed.dist_data import KJTAllToAll, KJTAllToAllTensorsAwaitable, _get_recat
from torchrec.distributed.embedding_sharding import KJTListAwaitable, _set_sharding_context_intra_a2a
from torchrec.distributed.types import Awaitable, NoWait
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "KJTAllToAll": ("_pg", "_splits", "_stagger"),
    "KJTAllToAllTensorsAwaitable": (
        *("_input", "_keys", "_output_tensors", "_recat", "_splits", "_stagger", "_stride_per_rank", "_wait_impl"),
        "_workers",
    ),
}
"""By the class that has them. A name that this file imports is not listed: the import itself fails."""


class IdsAwaitable(KJTAllToAllTensorsAwaitable):  # type: ignore[misc]
    """The ids of one part of a module on their way to this rank, by no all-to-all of TorchRec's.

    TorchRec reads from it what the lookup needs (splits, batch sizes, `recat`), as from its own awaitable.

    Args:
        pg: Group of the ranks that exchange ids.
        input: What this rank sends; on one rank `wait` returns it.
        splits: Number of features that go to each rank.
        input_splits: Elements of lengths, ids, ... that go to each rank.
        output_splits: Elements of them that come from each rank.
        labels: Names of lengths, ids, ... (`KeyedJaggedTensor.dist_labels`).
        keys: Features of this rank.
        device: Where the ids arrive.
        stagger: TorchRec's order of ranks, 1 but for table-wise-row-wise tables.
        stride_per_rank: Batch size of each rank; None if it varies by feature.
    """

    def __init__(
        self,
        pg: dist.ProcessGroup,
        input: KeyedJaggedTensor,  # TorchRec's name
        splits: list[int],
        input_splits: list[list[int]],
        output_splits: list[list[int]],
        labels: list[str],
        keys: list[str],
        device: torch.device,
        stagger: int,
        stride_per_rank: list[int] | None,
    ) -> None:
        # Without features TorchRec computes no `recat`, and without tensors it starts no all-to-all.
        no_features, no_tensors = [0] * len(splits), list[Tensor]()
        super().__init__(
            pg=pg,
            input=input,
            splits=no_features,
            input_splits=input_splits,
            output_splits=output_splits,
            input_tensors=no_tensors,
            labels=labels,
            keys=keys,
            device=device,
            stagger=stagger,
            stride_per_rank=stride_per_rank,
        )
        self._splits = splits
        self._recat = recat(splits[pg.rank()], len(splits), stagger, device, stride_per_rank)

    @property
    def sent(self) -> KeyedJaggedTensor:
        """What this rank sends."""
        return self._input

    @property
    def staggered(self) -> bool:
        """Whether ranks are in an order of TorchRec's own."""
        return bool(self._stagger != 1)

    def receive(self) -> KeyedJaggedTensor:
        """Return the received ids, on several ranks, for a subclass to define; called by `wait`."""
        return super()._wait_impl()

    def _wait_impl(self) -> KeyedJaggedTensor:
        return self.receive()

    def assemble(self, tensors: Sequence[Tensor], num_ids: list[int] | None, *, in_order: bool) -> KeyedJaggedTensor:
        """Return the received ids, on several ranks.

        Args:
            tensors: Lengths, ids and perhaps more, on the device, from rank 0, then from rank 1, ...
            num_ids: Ids of each feature, if the host knows them; else it reads the device, and waits for that.
            in_order: Whether each tensor is ordered by features, and only then by ranks.
        """
        if in_order:
            self._recat = None
        strides = self._stride_per_rank
        if num_ids is None or strides is None:
            self._output_tensors = list(tensors)
            return super()._wait_impl()
        lengths, values, *rest = tensors
        weights = rest[0] if rest else None
        with record_function("## dist_init:recat_values ##"):
            if self._recat is not None and len(set(strides)) > 1:
                lengths, values, weights = torch.ops.fbgemm.permute_1D_sparse_data(
                    self._recat, lengths.view(-1), values, weights, values.numel()
                )
            elif self._recat is not None and strides[0] > 0:
                lengths, values, weights = torch.ops.fbgemm.permute_2D_sparse_data(
                    self._recat, lengths.view(-1, strides[0]), values, weights, values.numel()
                )
        are_these = len(num_ids) == len(self._keys) and sum(num_ids) == values.numel()
        return KeyedJaggedTensor(
            keys=self._keys,
            values=values,
            weights=weights,
            lengths=lengths.view(-1),
            stride=sum(strides),
            length_per_key=num_ids if are_these else None,
        ).sync()


def recat(
    num_features: int, num_ranks: int, stagger: int, device: torch.device, stride_per_rank: list[int] | None
) -> Tensor | None:
    """Return TorchRec's index that puts received features in order, int32 on the device; None without features.

    It is cached where it depends on the sharding alone: TorchRec copies it to the device in each step, and the host
    waits for that.
    """
    if len(set(stride_per_rank or ())) > 1:
        return _get_recat(num_features, num_ranks, stagger, device, stride_per_rank)  # type: ignore[no-any-return]
    return _cached_recat(num_features, num_ranks, stagger, device)


@lru_cache(256)  # one for each part of each module
def _cached_recat(num_features: int, num_ranks: int, stagger: int, device: torch.device) -> Tensor | None:
    with torch.inference_mode(False):  # training uses the index even if an evaluation has made it
        return _get_recat(num_features, num_ranks, stagger, device)  # type: ignore[no-any-return]


def splits_of(all_to_all: KJTAllToAll) -> list[int]:
    """Return the number of features that go to each rank."""
    return list(all_to_all._splits)


def stagger_of(all_to_all: KJTAllToAll) -> int:
    """Return TorchRec's order of ranks: 1 but for table-wise-row-wise tables."""
    return int(all_to_all._stagger)


def stay_here(all_to_all: KJTAllToAll, kjt: KeyedJaggedTensor) -> Awaitable[Awaitable[KeyedJaggedTensor]]:
    """Do on one rank what `all_to_all(kjt)` does, but for the copy of `recat`. Source: `KJTAllToAll`, TorchRec 1.8."""
    splits = splits_of(all_to_all)
    with torch.no_grad():
        sizes = kjt.dist_splits(splits)
        awaitable = IdsAwaitable(
            pg=all_to_all._pg,
            input=kjt,
            splits=splits,
            input_splits=sizes,
            output_splits=sizes,
            labels=kjt.dist_labels(),
            keys=kjt.keys(),
            device=kjt.device(),
            stagger=stagger_of(all_to_all),
            stride_per_rank=None if kjt.variable_stride_per_key() else [kjt.stride()],
        )
    return NoWait(awaitable)


def tell_lookups(awaitables: list[Any], context: Any) -> KJTListAwaitable:
    """Pass what a module's lookups need of its awaitables to their contexts; return one awaitable of all ids."""
    _set_sharding_context_intra_a2a(awaitables, context)
    return KJTListAwaitable(awaitables, context)
