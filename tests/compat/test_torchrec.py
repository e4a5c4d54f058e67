"""What TorchRec's private names have to mean, shown by what TorchRec's public methods return."""

from collections.abc import Callable
from contextlib import nullcontext
from itertools import accumulate
from typing import Any

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st
from torch import Tensor, nn
from torchrec import (
    EmbeddingBagCollection,
    EmbeddingBagConfig,
    EmbeddingCollection,
    EmbeddingConfig,
    JaggedTensor,
    KeyedJaggedTensor,
)
from torchrec.distributed.types import Awaitable
from torchrec.modules import mc_modules

from lightning_overlap.compat import torchrec

from ..support.ranks import Ranks
from . import ids, sharded
from .meanings import Meanings

pytestmark = pytest.mark.smoke
meanings = Meanings()

COLLECTIONS = ("ShardedEmbeddingBagCollection", "ShardedEmbeddingCollection")
LOOKUPS = ("GroupedPooledEmbeddingsLookup", "GroupedEmbeddingsLookup")
SLICE = torchrec.PRIVATE_NAMES["TableBatchedEmbeddingSlice"]
EXCHANGES = st.integers(1, 3).flatmap(
    lambda size: st.builds(
        ids.Exchange,
        features=st.tuples(*[st.integers(0, 3)] * size).filter(any),
        batch_sizes=st.one_of(
            st.tuples(*[st.integers(0, 3)] * size), st.integers(0, 3).map(lambda batch_size: (batch_size,) * size)
        ),
        weighted=st.booleans(),
        stagger=st.sampled_from([1, size]),
        seed=st.integers(0, 1000),
    )
)


