"""Features are found by their names in every batch, wherever they stand in it and beside others (law 10)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from ..support.ranks import RankError, Ranks
from .supported_modules import Batches, KindModel, fit_module, train


def elsewhere(kjt: KeyedJaggedTensor, index: int) -> KeyedJaggedTensor:
    """Return the same features in another place, from the second batch on; in every third one, beside another one."""
    keys = list(kjt.keys())
    places = list(range(len(keys)))[:: -1 if index % 2 else 1]
    moved = kjt.permute([*places, 0] if index % 3 == 2 else places)
    if index % 3 == 2:
        moved._keys[-1] = "of_no_table"
    inverse = kjt.inverse_indices_or_none()
    if inverse is not None:
        moved._inverse_indices = ([keys[place] for place in places], inverse[1][places])
    return moved


class _Elsewhere(Batches):
    def loader_of(self, indices: range) -> DataLoader[Any]:
        loader = super().loader_of(indices)
        for index, batch in enumerate(loader.dataset):
            batch.kjt = elsewhere(batch.kjt, index)
        return loader


class _ValidatesElsewhere(_Elsewhere):
    def train_dataloader(self) -> DataLoader[Any]:
        return Batches.loader_of(self, range(self.num_batches))


class _LacksOne(Batches):
    def loader_of(self, indices: range) -> DataLoader[Any]:
        loader = super().loader_of(indices)
        loader.dataset[2].kjt = loader.dataset[2].kjt.permute([0, 2])
        return loader


def fit(name: str, data: type[Batches], **kwargs: Any) -> tuple[Any, list[Tensor]]:
    """Return what a fit leaves behind, and what its validations answered."""
    module = KindModel(name)
    return fit_module(module, data(module.case), "fused_sparse_dist", **kwargs), module.validated


@pytest.mark.parametrize(
    "name",
    ["mixed_bags_and_sequences", "variable_batch", "feature_processors_row_wise", "managed_bags", "managed_sequences"],
)
def test_trained_as_with_every_feature_in_its_place(ranks: Ranks, name: str) -> None:
    expected = ranks.run_once(train, name, 0)
    for (mine, _), theirs in zip(ranks.run(fit, name, _Elsewhere), expected, strict=True):
        assert mine.differences(theirs) == []


def test_a_validation_may_have_another_order(ranks: Ranks) -> None:
    options = {"limit_val_batches": 3, "val_check_interval": 4, "num_sanity_val_steps": 0}
    in_order, elsewhere = (
        ranks.run(fit, "mixed_bags_and_sequences", data, **options) for data in (Batches, _ValidatesElsewhere)
    )
    for (_, mine), (_, theirs) in zip(in_order, elsewhere, strict=True):
        assert len(mine) == 6
        assert torch.equal(torch.stack(mine), torch.stack(theirs))


def test_a_feature_that_is_not_there_is_named(get_ranks: Callable[..., Ranks]) -> None:
    with pytest.raises(RankError, match=r"ValueError: .*lacks f1.*lengths of zero"):
        get_ranks(1).run(fit, "mixed_bags_and_sequences", _LacksOne)
