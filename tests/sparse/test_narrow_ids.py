"""Between hosts ids travel in half their bytes, where all of a module's ids fit: losses are those of the plain loop."""

from collections.abc import Callable
from types import SimpleNamespace

import pytest
import torch
from torchrec import KeyedJaggedTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.mc_embeddingbag import ShardedManagedCollisionEmbeddingBagCollection
from torchrec.distributed.types import ParameterSharding

from lightning_overlap import MODES
from lightning_overlap.sparse import described_input
from lightning_overlap.tables.supported_modules import ids_fit_32_bits

from ..support import exchanges
from ..support.ranks import Ranks
from ..tables.supported_modules import fit, train


@pytest.mark.parametrize(("num_nodes", "dtype"), [(1, torch.int64), (2, torch.int32)])
def test_ids_and_lengths_are_narrow_between_hosts(
    get_ranks: Callable[..., Ranks], num_nodes: int, dtype: torch.dtype
) -> None:
    """The sizes of batch 1 travel alone, those of every later one with the ids of the batch before it.

    Batch 0 shows which input feeds which module, and is not looked up early.
    """
    sent, looked_up = zip(*get_ranks(2, num_nodes=num_nodes).run(exchanges.dtypes_of_a_run, 6), strict=True)
    assert sent == ([torch.int64, *[dtype] * 5],) * 2
    assert looked_up == ({torch.int64},) * 2


@pytest.mark.parametrize(
    ("name", "pipeline"),
    [
        ("feature_processors", "fused_sparse_dist"),
        ("feature_processors_row_wise", "semi_sync"),
        ("variable_batch", "fused_sparse_dist"),
        ("variable_batch_sequences", "semi_sync"),
        ("managed_bags", "fused_sparse_dist"),
        ("managed_sequences", "semi_sync"),
    ],
)
def test_two_hosts_train_every_kind_as_the_plain_loop(
    get_ranks: Callable[..., Ranks], name: str, pipeline: str
) -> None:
    staleness = MODES[pipeline].staleness
    ranks = get_ranks(2, num_nodes=2)
    actual, expected = ranks.run(fit, name, pipeline), ranks.run(train, name, staleness)
    pairs = zip(actual, expected, strict=True)
    assert [mine.differences(theirs) for mine, theirs in pairs] == [[], []]


def test_an_id_of_no_row_stays_one() -> None:
    values = torch.tensor([0, -1, 7, 2**31 - 1, 2**31, 2**40 + 3, -(2**40)])
    kjt = KeyedJaggedTensor(["f"], values, lengths=torch.tensor([7]), weights=torch.ones(7))
    lengths, narrow, weights = described_input._narrowed(kjt)
    largest, least = 2**31 - 1, -(2**31)
    assert narrow.tolist() == [0, -1, 7, largest, largest, largest, least]
    assert (lengths.dtype, narrow.dtype, weights.dtype) == (torch.int32, torch.int32, torch.float32)
    floats, lengths = torch.tensor([1.5, 2.5]), torch.tensor([1, 1], dtype=torch.int32)
    sent = described_input._narrowed(KeyedJaggedTensor(["f"], floats, lengths=lengths))
    assert [one.data_ptr() for one in sent] == [lengths.data_ptr(), floats.data_ptr()], (
        "what is narrow, or no id, stays"
    )


@pytest.mark.parametrize(
    ("rows_of_shards", "kind", "fit"),
    [
        ([(0, 10)], ShardedEmbeddingBagCollection, True),
        ([(0, 2**30), (2**30, 2**30 - 1)], ShardedEmbeddingCollection, True),
        ([(0, 2**30), (2**30, 2**30)], ShardedEmbeddingBagCollection, False),
        ([(0, 10)], ShardedManagedCollisionEmbeddingBagCollection, False),
    ],
)
def test_which_modules_ids_fit(rows_of_shards: list[tuple[int, int]], kind: type, fit: bool) -> None:
    """Rows of a shard: its first one, and how many."""
    shards = [SimpleNamespace(shard_offsets=[first, 0], shard_sizes=[num, 8]) for first, num in rows_of_shards]
    module = kind.__new__(kind)
    plan = {"t0": ParameterSharding("row_wise", "fused", sharding_spec=SimpleNamespace(shards=shards))}
    plan["t1"] = ParameterSharding("data_parallel", "dense")  # does not travel
    module.module_sharding_plan = plan
    assert ids_fit_32_bits(module) is fit
