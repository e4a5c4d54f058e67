"""`strategy.table`: the whole table of that moment, on every rank that asks, and no other training for it."""

import re
from collections.abc import Callable

import pytest
import torch
from hypothesis import HealthCheck, example, given, settings
from hypothesis import strategies as st

from lightning_overlap import MODES

from ..checkpoint.collisions import Setting, drawn_settings
from ..support.cases import COLUMN_WISE, MIXED, SEQUENCE, Case
from ..support.draws import few
from ..support.ranks import RankError, Ranks
from . import table_reads
from .table_reads import PLACES, READ_IN, Fit, Table, unsharded_tables

FUSED = [sharding for sharding in PLACES if sharding != "data_parallel"]
EVERY_KIND = tuple(map(Table, FUSED))
DENSE_ONES = Table("table_wise"), Table("data_parallel"), Table("data_parallel", half=False, dim=4)


def check(ranks: Ranks, fit: Fit) -> None:
    for wrong, num_reads in ranks.run(table_reads.reads_of_a_fit, fit):
        assert wrong == []
        assert num_reads > len(READ_IN)


@pytest.mark.parametrize("pipeline", MODES)
def test_equals_the_unsharded_table_in_every_hook(two_ranks: Ranks, pipeline: str) -> None:
    check(two_ranks, Fit(EVERY_KIND, pipeline, num_steps=4))


@pytest.mark.parametrize("num_ranks", [1, 3])
def test_on_other_numbers_of_ranks(get_ranks: Callable[..., Ranks], num_ranks: int) -> None:
    check(get_ranks(num_ranks), Fit(EVERY_KIND, "semi_sync_deferred"))
    check(get_ranks(num_ranks), Fit(DENSE_ONES))


@st.composite
def fits(draw: st.DrawFn) -> Fit:
    is_sequence = draw(st.booleans())
    dims = st.just(draw(st.sampled_from((8, 16)))) if is_sequence else st.sampled_from((8, 16))
    no_sequences = {"replicated", "grid_shard", "table_row_wise"}
    shardings = st.sampled_from([one for one in FUSED if not (is_sequence and one in no_sequences)])
    table = st.builds(Table, shardings, st.integers(2, 23), dims, half=st.just(False) if is_sequence else st.booleans())
    trainable = table.filter(lambda drawn: not (drawn.half and drawn.sharding == "replicated"))  # that is refused
    tables = draw(st.lists(trainable, min_size=1, max_size=4))
    return Fit(tuple(tables), draw(st.sampled_from(list(MODES))), is_sequence, draw(st.integers(2, 6)))


@given(fit=fits())
@settings(max_examples=20, suppress_health_check=[HealthCheck.function_scoped_fixture])
def test_any_tables_equal_the_unsharded_ones_after_any_fit(get_ranks: Callable[..., Ranks], fit: Fit) -> None:
    expected = unsharded_tables(fit, 2)[-1]
    for tables in get_ranks(2).run(table_reads.last_tables, fit):
        for at, (table, other) in enumerate(zip(tables, expected, strict=True)):
            assert (at, table.dtype) == (at, other.dtype)
            assert torch.equal(table, other)


@pytest.mark.parametrize(
    ("case", "pipeline"),
    [(MIXED, "fused_sparse_dist"), (COLUMN_WISE, "semi_sync_deferred"), (SEQUENCE, "async_lookup")],
)
def test_training_is_as_if_nothing_had_been_read(two_ranks: Ranks, case: Case, pipeline: str) -> None:
    plain = two_ranks.run(table_reads.result_of_a_fit, case, pipeline, reads=False)
    for mine, other in zip(two_ranks.run(table_reads.result_of_a_fit, case, pipeline, reads=True), plain, strict=True):
        assert mine.differences(other) == []


@pytest.mark.parametrize("sharding", ["row_wise", "column_wise"])
@pytest.mark.parametrize("rank", [None, 0, 1])
def test_chunks_are_the_rows_in_order(two_ranks: Ranks, sharding: str, rank: int | None) -> None:
    fit = Fit((Table(sharding, num_rows=11),))
    expected = unsharded_tables(fit, 2)[2][0]
    for own, found in enumerate(two_ranks.run(table_reads.chunks, fit, 4, rank)):
        assert [first for first, _ in found] == ([0, 4, 8] if rank in (None, own) else [])
        if found:
            assert torch.equal(torch.cat([rows for _, rows in found]), expected)


