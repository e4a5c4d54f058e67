"""Features are found by their names in every batch, wherever they stand in it and beside others (law 10)."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec import KeyedJaggedTensor

from ..support.fits import make_trainer
from ..support.ranks import Ranks
from .supported_modules import Batch, Batches, KindModel, fit_module, make_batch, make_plan, train, watched_strategy


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
    def _loader(self, indices: range) -> DataLoader[Any]:
        batches = [make_batch(self.case, index, self.trainer.global_rank) for index in indices]
        moved = [Batch(one.dense, elsewhere(one.kjt, index), one.labels) for index, one in enumerate(batches)]
        return DataLoader(moved, batch_size=None)  # type: ignore[arg-type]


def fit(name: str) -> Any:
    module = KindModel(name)
    return fit_module(module, _Elsewhere(module.case), make_plan(module), "fused_sparse_dist")


def validate_between() -> tuple[list[Tensor], list[Tensor]]:
    """Return what validations in the middle of a fit answer, of inputs in the order of training and elsewhere."""
    answers = []
    for data in (Batches, _Elsewhere):
        module = KindModel("mixed_bags_and_sequences")
        strategy, _ = watched_strategy("fused_sparse_dist", make_plan(module))
        trainer = make_trainer(strategy, num_sanity_val_steps=0, val_check_interval=4)
        validation = data(module.case)
        validation.trainer = trainer
        batches = [make_batch(module.case, index, trainer.global_rank) for index in range(4)]
        trainer.fit(module, DataLoader(batches, batch_size=None), validation.val_dataloader())
        answers.append(module.validated)
    return answers[0], answers[1]


def lacks_one() -> str:
    """Return the error of a batch that lacks a feature."""
    module = KindModel("mixed_bags_and_sequences")
    batches = [make_batch(module.case, index, 0) for index in range(4)]
    batches[2].kjt = batches[2].kjt.permute([0, 2])
    trainer = make_trainer(watched_strategy("fused_sparse_dist", make_plan(module))[0])
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        trainer.fit(module, DataLoader(batches, batch_size=None))  # type: ignore[arg-type]
    return str(caught.value)


KINDS = ["variable_batch", "feature_processors_row_wise", "managed_bags", "managed_sequences"]


@pytest.mark.parametrize("name", ["mixed_bags_and_sequences", *KINDS])
def test_trained_as_with_every_feature_in_its_place(ranks: Ranks, name: str) -> None:
    for mine, theirs in zip(ranks.run(fit, name), ranks.run_once(train, name, 0), strict=True):
        assert mine.differences(theirs) == []


def test_a_validation_may_have_another_order(ranks: Ranks) -> None:
    for in_order, elsewhere in ranks.run(validate_between):
        assert len(in_order) == 3
        assert torch.equal(torch.stack(in_order), torch.stack(elsewhere))


def test_a_feature_that_is_not_there_is_named(get_ranks: Callable[..., Ranks]) -> None:
    [message] = get_ranks(1).run(lacks_one)
    assert "lacks f1" in message
    assert "lengths of zero" in message
