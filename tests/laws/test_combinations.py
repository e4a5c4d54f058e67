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