def test_one_rank_alone_gets_it(two_ranks: Ranks) -> None:
    assert two_ranks.run(table_reads.read_on_one_rank_alone) == [[True, False], [False, True]]


def test_what_an_evaluation_has_read_can_be_trained_with(ranks: Ranks) -> None:
    for gradient in ranks.run(table_reads.read_while_not_training):
        assert gradient.shape == (8,)


@pytest.mark.parametrize(
    ("way", "hook", "said"),
    [
        ("rank_0_alone", "on_train_batch_end", "rank 0 calls strategy.table('t0', rank=None), rank 1 goes on without"),
        ("rank_0_alone", "on_train_epoch_end", "rank 0 calls strategy.table('t0', rank=None), rank 1 goes on without"),
        ("leaves_chunks", "on_train_batch_start", "table_chunks('t0', num_rows=2, rank=None) at row 4, rank 1 goes on"),
        ("another_reader", "on_train_batch_end", "calls strategy.table('t0', rank=1)"),
        ("another_table", "on_validation_batch_end", "calls strategy.table('t1', rank=None)"),
    ],
)
def test_a_rank_that_reads_something_else_is_an_error(two_ranks: Ranks, way: str, hook: str, said: str) -> None:
    with pytest.raises(RankError, match=re.escape(said)):
        two_ranks.run(table_reads.read_differently, way, hook, timeout_s=30)


def test_a_rank_that_begins_another_fit_is_an_error(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"rank 0 calls strategy\.table.*, rank 1 goes on without it"):
        two_ranks.run(table_reads.read_after_a_fit, timeout_s=30)


def test_training_between_two_chunks_is_an_error(ranks: Ranks) -> None:
    for said in ranks.run(table_reads.chunks_of_several_steps):
        assert "training has gone on" in said


def test_wrong_arguments_are_named(ranks: Ranks) -> None:
    for said in ranks.run(table_reads.errors_of_names):
        assert said.keys() == {
            *("before", "setup", "typo", "twice", "no name", "no rank", "rank of another type", "no rows")
        }
        assert "no sharded tables" in said["before"]
        assert "no sharded tables" in said["setup"]
        assert "Did you mean 'ebc.t0'" in said["typo"]
        assert "one of 'ebc.t0', 'other.t0'" in said["twice"]
        assert "TypeError" in said["rank of another type"]


@pytest.mark.parametrize(
    ("kind", "name"),
    [
        ("feature_processors_beside_tables", "ebc.t1"),
        ("tower", "tower.embedding.t0"),
        ("mixed_bags_and_sequences", "ec.t0"),
    ],
)
def test_other_kinds_of_modules(two_ranks: Ranks, kind: str, name: str) -> None:
    assert two_ranks.run(table_reads.read_kind, kind, name) == [True, True]


def test_rows_that_are_assigned_to_ids_are_read_with_their_ids(get_ranks: Callable[..., Ranks]) -> None:
    """After each step every known id has its row, in any mode; reads change nothing."""

    @few(max_examples=3)
    @given(setting=drawn_settings(), size=st.integers(1, 2), mode=st.sampled_from(sorted(MODES)))
    @example(setting=Setting(interval=1), size=2, mode="semi_sync_deferred")
    def holds(setting: Setting, size: int, mode: str) -> None:
        fits = get_ranks(size).run(table_reads.read_ids_of_a_fit, setting, mode)
        plain = get_ranks(size).run(table_reads.read_ids_of_a_fit, setting, mode, reads=False)
        for wrong, num_ids, _ in fits:
            assert wrong == []
            assert num_ids > 50
        assert [losses for *_, losses in fits] == [losses for *_, losses in plain]

    holds()


def test_ids_that_nobody_knows_are_an_error(two_ranks: Ranks) -> None:
    for plain, hashed in two_ranks.run(table_reads.errors_of_raw_ids):
        assert plain == "'t2' has no managed collision module: the ids are the numbers of its rows."
        assert hashed == "'t0': only the ids of MCHManagedCollisionModule can be read."
