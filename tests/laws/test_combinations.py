"""What each feature hides from the others: nothing. Drawn pairs and triples, and each option with kinds of modules.

`make combinations NUM=200` draws more.
"""

import inspect
from collections.abc import Callable
from dataclasses import fields

import pytest

from lightning_overlap import Mode, OverlapEmbeddingStrategy
from lightning_overlap.tables.supported_modules import SUPPORTED_MODULES

from ..support.ranks import ROOT, Ranks
from . import combined_fits
from .combinations import KINDS, OF_MODE, OPTIONS, Combination, cells, of_seed
from .combined_fits import REFUSALS, REFUSED

NUM = 20
FIRST = 1000


def _check(get_ranks: Callable[..., Ranks], drawn: Combination) -> None:
    for found in get_ranks(drawn.num_ranks).run(combined_fits.differences, drawn):
        assert found == [] or found[0].startswith(REFUSED), drawn


@pytest.mark.timeout(200)
@pytest.mark.parametrize("seed", range(FIRST, FIRST + NUM))
def test_features_hide_nothing_from_each_other(get_ranks: Callable[..., Ranks], seed: int) -> None:
    """Again: make combinations SEED=..."""
    _check(get_ranks, of_seed(seed))


@pytest.mark.timeout(200)
@pytest.mark.parametrize("cell", cells(7), ids=lambda cell: f"{cell.kind}-{'-'.join(map(str, sum(cell.features, ())))}")
def test_each_option_with_a_kind_of_module(get_ranks: Callable[..., Ranks], cell: Combination) -> None:
    """It trains as the reference, or is refused with an error that the docs name."""
    _check(get_ranks, cell)


BUFFERS = "feature_processors_with_buffers"
FOUND = {
    "buffers_of_processors_in_one_file": Combination(0, BUFFERS, (), ("on_train_batch_end", 1, "full")),
    "buffers_of_processors_in_a_folder": Combination(0, BUFFERS, (), ("on_train_epoch_end", 2, "sharded")),
    "buffers_of_processors_on_one_rank": Combination(0, BUFFERS, (), ("on_train_batch_end", 2, "full"), num_ranks=1),
    "frozen_beside_batch_sizes_by_feature": Combination(0, "variable_batch", (("frozen", True),)),
    "optimizers_within_ddp": Combination(0, "fused_bags", (("sharding", "data_parallel"),)),
    "losses_at_averages": Combination(
        0, "several_collections", (("averages", True), ("validation", 3)), ("on_train_batch_end", 4, "sharded")
    ),
    "adagrad_with_batch_sizes_by_feature": Combination(0, "variable_batch", (("fused_optimizer", "Adagrad"),)),
    "averages_of_buffers_of_processors": Combination(0, BUFFERS, (("averages", True),)),
    "copies_with_batch_sizes_by_feature": Combination(0, "variable_batch", (("sharding", "data_parallel"),)),
    "tables_without_a_plan": Combination(
        0, "sequences_dense_kernel", (("fused_optimizer", "RowWiseAdagrad"), ("replicate_tables", False))
    ),
    "copies_of_tables_that_the_dense_optimizer_trains": Combination(
        0, "mixed_bags_and_sequences", (("name", "semi_sync"), ("replicate_tables", ("t0",)))
    ),
    "released_ids_of_managed_collisions": Combination(0, "managed_sequences", (("release_features", True),)),
}
"""What combinations have found, each as simple as it gets."""


@pytest.mark.parametrize("name", FOUND)
def test_what_was_found_before(get_ranks: Callable[..., Ranks], name: str) -> None:
    _check(get_ranks, FOUND[name])


def test_no_option_is_missing() -> None:
    of_strategy = inspect.signature(OverlapEmbeddingStrategy).parameters.values()
    assert {one.name for one in of_strategy if one.kind is not one.VAR_KEYWORD} == OPTIONS.keys()
    assert {option.name for option in fields(Mode)} == OF_MODE.keys()


def test_no_kind_of_module_is_missing(two_ranks: Ranks) -> None:
    [names, _] = two_ranks.run(combined_fits.sharded_kinds)
    assert {kind.__name__ for kind in SUPPORTED_MODULES} - set(names) == set()
    assert len(set(KINDS)) == len(KINDS)


@pytest.mark.parametrize("pattern", REFUSALS)
def test_the_docs_name_each_refusal(pattern: str) -> None:
    page, words = REFUSALS[pattern]
    assert words in " ".join((ROOT / "docs" / page).read_text().split())
