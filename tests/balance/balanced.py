"""Fits with balanced batches, and fits that are given the same batches. Functions that ranks run."""

import logging
import os
import random
import signal
import threading
import time
import warnings
from collections.abc import Callable, Iterator
from contextlib import suppress
from functools import partial
from pathlib import Path
from typing import Any

import numpy as np
import torch
import torch.distributed as dist
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchrec import KeyedJaggedTensor

from lightning_overlap import Balance, EmbeddingDeltas, OverlapEmbeddingStrategy
from lightning_overlap.balance import Balanced, Balancer, assign

from ..checkpoint.resumes import StatefulSized
from ..support.cases import NUM_STEPS, TABLE_WISE, Batch, Batches, ByHand, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
from .fields import FIELDS, by_sample

LOG = "lightning.pytorch.lightning_overlap"


def num_ids(batch: Batch) -> Tensor:
    """Return the square of each sample's number of ids."""
    kjt = batch.inputs["sparse"][0]
    return kjt.lengths().view(len(kjt.keys()), -1).sum(0).double() ** 2


def poisoned(case: Case, index: int, rank: int) -> Batch:
    """Return a batch; some of rank 1 have a sample whose loss is not a number, a heavy one."""
    batch = make_batch(case, index, rank)
    if index in (2, 3, 6) and rank == 1:
        batch.labels[num_ids(batch).argmax()] = torch.nan
    return batch


def assigned(case: Case, index: int, rank: int, make: Callable[..., Batch] = make_batch) -> Batch:
    """Return the batch that a rank trains by the same assignment, put together sample by sample."""
    of_ranks = [make(case, index, other) for other in range(dist.get_world_size())]
    owners = assign(np.stack([num_ids(batch).numpy() for batch in of_ranks]))
    assert (owners != np.arange(len(owners))[:, None]).any(), "no sample of this batch goes to another rank"
    chosen = [(of_ranks[source], place) for source, place in np.argwhere(owners == rank).tolist()]
    keys = of_ranks[0].inputs["sparse"][0].keys()
    values, weights, lengths = [], [], []
    for key in keys:
        for batch, place in chosen:
            one = batch.inputs["sparse"][0][key]
            begin, end = one.offsets()[place : place + 2].tolist()
            values.append(one.values()[begin:end])
            weights.append(one.weights()[begin:end] if case.weighted else torch.empty(0))
            lengths.append(end - begin)
    kjt = KeyedJaggedTensor(
        keys, torch.cat(values), torch.cat(weights) if case.weighted else None, lengths=torch.tensor(lengths)
    )
    dense = torch.stack([batch.dense[place] for batch, place in chosen])
    labels = torch.stack([batch.labels[place] for batch, place in chosen])
    return Batch(dense, {"sparse": (kjt, index)}, labels)


class _Stream(IterableDataset):
    def __init__(self, batches: list[Any]) -> None:
        self.batches = batches

    def __iter__(self) -> Iterator[Any]:
        yield from self.batches


class Data(Batches):
    """So many batches of each rank, with a length or without, or from a loader with a state; these of them None."""

    def __init__(
        self,
        case: Case,
        make: Callable[..., Batch],
        lengths: tuple[int, ...],
        *,
        sized: bool = True,
        stateful: bool = False,
        nones: tuple[int, ...] = (),
    ) -> None:
        super().__init__(case)
        self.make, self.lengths, self.nones = make, lengths, nones  # type: ignore[method-assign]
        self.sized, self.stateful = sized, stateful

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        length = self.lengths[rank % len(self.lengths)]
        if self.stateful:
            return StatefulSized(self.case, length, rank)
        batches = [None if index in self.nones else self.make(self.case, index, rank) for index in range(length)]
        return DataLoader(batches if self.sized else _Stream(batches), batch_size=None)  # type: ignore[arg-type]


