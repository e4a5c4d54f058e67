"""Evaluation is pipelined too, answers from current weights, and training does not notice it."""

import itertools
import os
import signal
import warnings
from collections.abc import Callable
from typing import Any

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_overlap import MODES

from ..profiling.virtual import ClockedModel, VirtualClock, virtual_latency
from ..support import cases, reference
from ..support.cases import TABLE_WISE, Batch, Batches, Case, Model, make_batch
from ..support.fits import fit, make_strategy, make_trainer
from ..support.pairs import rotated
from ..support.ranks import Ranks
from . import test_features
from .test_features import Data, Setting, Unsized, early_embeddings, run

NUM_STEPS, NUM_VAL, EVERY = 9, 4, 3
FIRST_VAL = 500
Outputs = list[tuple[int, int, int, float]]
"""(batch_idx, dataloader_idx, which batch it was, its loss) of every step of an evaluation."""


class WithEvaluation(Batches):
    """Training batches, and others to evaluate on."""

    def __init__(self, case: Case, num: int = NUM_VAL, sized: bool = True) -> None:
        super().__init__(case, NUM_STEPS)
        self.num, self.sized = num, sized

    def _loader(self) -> DataLoader:
        batches = [make_batch(self.case, FIRST_VAL + index, self.trainer.global_rank) for index in range(self.num)]
        return DataLoader(batches if self.sized else Unsized(batches), batch_size=None)

    val_dataloader = test_dataloader = predict_dataloader = _loader