@meanings.of(*(f"KJTAllToAll.{name}" for name in torchrec.PRIVATE_NAMES["KJTAllToAll"]))
@meanings.of(*(f"KJTAllToAllTensorsAwaitable.{name}" for name in torchrec.PRIVATE_NAMES["KJTAllToAllTensorsAwaitable"]))
@settings(max_examples=40, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(exchange=EXCHANGES)
def test_ids_arrive_as_by_torchrecs_all_to_all(get_ranks: Callable[..., Ranks], exchange: ids.Exchange) -> None:
    for expected, *found in get_ranks(len(exchange.features)).run(ids.by_both, exchange):
        for ours in found:
            assert ours == expected


KINDS = st.sampled_from(["bags", "weighted", "means", "sequences"])
PLACES = st.lists(st.sampled_from([*sharded.PLACES]), min_size=3, max_size=3)


@meanings.of(*(f"{owner}.{name}" for owner in COLLECTIONS for name in ("_lookups", "_output_dists")))
@meanings.of("ShardedEmbeddingCollection._sharding_type_to_sharding")
@settings(max_examples=10, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(kind=KINDS, places=PLACES, order=st.permutations(range(3)), together=st.integers(1, 3), size=st.integers(1, 2))
@example(kind="sequences", places=["whole", "rows", "halves"], order=[2, 0, 1], together=1, size=2)
@example(kind="bags", places=["copies", "rows", "whole"], order=[1, 2, 0], together=2, size=2)
def test_parts_in_any_order_are_what_a_module_looks_up_at_once(
    get_ranks: Callable[..., Ranks], kind: str, places: list[str], order: list[int], together: int, size: int
) -> None:
    """Embeddings, gradients and updated tables are the same, bit for bit, and the module's attributes stay."""
    if kind == "sequences":  # whose data-parallel tables TorchRec pools on a CPU
        places = ["whole" if place == "copies" else place for place in places]
    get_ranks(size).run(sharded.by_parts, sharded.Sharded(kind, places), order, together)


def test_parts_with_batch_sizes_that_vary(two_ranks: Ranks) -> None:
    of = sharded.Sharded("bags", ["whole", "rows", "halves"], variable=True)
    two_ranks.run(sharded.by_parts, of, [1, 2, 0], 1)


@meanings.of("ShardedEmbeddingBagCollection._embedding_bag_configs", "ShardedEmbeddingCollection._embedding_configs")
@meanings.of("ShardedEmbeddingBagCollection._sharding_types", *(f"{owner}._env" for owner in COLLECTIONS))
@meanings.of(*(f"{owner}.{name}" for owner in LOOKUPS for name in ("_emb_modules", "grouped_configs")))
@meanings.of("BatchedDenseEmbeddingBag._emb_module", "BatchedDenseEmbeddingBag.emb_module")
@pytest.mark.parametrize(
    "of",
    [
        sharded.Sharded("bags", ["whole", "rows", "copies"]),
        sharded.Sharded("weighted", ["rows", "whole", "halves"]),
        sharded.Sharded("sequences", ["halves", "whole", "rows"]),
    ],
    ids=lambda of: of.kind,
)
def test_kernels_have_the_tables_that_the_plan_gives_them(two_ranks: Ranks, of: sharded.Sharded) -> None:
    two_ranks.run(sharded.tables_and_kernels, of)


ORDER = ("_features_order", "_has_features_permute", "_has_uninitialized_input_dist")
FREE = ("_free_features_storage_early", "_enabled_feature_score_auto_collection")


@meanings.of(*(f"ShardedEmbeddingBagCollection.{name}" for name in (*ORDER, *FREE)))
def test_ids_are_sent_in_the_order_of_their_ranks(two_ranks: Ranks) -> None:
    assert two_ranks.run(sharded.unordered_ids, sharded.Sharded("bags", ["whole"] * 3)) == [[0, 2, 1]] * 2
    assert two_ranks.run(sharded.unordered_ids, sharded.Sharded("bags", ["rows"] * 3)) == [None] * 2


@meanings.of(*(f"{owner}._input_dists" for owner in COLLECTIONS), "SparseFeaturesDist._dist")
@pytest.mark.parametrize("kind", ["bags", "sequences"])
def test_each_part_but_copies_sends_its_ids_by_one_all_to_all(two_ranks: Ranks, kind: str) -> None:
    third, calls = ("copies", -1) if kind == "bags" else ("halves", 1)
    of = sharded.Sharded(kind, ["whole", "rows", third])
    assert two_ranks.run(sharded.sent_by, of) == [[1, 1, calls]] * 2


@meanings.of("ShardedEmbeddingBagCollection._is_weighted", "ShardedEmbeddingCollection._use_index_dedup")
def test_options_of_a_module_are_known(get_ranks: Callable[..., Ranks]) -> None:
    found = [get_ranks(1).run(sharded.options, kind) for kind in ("bags", "weighted", "sequences")]
    assert found == [[[False]], [[True]], [[True, False]]]


@meanings.of("ShardedEmbeddingBagCollection._has_mean_pooling_callback")
def test_sums_stay_sums_where_kernels_sum(two_ranks: Ranks) -> None:
    assert two_ranks.run(sharded.means_and_sums, "rows") == [True, True]
    assert two_ranks.run(sharded.means_and_sums, "whole") == [False, False]


@meanings.of("ShardedEmbeddingBagCollection.sharding_type_to_sharding_infos")
def test_whole_weights_go_once_they_are_forgotten(two_ranks: Ranks) -> None:
    two_ranks.run(sharded.whole_weights_go)


@meanings.of("EmbeddingBagCollection._device", "EmbeddingCollection._device")
@pytest.mark.parametrize("kind", [EmbeddingBagCollection, EmbeddingCollection])
def test_an_unsharded_collection_says_where_its_weights_are(kind: Any) -> None:
    """Torch takes the name of a device as well, which equals none."""
    config = EmbeddingConfig if kind is EmbeddingCollection else EmbeddingBagConfig

    def make(device: Any) -> Any:
        return kind(tables=[config(name="t", feature_names=["f"], num_embeddings=3, embedding_dim=4)], device=device)

    for device in (None, "cpu", "meta", torch.device("meta")):
        torchrec.tell_where_weights_are(nn.Sequential(collection := make(device)))
        assert collection.device == torch.device(device or "cpu")
    torchrec.tell_where_weights_are(collection := make(None).to("meta"))
    assert collection.device == torch.device("meta")


INNER: dict[str, tuple[str, tuple[str, ...]]] = {
    "position_weighted": (
        "ShardedFeatureProcessedEmbeddingBagCollection",
        ("_embedding_bag_collection", "_feature_processors"),
    ),
    "managed_bags": (
        "ShardedManagedCollisionEmbeddingBagCollection",
        ("_embedding_module", "_managed_collision_collection"),
    ),
    "managed_sequences": (
        "ShardedManagedCollisionEmbeddingCollection",
        ("_embedding_module", "_managed_collision_collection"),
    ),
}


@meanings.of(*(f"{owner}.{name}" for owner, names in INNER.values() for name in names))
@pytest.mark.parametrize("kind", INNER)
def test_other_modules_contain_the_tables(get_ranks: Callable[..., Ranks], kind: str) -> None:
    get_ranks(1).run(sharded.inner_modules, kind)


@meanings.of("EmbeddingFusedOptimizer._emb_module")
@meanings.of(*(f"TableBatchedEmbeddingSlice.{name}" for name in SLICE))
def test_optimizers_and_weights_are_those_of_kernels(get_ranks: Callable[..., Ranks]) -> None:
    get_ranks(1).run(sharded.optimizers_and_slices)


@meanings.of("Request.dummy_tensor", "Request.req", "NoWait._obj")
@pytest.mark.parametrize("place", ["whole", "rows"])
def test_a_graph_is_cut_at_its_collectives(ranks: Ranks, place: str) -> None:
    ranks.run(sharded.collectives, place)


# -- awaitables and inputs, without ranks ------------------------------------------------------------------------------


class Later(Awaitable[int]):  # type: ignore[misc]
    def _wait_impl(self) -> int:
        return 3


class Lazily(torchrec.LazyResult):
    num_calls = 0

    def result(self) -> Tensor:
        self.num_calls += 1
        return torch.ones(2)


@meanings.of("Awaitable._wait_impl")
@pytest.mark.parametrize("profiled", [False, True])
def test_a_wait_gives_what_torchrecs_own_gives(profiled: bool) -> None:
    activities = [torch.profiler.ProfilerActivity.CPU]
    with torch.profiler.profile(activities=activities) if profiled else nullcontext() as profile:
        one = Later()
        one.callbacks.append(lambda number: number + 1)
        assert torchrec.wait_for(one) == one.wait() == 4
        lazy = Lazily()
        assert (lazy + 1).tolist() == [2, 2]  # waits by itself, once
        assert torch.cat([lazy, lazy]).tolist() == [1] * 4
        assert lazy.num_calls == 1
        with_callback = Lazily()
        with_callback.callbacks.append(lambda found: found * 5)
        assert (with_callback + 0).tolist() == [5, 5]
    ranges = {event.key for event in profile.key_averages()} if profiled else set()
    assert ({"## Later wait() ##", "## Lazily wait() ##"} <= ranges) is profiled


KJTS = st.builds(
    lambda lengths, weighted, by_offsets: make_kjt(lengths, weighted=weighted, by_offsets=by_offsets),
    st.lists(st.integers(0, 3), min_size=4, max_size=4),
    st.booleans(),
    st.booleans(),
)


def make_kjt(lengths: list[int], *, weighted: bool, by_offsets: bool) -> KeyedJaggedTensor:
    ids, weights = torch.arange(sum(lengths)), torch.ones(sum(lengths)) if weighted else None
    if by_offsets:
        return KeyedJaggedTensor(["a", "b"], ids, weights, offsets=torch.tensor([0, *accumulate(lengths)]))
    return KeyedJaggedTensor(["a", "b"], ids, weights, torch.tensor(lengths))


@meanings.of(*(f"KeyedJaggedTensor.{name}" for name in ("_jt_dict", "_lengths", "_values", "_weights")))
@given(kjt=KJTS)
def test_parts_of_an_input_are_what_its_methods_return(kjt: KeyedJaggedTensor) -> None:
    assert (torchrec.parts_of(kjt)[1] is None) == (kjt.lengths_or_none() is None)
    lengths = kjt.lengths()
    values, known, weights = torchrec.parts_of(kjt)
    assert values is kjt.values()
    assert known is lengths
    assert weights is kjt.weights_or_none()
    kjt.to_dict()  # is kept
    copied, unweighted = torchrec.shallow_copy(kjt), torchrec.without_weights(kjt)
    assert unweighted.weights_or_none() is None
    assert all(one.weights_or_none() is None for one in unweighted.to_dict().values())
    assert [one.values().tolist() for one in unweighted.to_dict().values()] == [
        one.values().tolist() for one in kjt.to_dict().values()
    ]
    torchrec.set_values(copied, values + 1)
    torchrec.set_lengths(copied, lengths.int())
    assert copied.values().tolist() == (values + 1).tolist()
    assert copied.lengths().dtype is torch.int32
    assert copied.offsets().tolist() == kjt.offsets().tolist()
    if weights is not None:
        torchrec.set_weights(copied, weights + 1)
        assert copied.weights().tolist() == (weights + 1).tolist()
    after = torchrec.parts_of(kjt)
    assert after[0] is values
    assert after[1] is lengths
    assert after[2] is weights


@meanings.of("KeyedJaggedTensor._inverse_indices")
def test_inverse_indices_are_what_an_input_returns() -> None:
    kjt = make_kjt([1, 0, 2, 1], weighted=False, by_offsets=False)
    assert kjt.inverse_indices_or_none() is None
    torchrec.set_inverse_indices(kjt, ["b", "a"], indices := torch.tensor([[0, 1], [1, 1]]))
    features, found = kjt.inverse_indices()
    assert features == ["b", "a"]
    assert found is indices


def counting(interval: int, policy: str) -> mc_modules.MCHManagedCollisionModule:
    kind = {"lfu": mc_modules.LFU_EvictionPolicy, "distance": mc_modules.DistanceLFU_EvictionPolicy}[policy]
    return mc_modules.MCHManagedCollisionModule(6, torch.device("cpu"), kind(), interval, input_hash_size=100)


def rows_of(module: mc_modules.MCHManagedCollisionModule, batch: list[int]) -> list[int]:
    values = torch.tensor(batch, dtype=torch.int64)
    rows: list[int] = module({"t": JaggedTensor(values, lengths=torch.ones_like(values))})["t"].values().tolist()
    return rows


@meanings.of(*(f"MCHManagedCollisionModule.{name}" for name in torchrec.PRIVATE_NAMES["MCHManagedCollisionModule"]))
@given(
    batches=st.lists(st.lists(st.integers(0, 12), min_size=4, max_size=4), min_size=8, max_size=8),
    stop=st.integers(0, 7),
    interval=st.integers(1, 4),
    policy=st.sampled_from(["lfu", "distance"]),
    begun=st.booleans(),
)
@example(batches=[[1, 2, 3, 4], [5, 6, 7, 8], *[[9] * 4] * 6], stop=1, interval=2, policy="lfu", begun=False)
def test_another_module_goes_on_with_the_ids_that_one_has_seen(
    batches: list[list[int]], stop: int, interval: int, policy: str, begun: bool
) -> None:
    first, second = counting(interval, policy), counting(interval, policy)
    for batch in batches[:stop]:
        rows_of(first, batch)
    for batch in batches if begun else ():
        rows_of(second, batch)
    second.load_state_dict(first.state_dict())
    torchrec.set_seen_ids(second, torchrec.seen_ids(first))
    for batch in batches[stop:]:
        assert rows_of(second, batch) == rows_of(first, batch)
    assert {name: value.tolist() for name, value in second.state_dict().items()} == {
        name: value.tolist() for name, value in first.state_dict().items()
    }


def test_a_module_that_forgets_the_ids_that_it_has_seen_begins_as_after_a_load() -> None:
    one, loaded = counting(3, "lfu"), counting(3, "lfu")
    for batch in ([1, 2], [3, 4], [5, 6], [7, 8]):
        rows_of(one, batch)
    loaded.load_state_dict(one.state_dict())
    torchrec.forget_seen_ids(one)
    for batch in ([9, 9], [9, 9], [9, 9], [1, 7]):
        assert rows_of(one, batch) == rows_of(loaded, batch)


@given(
    counts=st.lists(st.integers(1, 9), min_size=1, max_size=12),
    before=st.lists(st.integers(0, 30), max_size=4),
    policy=st.sampled_from(["lfu", "distance"]),
)
def test_ids_get_rows_and_the_policy_chooses_if_there_are_too_few(
    counts: list[int], before: list[int], policy: str
) -> None:
    """Five rows: the last is for unknown ids. All ids came last in the same batch, so the counts decide."""
    module, ids = counting(1, policy), torch.arange(len(counts)) * 7 % 100
    rows_of(module, before)
    metadata = {"counts": torch.tensor(counts), "last_access_iter": torch.full((len(counts),), 3)}
    metadata = {name: metadata[name] for name in torchrec.known_ids(module).metadata}
    module.get_buffer("_current_iter_tensor").fill_(5)
    rows = torchrec.give_rows(module, ids, metadata).tolist()
    known = torchrec.known_ids(module)
    kept = [number for number, row in enumerate(rows) if row >= 0]
    assert len(kept) == min(5, len(counts))
    assert min(counts[number] for number in kept) >= max(
        (counts[number] for number in range(len(counts)) if number not in kept), default=0
    )
    assert dict(zip(known.ids.tolist(), known.rows.tolist(), strict=True)) == {
        int(ids[number]): rows[number] for number in kept
    }
    for name, values in known.metadata.items():
        assert dict(zip(known.ids.tolist(), values.tolist(), strict=True)) == {
            int(ids[number]): int(metadata[name][number]) for number in kept
        }
    module.eval()
    assert rows_of(module, [*ids.tolist(), 99]) == [row if row >= 0 else 5 for row in rows] + [5]
    assert module.evict() is None


def test_ids_keep_metadata_of_a_policy_of_the_users() -> None:
    policy = mc_modules.LFU_EvictionPolicy()
    policy.metadata_info.append(mc_modules.MCHEvictionPolicyMetadataInfo("marks", True, False))
    module = mc_modules.MCHManagedCollisionModule(6, torch.device("cpu"), policy, 1, input_hash_size=100)
    metadata = {"counts": torch.tensor([2, 5, 1]), "marks": torch.tensor([70, 80, 90])}
    torchrec.give_rows(module, torch.tensor([30, 10, 20]), metadata)
    known = torchrec.known_ids(module)
    assert known.ids.tolist() == [10, 20, 30]
    assert {name: values.tolist() for name, values in known.metadata.items()} == {
        "counts": [5, 1, 2],
        "marks": [80, 90, 70],
    }


def test_a_shard_of_ids_begins_at_its_first_row() -> None:
    shard = counting(1, "lfu").rebuild_with_output_id_range((2, 6), [0, 2, 6])
    assert torchrec.first_row(shard) == 2
    assert torchrec.give_rows(shard, torch.tensor([50]), {"counts": torch.tensor([4])}).tolist() in ([0], [1], [2])
    [row] = torchrec.known_ids(shard).rows.tolist()
    assert row in (2, 3, 4)
    nothing = torch.iinfo(torch.int64).max
    assert torchrec.id_of_row(shard).tolist() == [50 if each == row else nothing for each in range(2, 6)]
    assert [row for row in shard.get_buffer(torchrec.SEGMENTS).tolist() if row >= 0] == [0, 2, 6]


@pytest.mark.parametrize("hash_size", [0, 1000])
def test_ids_are_looked_up_by_the_rank_that_is_named(get_ranks: Callable[..., Ranks], hash_size: int) -> None:
    get_ranks(2).run(sharded.ranks_of_ids, hash_size)


@meanings.of(*(f"{owner}._evict" for owner, names in INNER.values() if "_embedding_module" in names))
def test_rows_that_are_reset_are_told(get_ranks: Callable[..., Ranks]) -> None:
    get_ranks(1).run(sharded.reset_rows)


@given(ids=st.lists(st.integers(0, 90), unique=True, max_size=5), seed=st.integers(0, 9))
def test_ids_have_the_rows_that_they_are_given(ids: list[int], seed: int) -> None:
    shard = counting(1, "distance").rebuild_with_output_id_range((2, 8), [0, 2, 8])
    rows = torch.randperm(5, generator=torch.Generator().manual_seed(seed))[: len(ids)] + 2
    torchrec.set_known_ids(shard, torch.tensor(ids, dtype=torch.int64), rows, iteration=7)
    known = torchrec.known_ids(shard)
    assert dict(zip(known.ids.tolist(), known.rows.tolist(), strict=True)) == dict(zip(ids, rows.tolist(), strict=True))
    mapping = shard.get_buffer(torchrec.ROWS_OF_IDS).tolist()
    assert sorted(mapping) == [*range(2, 8)]
    assert mapping[-1] == 7
    assert known.ids.tolist() == sorted(ids)
    assert {one for value in known.metadata.values() for one in value.tolist()} <= {1, 7}
    assert rows_of(shard.eval(), [*ids, 99]) == [*rows.tolist(), 7]


def test_each_listed_name_has_a_test() -> None:
    assert meanings.without_test(torchrec.PRIVATE_NAMES) == set()
