"""Evaluation under the strategy, beside a hand-written one. Functions that ranks run."""

import itertools
import os
import signal
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from lightning.pytorch.strategies import DDPStrategy
from lightning.pytorch.utilities.exceptions import SIGTERMException
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_overlap.sparse import answers

from ..laws.uneven import Counts, _Stream
from ..profiling.virtual import ClockedModel, VirtualClock, virtual_latency
from ..support import reference
from ..support.cases import TABLE_WISE, Batch, Batches, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer

NUM_STEPS, NUM_VAL, EVERY = 9, 4, 3
FIRST_VAL = 500
Outputs = list[tuple[int, int, int, float]]
"""(batch_idx, dataloader_idx, which batch it was, its loss) of every step of an evaluation."""


class Data(Batches):
    """Training batches, and others to evaluate on: one loader, or two of different lengths."""

    def __init__(self, case: Case, lengths: tuple[int, ...] = (NUM_VAL,), sized: bool = True) -> None:
        super().__init__(case, NUM_STEPS)
        self.lengths, self.sized = lengths, sized

    def _loaders(self) -> Any:
        loaders = []
        for first, length in zip(itertools.count(FIRST_VAL, 100), self.lengths, strict=False):
            batches = [make_batch(self.case, first + index, self.trainer.global_rank) for index in range(length)]
            loaders.append(DataLoader(batches if self.sized else _Unsized(batches), batch_size=None))
        return loaders if len(loaders) > 1 else loaders[0]

    val_dataloader = test_dataloader = predict_dataloader = _loaders


class _Unsized(torch.utils.data.IterableDataset):
    def __init__(self, batches: list[Batch]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Batch]:
        return iter(self.batches)


