"""Evaluations on ranks with unequal data. Functions that ranks run."""

from __future__ import annotations

import warnings
from dataclasses import dataclass
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule
from torch import Tensor, nn
from torch.utils.data import DataLoader, IterableDataset
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig, KeyedJaggedTensor

from lightning_overlap import Balance, OverlapEmbeddingStrategy

from ..support.fits import make_trainer
from ..tables.supported_modules import KindModel, case_of, dense_kernels_without_pooling, make_batch, make_plan

FIRST = 500  # number of the first batch to evaluate


@dataclass(frozen=True)
class Drawn:
    kind: str
    pipeline: str
    entry: str  # validate, test, predict, or fit: with a validation in the middle
    lengths: tuple[int, ...]  # batches of each rank
    sized: bool
    balanced: bool = False


class _Stream(IterableDataset):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Any:
        return iter(self.batches)


class Data(LightningDataModule):
    def __init__(self, drawn: Drawn, num: int) -> None:
        super().__init__()
        self.drawn, self.num = drawn, num
        # Else Lightning itself refuses an empty loader that has a length, on its rank.
        self.allow_zero_length_dataloader_with_multiple_devices = True

    def train_dataloader(self) -> Any:
        return DataLoader(
            [make_batch(case_of(self.drawn.kind), index, dist.get_rank()) for index in range(4)],  # type: ignore[arg-type]
            batch_size=None,
        )

    def _loader(self) -> Any:
        case = case_of(self.drawn.kind)
        batches = [make_batch(case, FIRST + index, dist.get_rank()) for index in range(self.num)]
        # The loader draws a seed: not from the generator of all others.
        generator = torch.Generator()
        return DataLoader(batches if self.drawn.sized else _Stream(batches), batch_size=None, generator=generator)  # type: ignore[arg-type]

    val_dataloader = test_dataloader = predict_dataloader = _loader


class Net(KindModel):
    def validation_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.validated.append(self(batch).detach().clone())
        self.is_last.append(self.trainer.evaluating and bool(self._loop().batch_progress.is_last_batch))
        return self.validated[-1]

    test_step = predict_step = validation_step

    def _loop(self) -> Any:
        trainer = self.trainer
        return trainer.validate_loop if trainer.validating else trainer.test_loop

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        return super().training_step(batch, batch_idx)


def _number_of_ids(batch: Any) -> Tensor:
    lengths: Tensor = batch.kjt.lengths().view(len(batch.kjt.keys()), -1).sum(0)
    return lengths


@dense_kernels_without_pooling()
def _answers(drawn: Drawn, num: int) -> tuple[list[float], list[float], list[bool], int, list[str]]:
    """Return the answers, the training losses, what Lightning held for the last batch, predictions, and warnings."""
    module = Net(drawn.kind)
    module.is_last = []
    balance = Balance(_number_of_ids, evaluation=True) if drawn.balanced else None
    strategy = OverlapEmbeddingStrategy(drawn.pipeline, sharding=make_plan(module), balance=balance)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer = make_trainer(strategy, val_check_interval=2, num_sanity_val_steps=0)
        torch.manual_seed(3)
        found = getattr(trainer, drawn.entry)(module, datamodule=Data(drawn, num))
    texts = [str(one.message) for one in caught]
    num_predicted = len(found) if drawn.entry == "predict" else 0
    return (
        [float(one) for one in module.validated],
        [float(one) for one in module.losses],
        module.is_last,
        num_predicted,
        [text for text in texts if "another rank" in text],
    )


def differences(drawn: Drawn) -> list[str]:
    """Return where an evaluation of unequal data differs from one in which all ranks have the most batches."""
    own = drawn.lengths[dist.get_rank()]
    answers, losses, is_last, num_predicted, said = _answers(drawn, own)
    expected, expected_losses, *_ = _answers(drawn, max(drawn.lengths))
    times = 2 if drawn.entry == "fit" else 1  # validations
    wrong = [f"said {text}" for text in said]
    if drawn.entry == "fit":
        expected = [one for time in range(times) for one in expected[time * max(drawn.lengths) :][:own]]
    else:
        expected = expected[:own]
    if len(answers) != own * times:
        wrong.append(f"{len(answers)} batches were evaluated of {own * times}")
    if drawn.balanced:  # the samples of a batch are exchanged only where all ranks have it
        shared = min(drawn.lengths)
        answers, expected = answers[:shared], expected[:shared]
    wrong += [] if answers == expected else [f"answers {answers} in the place of {expected}"]
    wrong += [] if losses == expected_losses else ["training losses"]
    if drawn.entry in ("validate", "test") and is_last != [False] * (own - 1) + [True]:
        wrong.append(f"the last batch is not the last: {is_last}")
    if drawn.entry == "predict" and num_predicted != own:
        wrong.append(f"{num_predicted} predictions of {own}")
    return wrong


class Samples(LightningModule):
    """Predicts from the id of each sample, as many as a data set has."""

    def __init__(self) -> None:
        super().__init__()
        configs = [EmbeddingBagConfig(name="t", num_embeddings=40, embedding_dim=4, feature_names=["f"])]
        self.ebc, self.top = EmbeddingBagCollection(tables=configs), nn.Linear(4, 1)
        with torch.no_grad():
            self.ebc.embedding_bags["t"].weight.copy_(torch.arange(160.0).view(40, 4))

    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        return self.ebc(batch["kjt"]).values()[:, 0] / 4  # type: ignore[no-any-return]


def _collate(ids: list[int]) -> dict[str, Any]:
    return {"kjt": KeyedJaggedTensor(["f"], torch.tensor(ids), lengths=torch.ones(len(ids), dtype=torch.int64))}


def predict_samples(num: int, batch_size: int, sharding: str, plain: bool) -> list[float]:
    """Return the ids that this rank has predicted, with Lightning's own sampler, or under plain DDP."""
    module = Samples()
    strategy: Any = "ddp" if plain else OverlapEmbeddingStrategy(sharding=sharding, replicate_tables=False)
    if not plain:
        strategy.fused_optimizer = (torch.optim.SGD, {"lr": 0.1})
    trainer = make_trainer(strategy, use_distributed_sampler=True)
    found: Any = trainer.predict(module, DataLoader(range(num), batch_size=batch_size, collate_fn=_collate))  # type: ignore[arg-type]
    return [float(one) for batch in found for one in batch]


def without_a_batch(pipeline: str, sized: bool) -> str:
    """Return the error of an evaluation in which rank 1 has no batch."""
    drawn = Drawn("bags", pipeline, "predict", (3, 0), sized)
    try:
        _answers(drawn, drawn.lengths[dist.get_rank()])
    except Exception as err:
        return str(err)
    return ""
