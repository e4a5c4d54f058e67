"""The weight of a table of which a rank has a part: read by nobody as the whole table, written element by element."""

from collections.abc import Callable

import pytest

from ..plugin.table_reads import PLACES, Fit, Table
from ..support.ranks import Ranks
from . import part_reads

POOLED = tuple(Table(sharding) for sharding in PLACES if sharding != "data_parallel")
OF_SEQUENCES = tuple(map(Table, ("table_wise", "row_wise", "column_wise")))
IN_PAIRS = 2 * (*OF_SEQUENCES, Table("row_wise", num_rows=12))  # each is sharded as the fourth one after it
FITS = [
    Fit(POOLED, num_steps=3),
    Fit(OF_SEQUENCES, "semi_sync", sequence=True, num_steps=3),
    Fit((*map(Table, ("row_wise", "data_parallel")),), "split_backward", num_steps=3),
]


@pytest.mark.parametrize("fit", FITS, ids=lambda fit: fit.pipeline)
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_a_part_is_never_read_as_the_whole(get_ranks: Callable[..., Ranks], fit: Fit, num_ranks: int) -> None:
    for wrong, seen in get_ranks(num_ranks).run(part_reads.wrong_reads, fit, num_ranks):
        assert wrong == []
        assert seen == {*part_reads.HOOKS, *part_reads.STEPS}


def test_nothing_reads_what_shares_or_copies_a_part(two_ranks: Ranks) -> None:
    fit = Fit((Table("row_wise"), Table("column_wise"), Table("table_wise")), num_steps=2)
    assert two_ranks.run(part_reads.reads_past_operators, fit) == [[], []]


def test_the_memory_of_a_sharded_table_is_not_exchanged(ranks: Ranks) -> None:
    """Kernels would go on with their own."""
    fit = Fit((Table("row_wise"), Table("table_wise"), Table("replicated")), num_steps=2)
    for errors in ranks.run(part_reads.exchanged_memory, fit):
        assert len(errors) == 3
        assert all("its kernel goes on with its own memory" in error for error in errors)


def test_on_three_ranks(get_ranks: Callable[..., Ranks]) -> None:
    fit = Fit((Table("row_wise"), Table("table_wise"), Table("grid_shard")), "base", num_steps=3)
    for wrong, _ in get_ranks(3).run(part_reads.wrong_reads, fit, 3):
        assert wrong == []


@pytest.mark.parametrize("sequence", [False, True])
def test_writes_that_fit_all_parts_are_made_and_noticed(ranks: Ranks, sequence: bool) -> None:
    for wrong in ranks.run(part_reads.wrong_writes, Fit(IN_PAIRS, sequence=sequence, num_steps=2)):
        assert wrong == []


def test_optimizers_work_on_parts(two_ranks: Ranks) -> None:
    for wrong in two_ranks.run(part_reads.wrong_of_optimizers, Fit(OF_SEQUENCES, num_steps=2)):
        assert wrong == []


def test_operands_that_do_not_fit_are_named_on_all_ranks(two_ranks: Ranks) -> None:
    for errors in two_ranks.run(part_reads.errors_of_operands):
        assert "ebc.embedding_bags.t0.weight: copy_ got a tensor of shape (7, 8)" in errors["whole"]
        assert "ebc.embedding_bags.t1.weight: mul_ got a tensor of shape (8,)" in errors["columns"]
        assert "add_ got a part of ebc.embedding_bags.t1.weight" in errors["another"]
        assert "copy_ got a part of ebc.embedding_bags.t3.weight" in errors["longer"]
        assert "copy_ would take a part of the table for the whole" in errors["plain"]


def test_what_reads_no_element_goes_on(two_ranks: Ranks) -> None:
    fit = Fit((Table("row_wise"), Table("column_wise"), Table("table_wise")), num_steps=2)
    first, second = two_ranks.run(part_reads.what_goes_on, fit)
    for found in (first, second):
        assert found["loaded"]
        assert "ebc.embedding_bags.t0.weight: compiled code would" in found["compiled"][0]
        assert all(text in found["print"] for text in found["text"])
    assert "rank has rows 0 to 3 of 7; shape=(4, 8)" in first["text"][0]
    assert "rank has columns" in first["text"][1]
    assert {"nothing of it" in found["text"][2] for found in (first, second)} == {True, False}


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "semi_sync_deferred"])
def test_steps_ask_the_weights_nothing(two_ranks: Ranks, pipeline: str) -> None:
    assert two_ranks.run(part_reads.calls_in_steps, Fit(POOLED, pipeline)) == [0, 0]