class Evaluated(Model):
    def __init__(self, case: Case, **kwargs: Any) -> None:
        super().__init__(case, **kwargs)
        self.outputs: Outputs = []

    def _write(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        loss = self(batch)
        assert not loss.requires_grad
        self.outputs.append((batch_idx, dataloader_idx, batch.inputs["sparse"][1], loss.item()))
        return loss

    test_step = predict_step = _write

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.log("val_loss", self._write(batch, batch_idx, dataloader_idx), batch_size=1, sync_dist=True)


@contextmanager
def early_embeddings() -> Iterator[list[str]]:
    """Note the step whenever embeddings of an early lookup are used."""
    used: list[str] = []
    original = answers.Answers._receive_embeddings

    def receive(self: Any, *args: Any) -> Any:
        used.append(self._options.step)
        return original(self, *args)

    with mock.patch.object(answers.Answers, "_receive_embeddings", receive):
        yield used


def validate_while_training(case: Case, pipeline: str) -> tuple[Outputs, Tensor, int]:
    """Train with validations in the middle; return what these answered, the losses, how many used early embeddings."""
    model = Evaluated(case)
    trainer = make_trainer(make_strategy(model, pipeline), val_check_interval=EVERY, num_sanity_val_steps=2)
    with early_embeddings() as used:
        trainer.fit(model, datamodule=Data(case))
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


def evaluate_alone(pipeline: str | None, entry: str, lengths: tuple[int, ...], sized: bool, **kwargs: Any) -> Any:
    """Validate, test or predict an untrained module (None: unsharded under DDPStrategy); return all that shows."""
    model = Evaluated(TABLE_WISE, fused_optimizer=pipeline is not None)
    trainer = make_trainer(DDPStrategy() if pipeline is None else make_strategy(model, pipeline), **kwargs)
    with early_embeddings() as used:
        results = getattr(trainer, entry)(model, datamodule=Data(TABLE_WISE, lengths, sized), **_quietly(entry))
    return model.outputs, results, len(used)


def _quietly(entry: str) -> dict[str, Any]:
    return {} if entry == "predict" else {"verbose": False}


def all_entries(pipeline: str) -> tuple[Outputs, Outputs]:
    """Fit, validate, test, predict, fit again, validate with one trainer; (first validation, last one)."""
    model = Evaluated(TABLE_WISE)
    data = Data(TABLE_WISE)
    trainer = make_trainer(make_strategy(model, pipeline), limit_train_batches=4)
    found = []
    for epochs in (1, 2):
        trainer.fit_loop.max_epochs = epochs
        trainer.fit(model, datamodule=data)
        answers = []
        for entry in ("validate", "test", "predict"):
            model.outputs = []
            getattr(trainer, entry)(model, datamodule=data, **_quietly(entry))
            answers.append(model.outputs)
        assert answers[0] == answers[1] == answers[2]
        found.append(answers[0])
    return found[0], found[1]


class _NeedsLoaderIndex(Model):
    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        raise AssertionError("Lightning refuses before")


def two_loaders_without_index(pipeline: str) -> str:
    model = _NeedsLoaderIndex(TABLE_WISE)
    with pytest.raises(RuntimeError) as caught:
        make_trainer(make_strategy(model, pipeline)).validate(model, datamodule=Data(TABLE_WISE, (2, 2)))
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
    model = _ClockedEvaluation(TABLE_WISE)
    model.clock = VirtualClock()
    with virtual_latency(model.clock):
        make_trainer(make_strategy(model, pipeline)).validate(model, datamodule=Data(TABLE_WISE, (num,)), verbose=False)
    return [late - early for early, late in itertools.pairwise(model.clock.steps_ms)]


class _UnevenValidation(Batches):
    def __init__(self, lengths: tuple[int, ...], sized: bool) -> None:
        super().__init__(TABLE_WISE)
        self.lengths, self.sized = lengths, sized

    def val_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        stream = _Stream(self.lengths[rank], rank)
        return DataLoader(list(stream) if self.sized else stream, batch_size=None)


def validate_uneven(pipeline: str, lengths: tuple[int, ...], sized: bool) -> tuple[int, list[str]]:
    """Validate ranks with unequal data; return how many batches this one took, and what was said."""
    model = Evaluated(TABLE_WISE)
    trainer = make_trainer(make_strategy(model, pipeline))
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.validate(model, datamodule=_UnevenValidation(lengths, sized), verbose=False)
    return len(model.outputs), [str(w.message) for w in caught if "another rank" in str(w.message)]


class _TerminatedInValidation(Counts):
    def __init__(self, rank: int) -> None:
        super().__init__()
        self.rank = rank
        self.num_validated = 0

    def validation_step(self, batch: Batch, batch_idx: int) -> None:
        if batch_idx == 3 and self.global_rank == self.rank:
            os.kill(os.getpid(), signal.SIGTERM)
        self(batch)
        self.num_validated += 1


def terminate(entry: str, pipeline: str, rank: int) -> int:
    """Send one rank SIGTERM in a long validation; return how many batches this one took."""
    model = _TerminatedInValidation(rank)
    trainer = make_trainer(make_strategy(model, pipeline), limit_train_batches=2, num_sanity_val_steps=0)
    with pytest.raises(SIGTERMException):
        getattr(trainer, entry)(model, datamodule=Data(TABLE_WISE, (40,)))
    assert "forward" not in vars(model.ebc)
    return model.num_validated


class _MadeInStep(Evaluated):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        kjt = batch.inputs["sparse"][0]
        return getattr(self, collection)(type(kjt)(keys=kjt.keys(), values=kjt.values() + 0, lengths=kjt.lengths()))


def warned_once(pipeline: str) -> list[str]:
    """Validate three times in a fit with inputs made in the step; return the warnings about it."""
    model = _MadeInStep(TABLE_WISE)
    trainer = make_trainer(make_strategy(model, pipeline), val_check_interval=EVERY)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(model, datamodule=Data(TABLE_WISE))
    return [str(w.message) for w in caught if "not overlapped" in str(w.message)]