class Evaluated(Model):
    def __init__(self, case: Case, **kwargs: Any) -> None:
        super().__init__(case, **kwargs)
        self.outputs: Outputs = []

    def _write(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self(batch)
        assert not loss.requires_grad
        self.outputs.append((batch_idx, dataloader_idx, batch.inputs["sparse"][1], loss.item()))
        if not self.trainer.predicting:
            self.log("loss", loss, batch_size=1, sync_dist=True)
        return loss

    validation_step = test_step = predict_step = _write


def validate_while_training(case: Case, pipeline: str) -> tuple[Outputs, Tensor, int]:
    """Train with validations in the middle; return what these answered, the losses, how many used early embeddings."""
    model = Evaluated(case)
    trainer = make_trainer(make_strategy(model, pipeline), val_check_interval=EVERY, num_sanity_val_steps=2)
    with early_embeddings() as used:
        trainer.fit(model, datamodule=WithEvaluation(case))
    return model.outputs, torch.stack(model.losses), used.count("validation_step")


def reference_validations(case: Case, staleness: int) -> Outputs:
    """The same by hand, with plain DistributedModelParallel."""
    outputs: Outputs = []

    @torch.no_grad()
    def after_step(index: int, module: Model) -> None:
        for number in range(NUM_VAL) if (index + 1) % EVERY == 0 else ():
            loss = module(make_batch(case, FIRST_VAL + number, dist.get_rank()), None)
            outputs.append((number, 0, FIRST_VAL + number, loss.item()))

    reference.train_delayed(case, reference.Delayed(staleness), num_steps=NUM_STEPS, after_step=after_step)
    return outputs


def two_loaders_without_index(pipeline: str) -> str:
    data = Data("train", "evaluate_several")
    with pytest.raises(RuntimeError) as caught:
        make_trainer(test_features.make_strategy(pipeline)).validate(Model(TABLE_WISE), datamodule=data)
    return str(caught.value)


class _ClockedEvaluation(ClockedModel):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        self.clock.steps_ms.append(self.clock.now_ms)
        self(batch)

    def dense(self, batch: Batch, embeddings: Any) -> Tensor:
        loss = Model.dense(self, batch, embeddings)
        self.clock.advance("forward")
        return loss


def clocked(pipeline: str, num: int = 10) -> list[int]:
    """Return the virtual milliseconds of each step of an evaluation."""
    model, data = _ClockedEvaluation(TABLE_WISE), WithEvaluation(TABLE_WISE, num)
    model.clock = VirtualClock()
    with virtual_latency(model.clock):
        make_trainer(make_strategy(model, pipeline)).validate(model, datamodule=data, verbose=False)
    return [late - early for early, late in itertools.pairwise(model.clock.steps_ms)]


def validate_uneven(pipeline: str, lengths: tuple[int, ...], sized: bool) -> tuple[int, list[str]]:
    """Validate ranks with unequal data; return how many batches this one took, and what was said."""
    model, data = Evaluated(TABLE_WISE), WithEvaluation(TABLE_WISE, lengths[dist.get_rank()], sized)
    with warnings.catch_warnings(record=True, action="always") as caught:
        make_trainer(make_strategy(model, pipeline)).validate(model, datamodule=data, verbose=False)
    return len(model.outputs), [str(w.message) for w in caught if "another rank" in str(w.message)]


def terminate(entry: str, pipeline: str, rank: int) -> int:
    """Send one rank SIGTERM in a long validation; return how many batches this one took."""

    def kill(trainer: Trainer, module: Model, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 3 and trainer.global_rank == rank:
            os.kill(os.getpid(), signal.SIGTERM)

    model, callbacks = Evaluated(TABLE_WISE), [LambdaCallback(on_validation_batch_start=kill)]
    kwargs = {"limit_train_batches": 2, "num_sanity_val_steps": 0, "callbacks": callbacks}
    trainer = make_trainer(make_strategy(model, pipeline), **kwargs)
    with pytest.raises(SIGTERMException):
        getattr(trainer, entry)(model, datamodule=WithEvaluation(TABLE_WISE, 40))
    assert "forward" not in vars(model.ebc)
    return len(model.outputs)


EARLY = [name for name, mode in MODES.items() if mode.has_sparse_stages and not mode.staleness]
SEVERAL = (TABLE_WISE, cases.MIXED, cases.SEQUENCE, cases.TWO_COLLECTIONS, cases.ROWWISE_ADAGRAD)
CASES = {case.name: case for case in SEVERAL}


@pytest.mark.smoke
@pytest.mark.parametrize(("name", "pipeline", "num_ranks"), rotated(CASES))
def test_validation_inside_a_fit_answers_from_current_weights(
    get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_ranks: int
) -> None:
    """As a plain DistributedModelParallel module that is evaluated after the same steps; training goes on unmoved."""
    case, mode, ranks = CASES[name], MODES[pipeline], get_ranks(num_ranks)
    expected = ranks.run_once(reference_validations, case, mode.staleness)
    trained = ranks.run(fit, case, pipeline, num_steps=NUM_STEPS)
    actual = ranks.run(validate_while_training, case, pipeline)
    for (outputs, losses, early), theirs, alone in zip(actual, expected, trained, strict=True):
        assert outputs[2:] == theirs  # the first two are the sanity check's
        assert torch.equal(losses, alone.losses)
        # all but the very first one, which shows what feeds which module
        num_modules = len(case.collections)
        assert early == ((2 + NUM_VAL * (NUM_STEPS // EVERY) - 1) * num_modules if mode.has_sparse_stages else 0)


@pytest.mark.parametrize("entry", ["validate", "test", "predict"])
def test_entries_answer_as_the_unsharded_module(ranks: Ranks, entry: str) -> None:
    for loaders, num_early in {"evaluate": 2, "evaluate_several": 4, "evaluate_unsized": 6}.items():
        setting = Setting(evaluate=loaders, calls=(entry,))
        expected = ranks.run(run, None, setting)
        for pipeline in ("base", "sparse_dist", "fused_sparse_dist"):
            for mine, theirs in zip(ranks.run(run, pipeline, setting), expected, strict=True):
                assert mine.trace == theirs.trace
                assert mine.losses == pytest.approx(theirs.losses, abs=1e-6)  # nn.EmbeddingBag adds in another order
                assert mine.num_early == (0 if pipeline == "base" else num_early)


def test_one_trainer_through_all_entries(ranks: Ranks) -> None:
    evaluate = ("validate", "test", "predict")
    setting = Setting({"max_epochs": 1}, calls=("fit", *evaluate, "fit more", *evaluate))
    expected = ranks.run(run, "base", setting)
    for pipeline in EARLY:
        for mine, theirs in zip(ranks.run(run, pipeline, setting), expected, strict=True):
            assert (mine.trace, mine.losses) == (theirs.trace, theirs.losses), pipeline


def test_a_step_without_dataloader_idx_is_refused_as_ever(two_ranks: Ranks) -> None:
    for message in two_ranks.run(two_loaders_without_index, "fused_sparse_dist"):
        assert "dataloader_idx" in message


@pytest.mark.parametrize(
    ("pipeline", "step_ms"), [("base", 170), ("sparse_dist", 90), ("fused_sparse_dist", 50), ("semi_sync", 50)]
)
def test_what_an_evaluation_hides(two_ranks: Ranks, pipeline: str, step_ms: int) -> None:
    """Three all-to-alls of 40 ms around a forward of 50 ms, under a virtual clock; two of the three are of ids."""
    for steps_ms in two_ranks.run(clocked, pipeline):
        assert set(steps_ms[4:]) == {step_ms}


@pytest.mark.parametrize("sized", [True, False], ids=["sized", "unsized"])
@pytest.mark.parametrize("lengths", [(7, 4), (3, 6)])
def test_ranks_with_unequal_data_evaluate_all(two_ranks: Ranks, lengths: tuple[int, int], sized: bool) -> None:
    for pipeline in ("base", "fused_sparse_dist"):
        results = two_ranks.run(validate_uneven, pipeline, lengths, sized)
        assert [num for num, _ in results] == [*lengths]
        assert [said for _, said in results] == [[], []]


@pytest.mark.parametrize(("entry", "rank"), [("validate", 0), ("fit", 1)])
def test_sigterm_on_one_rank_ends_an_evaluation_on_all(two_ranks: Ranks, entry: str, rank: int) -> None:
    first, second = two_ranks.run(terminate, entry, "fused_sparse_dist", rank)
    assert first == second
    assert 4 <= first < 12
