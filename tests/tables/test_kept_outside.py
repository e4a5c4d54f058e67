"""A weight, or a collection, that a module keeps outside of its parameters and submodules is refused by name."""

from functools import partial
from typing import Any

import pytest
import torch
from torch import nn

from lightning_overlap.tables import find_tables
from lightning_overlap.tables.kept_outside import refuse_kept_outside

from ..support.cases import SEQUENCE, TABLE_WISE, Model
from ..support.ranks import Ranks
from . import kept_outside


def _weight(model: Model) -> torch.Tensor:
    return next(model.ebc.parameters())


def _closure(model: Model) -> Any:
    weight = _weight(model)
    return lambda query: query @ weight.T


KEPT = {
    "list": lambda model: [_weight(model)],
    "nested": lambda model: {"tied": ("name", [_weight(model)])},
    "module": lambda model: [next(one for one in model.ebc.modules() if not [*one.children()])],
    "collection": lambda model: (model.ebc,),
    "closure": _closure,
    "partial": lambda model: partial(torch.matmul, other=_weight(model)),
    "method": lambda model: model.ebc.forward,
}
FINE = {
    "copy": lambda model: [_weight(model).detach().clone()],
    "own method": lambda model: model.forward,
    "dense": lambda model: [model.top[0].weight, model.top],
    "vocabulary": lambda model: dict.fromkeys(range(100_000)),
}


@pytest.mark.parametrize("case", [TABLE_WISE, SEQUENCE], ids=lambda case: case.name)
@pytest.mark.parametrize("kept", KEPT)
def test_what_would_stay_unsharded_is_named(case: Any, kept: str) -> None:
    model = Model(case)
    model.kept = KEPT[kept](model)
    with pytest.raises(ValueError, match=r"^kept has .*ebc.*trainer\.strategy\.table"):
        refuse_kept_outside(model, find_tables(model))
    inner = nn.Module()
    inner.kept, model.kept, model.inner = model.kept, None, inner
    with pytest.raises(ValueError, match=r"^inner\.kept has "):
        refuse_kept_outside(model, find_tables(model))


@pytest.mark.parametrize("kept", FINE)
def test_copies_and_what_has_no_table_are_fine(kept: str) -> None:
    model = Model(TABLE_WISE)
    model.kept = FINE[kept](model)
    refuse_kept_outside(model, find_tables(model))


def test_a_fit_refuses_them(two_ranks: Ranks) -> None:
    for error in two_ranks.run(kept_outside.error_of_fit):
        assert error.startswith("ValueError: tied has the weight of ebc.t0, outside of parameters and submodules.")
