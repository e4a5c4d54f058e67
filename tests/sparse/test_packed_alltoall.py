"""Lengths, ids and weights of all modules travel in one all-to-all, and arrive as if each had one of its own."""

from collections import Counter

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor

from lightning_overlap.runtime import Streams
from lightning_overlap.schedules import StreamName
from lightning_overlap.sparse import packed_alltoall
from lightning_overlap.sparse.packed_alltoall import Entry, PackedExchange, in_order
from lightning_overlap.testing import CheckedStreams
from lightning_overlap.testing.watched_fit import process_group

from ..support import mutants
from ..support.cases import TWO_COLLECTIONS, WEIGHTED, Batches, Case, Model
from ..support.exchanges import of_input_dist
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks

DTYPES = (torch.int64, torch.int32, torch.float32, torch.float16, torch.bool)
Shape = tuple[torch.dtype, tuple[int, ...], list[list[int]]]
"""Of a entry: its dtype, the shape of a row, and rows from rank i to rank j."""

rows = st.lists(st.lists(st.integers(0, 5), min_size=2, max_size=2), min_size=2, max_size=2)
shapes = st.lists(st.tuples(st.sampled_from(DTYPES), st.sampled_from([(), (3,), (2, 2)]), rows), min_size=1, max_size=5)


def packed_and_apart(exchanges: list[list[Shape]]) -> list[tuple[list[Tensor], list[Tensor]]]:
    rank, group = dist.get_rank(), dist.group.WORLD
    assert group is not None
    results = []
    for number, exchange in enumerate(exchanges):
        torch.manual_seed(2 * number + rank)
        entries = []
        for dtype, shape, sent in exchange:
            tensor = torch.randint(0, 100, (sum(sent[rank]), *shape)).to(dtype)
            entries.append(Entry(tensor, sent[rank], [row[rank] for row in sent]))
        apart = [entry.tensor.new_empty((sum(entry.received), *entry.tensor.shape[1:])) for entry in entries]
        for entry, received in zip(entries, apart, strict=True):
            dist.all_to_all_single(received, entry.tensor, entry.received, entry.sent)
        for entry in [*entries]:  # once more, both halves of what a rank sends in the other order
            cuts = [cut for num in entry.sent for cut in (num // 2, num - num // 2)]
            came = [(num - num // 2, num // 2) for num in entry.received]
            entries.append(Entry(entry.tensor, entry.sent, entry.received, came, cuts, ((1, 0), (3, 2))))
        packed = PackedExchange(entries, group, Streams())
        for entry, received in zip(entries[len(apart) :], [*apart], strict=True):
            first, second, *of_other = received.split([num for (b, a) in entry.segments or () for num in (a, b)])
            apart.append(torch.cat([second, of_other[1], first, of_other[0]]))
        some = len(entries) // 2  # the modules of one exchange wait by turns
        last, first = packed.take(slice(some, None)), packed.take(slice(some))
        assert all(one.untyped_storage().nbytes() == one.nbytes for one in (*first, *last)), "ids keep no sizes alive"
        results.append(([*first, *last], apart))
        assert packed.take(slice(None)) == []  # handed over, not kept
    return results


def test_what_is_packed_arrives_as_if_sent_apart(two_ranks: Ranks) -> None:
    exchanges: list[list[Shape]] = [[(torch.int64, (), [[0, 0], [0, 0]])]]

    @given(st.lists(shapes, max_size=10))
    @settings(max_examples=25)
    def collect(drawn: list[list[Shape]]) -> None:
        exchanges.extend(drawn)

    collect()
    for results in two_ranks.run(packed_and_apart, exchanges):
        for packed, apart in results:
            assert [one.dtype for one in packed] == [one.dtype for one in apart]
            assert all(map(torch.equal, packed, apart))


@given(st.data(), st.lists(st.lists(st.integers(0, 4), min_size=1, max_size=6), min_size=1, max_size=3))
@settings(max_examples=50)
def test_many_small_pieces_are_joined_as_few_large_ones(data: st.DataObject, sizes: list[list[int]]) -> None:
    dtype = data.draw(st.sampled_from([torch.int64, torch.int32, torch.int8]))
    tensors = [(torch.arange(sum(of_tensor)) + 25 * number).to(dtype) for number, of_tensor in enumerate(sizes)]
    numbers = st.integers(0, sum(map(len, sizes)) - 1)
    orders = data.draw(st.lists(st.lists(numbers, min_size=1).map(np.array), min_size=1, max_size=3))
    one_by_one = in_order(tensors, sizes, orders)
    with pytest.MonkeyPatch.context() as patch:
        patch.setattr(packed_alltoall, "FEW_PIECES", 0)
        patch.setattr(packed_alltoall, "LARGE_PIECE", 1 << 20)
        by_index = in_order(tensors, sizes, orders)
    assert all(map(torch.equal, one_by_one, by_index))


def all_to_alls_of_a_run(case: Case) -> Counter[str]:
    model = Model(case)
    with of_input_dist() as calls:
        make_trainer(make_strategy(model)).fit(model, datamodule=Batches(case, 6))
    return Counter("sizes" if call.get("input_split_sizes") is None else "ids" for call in calls)


@pytest.mark.parametrize("case", [TWO_COLLECTIONS, WEIGHTED], ids=lambda case: case.name)
def test_a_batch_has_one_all_to_all_of_ids(two_ranks: Ranks, case: Case) -> None:
    """Sizes travel alone once: batch 0 is looked up in its own forward, those of batch 2 go with the ids of batch 1."""
    assert two_ranks.run(all_to_alls_of_a_run, case) == [Counter(sizes=1, ids=5)] * 2


def take_on_other_streams() -> None:
    streams, group = CheckedStreams(), dist.group.WORLD
    assert group is not None
    with streams.watching({}, {}, []):
        with streams.on(StreamName.DATA_DIST):
            entries = [Entry(torch.arange(num) + 1, [num], [num]) for num in (5, 3)]
            exchange = PackedExchange(entries, group, streams)
        with streams.on(StreamName.LOOKUP):
            [ids] = exchange.take(slice(1))
            assert (2 * ids).tolist() == [2, 4, 6, 8, 10]
        [sizes] = exchange.take(slice(1, 2))
        assert (2 * sizes).tolist() == [2, 4, 6]


def test_each_part_is_ordered_and_handed_over_on_the_stream_that_takes_it() -> None:
    """Without one of the statements the streams that follow each operator find a race."""
    statements = [*mutants.statements(packed_alltoall)]
    assert [text.partition("(")[0] for _, text in statements] == ["self._streams.use"]
    with process_group("cpu"):
        take_on_other_streams()
        for line, text in statements:
            with mutants.without(packed_alltoall, line):
                assert mutants.races(take_on_other_streams), text