class _Watch(Callback):
    """Keeps what balancing did to each batch; saves after some batches, into a folder."""

    def __init__(self, save_after: tuple[int, ...] = (), folder: Path | None = None) -> None:
        self.balanced: list[Balanced | None] = []
        self._save_after, self._folder = save_after, folder

    def on_train_batch_end(self, trainer: Trainer, *args: Any) -> None:
        self.balanced.append(trainer.strategy.balanced)  # type: ignore[attr-defined]
        if (num := len(self.balanced)) in self._save_after:
            trainer.save_checkpoint(self._folder / f"{num}.ckpt")  # type: ignore[operator]


class Manual(ByHand, Model):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(super().training_step(batch, batch_idx))
        optimizer.step()


def fit(
    case: Case,
    pipeline: str,
    *,
    balances: bool = True,
    make: Callable[..., Batch] = make_batch,
    lengths: tuple[int, ...] = (NUM_STEPS,),
    data: dict[str, Any] | None = None,
    by_hand: bool = False,
    deltas: Path | None = None,
    save_after: tuple[int, ...] = (),
    folder: Path | None = None,
    ckpt_path: Path | None = None,
    options: dict[str, Any] | None = None,
    **kwargs: Any,
) -> tuple[Result, list[Balanced | None]]:
    """Train batches that are balanced on their way, or with `balances=False` those that were balanced before."""
    model, watch = (Manual if by_hand else Model)(case), _Watch(save_after, folder)
    strategy = make_strategy(model, pipeline, balance=Balance(num_ids) if balances else None, **(options or {}))
    callbacks = [watch] if deltas is None else [watch, EmbeddingDeltas(str(deltas), 3)]
    trainer = make_trainer(strategy, callbacks=callbacks, num_sanity_val_steps=0, **kwargs)
    module = Data(case, make if balances else partial(assigned, make=make), lengths, **(data or {}))
    with warnings.catch_warnings():
        for message in ("another rank", "train_dataloader yielded None", "accumulates dense gradients only"):
            warnings.filterwarnings("ignore", message=f".*{message}")
        warnings.filterwarnings("error", message="balance has no effect")
        trainer.fit(model, datamodule=module, ckpt_path=ckpt_path)
    result = collect(model, trainer.optimizers[0], model.losses)
    result.losses = result.losses.nan_to_num(-1.0)  # those of poisoned batches, so that they equal themselves
    return result, watch.balanced


class _TakesIterator(Model):
    def training_step(self, dataloader_iter: Iterator[Any]) -> Tensor:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class _WithoutTables(Model):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        del self.ebc
        self.layer = torch.nn.Linear(1, 1)

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        return self.layer(torch.ones(1, 1)).sum()

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.layer.parameters(), lr=0.1)


def said_to_have_no_effect() -> dict[str, list[str]]:
    """Return what a fit of two epochs says of `balance`, where it balances and where it cannot."""
    said = {}
    for what, model, kwargs in [
        ("balances", Model(TABLE_WISE), {}),
        ("reloads its loader", Model(TABLE_WISE), {"reload_dataloaders_every_n_epochs": 1}),
        ("has no batches", Model(TABLE_WISE), {"limit_train_batches": 0}),
        ("takes the iterator", _TakesIterator(TABLE_WISE), {}),
        ("has no tables", _WithoutTables(TABLE_WISE), {}),
    ]:
        has_tables = not isinstance(model, _WithoutTables)
        balance = Balance(num_ids)
        if has_tables:
            strategy = make_strategy(model, balance=balance)
        else:
            strategy = OverlapEmbeddingStrategy(balance=balance, find_unused_parameters=True)
        trainer = make_trainer(strategy, num_sanity_val_steps=0, max_epochs=2, **kwargs)
        with warnings.catch_warnings(record=True) as records:
            warnings.simplefilter("always")
            trainer.fit(model, datamodule=Batches(TABLE_WISE, 2))
        said[what] = sorted({str(one.message) for one in records if "balance" in str(one.message)})
    return said


