"""`release_features` gives ids back once they are sent; nothing else changes, and who reads them is told."""

from typing import Any

import pytest

from lightning_overlap import Schedule

from ..support.cases import COLUMN_WISE, MIXED, NUM_STEPS, SEQUENCE, TABLE_WISE, TWO_COLLECTIONS, WEIGHTED, Case, Model
from ..support.ranks import Ranks
from ..support.reference import differences, on_ranks
from . import freed_features
from .variants import MadeInStep


def test_every_mode_trains_the_same(mode: Schedule, ranks: Ranks) -> None:
    actual = ranks.run(freed_features.fit, MIXED, mode.name)
    assert differences(actual, on_ranks(ranks, MIXED, mode.staleness)) == [[]] * ranks.world_size


@pytest.mark.parametrize(
    "case", [TABLE_WISE, COLUMN_WISE, TWO_COLLECTIONS, SEQUENCE, WEIGHTED], ids=lambda case: case.name
)
def test_every_kind_of_table_trains_the_same(case: Case, ranks: Ranks) -> None:
    actual = ranks.run(freed_features.fit, case, "fused_sparse_dist")
    assert differences(actual, on_ranks(ranks, case)) == [[]] * ranks.world_size


@pytest.mark.parametrize(("pipeline", "held", "released"), [("fused_sparse_dist", 3, 2), ("async_lookup", 4, 1)])
def test_ids_are_in_memory_until_they_are_sent(two_ranks: Ranks, pipeline: str, held: int, released: int) -> None:
    """As a step begins: without it the ids of every batch in flight, with it of those that are not sent yet."""
    for releases, num in ((False, held), (True, released)):
        for by_step in two_ranks.run(freed_features.alive, TABLE_WISE, pipeline, releases):
            assert set(by_step[4 : NUM_STEPS - held]) == {num}


def test_who_reads_ids_is_told(ranks: Ranks) -> None:
    for text in ranks.run(freed_features.refused, TABLE_WISE):
        assert "release_features=True has given their memory back" in text
        assert "train with release_features=False" in text


def test_nothing_is_released_that_a_step_makes_its_input_of(ranks: Ranks) -> None:
    said = ranks.run(freed_features.warned, TABLE_WISE, MadeInStep, freed_features.Fresh)
    assert ["makes the input of 'ebc' itself" in text for text in said[0][0]] == [True]
    assert all(num_steps == 6 for _, num_steps in said)


def test_the_data_loaders_own_objects_keep_their_values(get_ranks: Any) -> None:
    args = (TABLE_WISE, Model, freed_features.AsItIs)
    [(said, num_steps)] = get_ranks(1).run(freed_features.warned, *args, num_epochs=2)
    assert ["no copy of them is made" in text for text in said] == [True]
    assert num_steps == 12
