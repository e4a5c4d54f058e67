"""Exchanges of ids by TorchRec's own all-to-all and by an `IdsAwaitable`, to compare. Run by ranks."""

from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.distributed.dist_data import KJTAllToAll
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from lightning_overlap.compat.torchrec import IdsAwaitable, recat, splits_of, stagger_of, stay_here, tell_lookups


class Exchange(NamedTuple):
    """What the ranks exchange."""

    features: tuple[int, ...]  # number of features of each rank
    batch_sizes: tuple[int, ...]  # of each rank
    weighted: bool
    stagger: int
    seed: int


class Context:
    """What TorchRec's lookups read of the exchange, for one part."""

    def __init__(self) -> None:
        self.sharding_contexts = [self]
        self.input_splits = self.output_splits = self.sparse_features_recat = self.batch_size_per_rank = None


def make_input(exchange: Exchange, rank: int) -> KeyedJaggedTensor:
    random = torch.Generator().manual_seed(exchange.seed + rank)
    keys = [f"f{number}" for number in range(sum(exchange.features))]
    lengths = torch.randint(0, 4, (len(keys) * exchange.batch_sizes[rank],), generator=random)
    ids = torch.randint(0, 100, (int(lengths.sum()),), generator=random)
    weights = torch.rand(len(ids), generator=random) if exchange.weighted else None
    return KeyedJaggedTensor(keys, ids, weights, lengths, stride=exchange.batch_sizes[rank])


def by_both(exchange: Exchange) -> list[list[Any]]:
    """Return the received ids, and what lookups are told, by TorchRec's exchange and by ours with and without sizes."""
    group, rank, size = dist.group.WORLD, dist.get_rank(), dist.get_world_size()
    assert group is not None
    all_to_all = KJTAllToAll(group, list(exchange.features), exchange.stagger)
    assert (splits_of(all_to_all), stagger_of(all_to_all)) == (list(exchange.features), exchange.stagger)
    theirs = all_to_all(make_input(exchange, rank)).wait()
    results = [told(theirs), seen(theirs.wait())]
    if size == 1:
        [[ours]] = [tell_lookups([stay_here(all_to_all, make_input(exchange, rank)).wait()], Context()).awaitables]
        return [results, [told(ours), seen(ours.wait())]]
    kjt, first = make_input(exchange, rank), sum(exchange.features[:rank])
    coming = [make_input(exchange, other) for other in range(size)]
    received = [one.dist_splits(list(exchange.features)) for one in coming]
    tensors = []
    for number, sent in enumerate(kjt.dist_tensors()):
        from_each = [splits[number][rank] for splits in received]
        tensors.append(torch.empty(sum(from_each), dtype=sent.dtype))
        dist.all_to_all_single(tensors[-1], sent, from_each, kjt.dist_splits(list(exchange.features))[number])
    mine = range(first, first + exchange.features[rank])
    num_ids = [sum(one.length_per_key()[feature] for one in coming) for feature in mine]
    found = [results]
    for known in (num_ids, None):
        ours = IdsAwaitable(
            pg=group,
            input=kjt,
            splits=list(exchange.features),
            input_splits=kjt.dist_splits(list(exchange.features)),
            output_splits=[[splits[number][rank] for splits in received] for number in range(len(tensors))],
            labels=kjt.dist_labels(),
            keys=[kjt.keys()[feature] for feature in mine],
            device=kjt.device(),
            stagger=exchange.stagger,
            stride_per_rank=list(exchange.batch_sizes),
        )
        assert ours.sent is kjt
        assert ours.staggered == (exchange.stagger != 1)
        found.append([told(ours), seen(ours.assemble(tensors, known, in_order=False))])
    order = recat(len(mine), size, exchange.stagger, kjt.device(), list(exchange.batch_sizes))
    if len(set(exchange.batch_sizes)) == 1:  # the index is kept
        assert order is recat(len(mine), size, exchange.stagger, kjt.device(), list(exchange.batch_sizes))
    return found


def told(awaitable: Any) -> list[Any]:
    """Return what TorchRec's lookups are told of an awaitable."""
    context = Context()
    tell_lookups([awaitable], context)
    order: Tensor | None = context.sparse_features_recat
    listed = None if order is None else order.tolist()
    return [context.input_splits, context.output_splits, listed, context.batch_size_per_rank]


def seen(kjt: KeyedJaggedTensor) -> list[Any]:
    """Return all that users of ids see of them."""
    weights = kjt.weights_or_none()
    of_ids = [kjt.keys(), kjt.values().tolist(), kjt.lengths().tolist(), kjt.stride(), kjt.length_per_key_or_none()]
    return [*of_ids, kjt.offset_per_key(), None if weights is None else weights.tolist()]