def fit_unbalanced(case: Case) -> Result:
    """Train the batches of the data loaders as they are."""
    model = Model(case)
    trainer = make_trainer(make_strategy(model, "base"))
    trainer.fit(model, datamodule=Batches(case))
    return collect(model, trainer.optimizers[0], model.losses)


Cost = Callable[[Batch], Any]


def errors(cases: dict[str, tuple[Cost, Callable[[Batch, int, int], Any], Any]]) -> dict[str, str]:
    """Fit each: a cost function, what is made of a batch (given its index and the rank), and options of `Balance`."""
    found = {}
    for name, (cost, change, options) in cases.items():

        def make(case: Case, index: int, rank: int, change: Any = change) -> Any:
            return change(make_batch(case, index, rank), index, rank)

        model = Model(TABLE_WISE)
        trainer = make_trainer(make_strategy(model, balance=Balance(cost, **options)))
        try:
            trainer.fit(model, datamodule=Data(TABLE_WISE, make, (6,)))
            found[name] = f"trained {len(model.losses)}"
        except RuntimeError as error:
            found[name] = str(error)
    return found


class _BreaksOnOne(IterableDataset):
    def __iter__(self) -> Iterator[Batch]:
        for index in range(6):
            if index == 4 and dist.get_rank() == 1:
                raise ValueError("no more files")
            yield make_batch(TABLE_WISE, index, dist.get_rank())


class _BreakingData(Batches):
    def train_dataloader(self) -> DataLoader:
        return DataLoader(_BreaksOnOne(), batch_size=None)


def fail_alone(timeout_s: float) -> tuple[str, float]:
    """Fail in the loader of rank 1 alone; return this rank's error with its notes, and the seconds."""
    model, start = Model(TABLE_WISE), time.monotonic()
    trainer = make_trainer(make_strategy(model, balance=Balance(num_ids), timeout=timeout_s))
    try:
        trainer.fit(model, datamodule=_BreakingData(TABLE_WISE))
    except Exception as error:
        notes = " ".join(getattr(error, "__notes__", []))
        return f"{type(error).__name__}: {error} {notes}", time.monotonic() - start
    raise AssertionError("nothing failed")


def terminate(rank: int) -> tuple[int, float, list[str]]:
    """Send SIGTERM to a rank in the middle of an exchange; return the steps, the seconds and the threads left."""
    model, begun = Model(TABLE_WISE), 0.0

    def cost(batch: Batch) -> Tensor:
        nonlocal begun
        if batch.inputs["sparse"][1] == 5:
            begun = time.monotonic()
            if dist.get_rank() == rank:
                os.kill(os.getpid(), signal.SIGTERM)
                time.sleep(0.3)  # all others wait for these costs
        return num_ids(batch)

    with suppress(SystemExit):
        trainer = make_trainer(make_strategy(model, balance=Balance(cost)))
        trainer.fit(model, datamodule=Batches(TABLE_WISE, 200))
    seconds = time.monotonic() - begun
    balancing = [thread for thread in threading.enumerate() if thread.name == "balanced batches"]
    for thread in balancing:
        thread.join(5)
    return len(model.losses), seconds, [thread.name for thread in balancing if thread.is_alive()]


def balance_on_one_rank() -> str:
    """Fit with the option on rank 1 alone; return the error of this rank."""
    balance = Balance(num_ids) if dist.get_rank() == 1 else None
    model = Model(TABLE_WISE)
    try:
        make_trainer(make_strategy(model, balance=balance)).fit(model, datamodule=Batches(TABLE_WISE, 2))
    except ValueError as err:
        return str(err)
    return ""


def exchange_many(seed: int, num: int) -> list[Any]:
    """Exchange drawn batches; return for each what its samples were before and after on this rank, or its error."""
    group = dist.new_group(backend="gloo")
    balancer = Balancer(Balance(lambda batch: batch["costs"]), group, lambda text: None)
    before, jobs = [], []
    for number in range(num):
        kind = random.Random(1000 * seed + number)  # the same on all ranks
        count, width, fields = kind.randint(0, 12), kind.randint(1, 3), kind.sample(sorted(FIELDS), 4)
        alone = kind.choice([None, None, None, "lacks", "more", "raises", "loader"])
        mine = alone if kind.randrange(dist.get_world_size()) == dist.get_rank() else None
        count += mine == "more"
        own = torch.Generator().manual_seed(hash((seed, number, dist.get_rank())) % 2**31)
        costs = torch.randint(0, 10 ** (2 * width), (count,), generator=own)
        batch = {"costs": costs, "fields": [FIELDS[name](count, own) for name in fields]}
        before.append((by_sample(batch, count), alone, costs.tolist()))
        if mine == "raises":
            batch["costs"] = -1 - costs if count else torch.ones(3, 3)
        jobs.append(balancer.start(batch, lacks=mine == "lacks", number=number, dataloader_idx=int(mine == "loader")))
    found: list[Any] = []
    for (samples, alone, costs), job in zip(before, jobs, strict=True):
        try:
            exchanged = job.result(60)
        except RuntimeError as error:
            found.append((alone, samples, costs, str(error)))
            continue
        of_batch = None if exchanged is None else by_sample(exchanged.batch, len(exchanged.batch["costs"]))
        found.append((alone, samples, costs, of_batch, exchanged and exchanged.balanced))
    balancer.close()
    return found


def fit_unequal(numbers: tuple[int, int]) -> tuple[list[str], list[str], list[Balanced | None]]:
    """Train batches of so many samples by rank; return the differences from a fit without balancing, and the log."""

    def make(case: Case, index: int, rank: int) -> Batch:
        return make_batch(case, index, rank, numbers[rank])

    said: list[str] = []
    handler, log = logging.Handler(), logging.getLogger(LOG)
    handler.emit = lambda record: said.append(record.getMessage())  # type: ignore[method-assign]
    log.setLevel(logging.INFO)
    log.addHandler(handler)
    results, watch = [], _Watch()
    try:
        for balance in (None, Balance(num_ids)):
            model, watch = Model(TABLE_WISE), _Watch()
            trainer = make_trainer(make_strategy(model, balance=balance), callbacks=[watch])
            trainer.fit(model, datamodule=Data(TABLE_WISE, make, (6,)))
            results.append(collect(model, trainer.optimizers[0], model.losses))
    finally:
        log.removeHandler(handler)
        log.setLevel(logging.NOTSET)
    return results[0].differences(results[1]), [text for text in said if "balance:" in text], watch.balanced


class Evaluates(Model):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.seen: list[tuple[float, int]] = []

    def validation_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> None:
        self.embeddings("ebc", batch)
        self.seen.append((float(num_ids(batch).sum()), dataloader_idx))

    test_step = validation_step

    def predict_step(self, batch: Batch, batch_idx: int, dataloader_idx: int = 0) -> Tensor:
        self.validation_step(batch, batch_idx)
        return batch.labels


class EvaluationData(Batches):
    """Two loaders for validations and tests."""

    def val_dataloader(self) -> list[DataLoader]:
        return [self.loader_of(range(100, 103)), self.loader_of(range(200, 202))]

    test_dataloader = val_dataloader

    def predict_dataloader(self) -> DataLoader:
        return self.loader_of(range(100, 103))


def evaluate(evaluation: bool) -> dict[str, list[tuple[float, int]]]:
    """Return each evaluation's batches: the costs of this rank, and the loader."""
    found = {}
    model = Evaluates(TABLE_WISE)
    strategy = make_strategy(model, balance=Balance(num_ids, evaluation=evaluation))
    trainer = make_trainer(strategy, num_sanity_val_steps=0, val_check_interval=2)
    for name in ("fit", "validate", "test", "predict"):
        model.seen.clear()
        getattr(trainer, name)(model, datamodule=EvaluationData(TABLE_WISE, 4))
        found[name] = list(model.seen)
    return found
