"""Stop at any step and go on, with loaders that know where they are. Functions that ranks run."""

import dataclasses
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from torch.utils.data import DataLoader, Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables.sharded_module import tbes

from ..support.cases import ROWWISE_ADAGRAD, TABLE_WISE, Batches, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
from .checkpoints import zeroed

EPOCH = 8
EPOCHS = 2


@dataclass
class _Source:
    case: Case
    num: int
    rank: int


class Stateful(_Source):
    """A loader that knows where it is, with a length or without; at its end it knows that too."""

    position = 0
    resumed = False

    def __iter__(self) -> Iterator[Any]:
        start = self.position if self.resumed else 0
        self.resumed = False
        for index in range(start, self.num):
            self.position = index + 1
            yield make_batch(self.case, index, self.rank)

    def state_dict(self) -> dict[str, int]:
        return {"position": self.position, "rank": self.rank}

    def load_state_dict(self, state: dict[str, int]) -> None:
        assert state["rank"] == self.rank, "another rank's state"
        self.position, self.resumed = state["position"], True


class StatefulSized(Stateful):
    def __len__(self) -> int:
        return self.num


class Rows(_Source, Dataset):
    def __len__(self) -> int:
        return self.num

    def __getitem__(self, index: int) -> Any:
        return make_batch(self.case, index, self.rank)


class Stream(_Source, IterableDataset):
    def __iter__(self) -> Iterator[Any]:
        worker = torch.utils.data.get_worker_info()
        first, step = (0, 1) if worker is None else (worker.id, worker.num_workers)
        return (make_batch(self.case, index, self.rank) for index in range(first, self.num, step))


def make_loader(kind: str, num: int, rank: int) -> Any:
    """ "own-sized", "own-unsized", or torchdata's: "sized-0", "shuffled-2", "unsized-2", ..."""
    name, how = kind.rsplit("-", 1)
    if name == "own":
        return (StatefulSized if how == "sized" else Stateful)(ROWWISE_ADAGRAD, num, rank)
    data = (Stream if name == "unsized" else Rows)(ROWWISE_ADAGRAD, num, rank)
    context = "fork" if int(how) else None  # quick; the ranks themselves are spawned
    shuffle: dict[str, Any] = {}
    if name == "shuffled":
        shuffle = {"shuffle": True, "generator": torch.Generator().manual_seed(rank)}
    return StatefulDataLoader(data, batch_size=None, num_workers=int(how), multiprocessing_context=context, **shuffle)


class StatefulBatches(LightningDataModule):
    def __init__(self, kind: str, num: int = EPOCH) -> None:
        super().__init__()
        self.kind, self.num = kind, num

    def train_dataloader(self) -> Any:
        return make_loader(self.kind, self.num, self.trainer.global_rank)


class SaveSteps(Callback):
    def __init__(self, folder: str, steps: tuple[int, ...]) -> None:
        self.folder, self.steps = folder, steps

    def on_train_batch_end(self, trainer: Any, *args: Any) -> None:
        if trainer.global_step in self.steps:
            trainer.save_checkpoint(f"{self.folder}/step={trainer.global_step}.ckpt")

    def on_train_epoch_end(self, trainer: Any, *args: Any) -> None:
        if self.steps:
            trainer.save_checkpoint(f"{self.folder}/epoch={trainer.current_epoch}.ckpt")


class Watched(Model):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.seen: list[tuple[int, int, int]] = []
        self.epochs: list[int] = []

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((self.current_epoch, batch_idx, batch.inputs["sparse"][1]))

    def on_train_epoch_end(self) -> None:
        self.epochs.append(self.current_epoch)

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]


class AsksForSteps(Watched):
    """Asks for the number of steps, for which Lightning sets up the data before it loads a checkpoint."""

    def configure_optimizers(self) -> Any:
        assert self.trainer.estimated_stepping_batches == EPOCH * EPOCHS
        return super().configure_optimizers()


def train_from(
    pipeline: str,
    kind: str,
    folder: str,
    resume: str | None,
    save_at: tuple[int, ...] = (),
    epochs: int = EPOCHS,
    kind_of_model: type[Watched] = Watched,
) -> tuple[Result, Any]:
    torch.manual_seed(3)
    model = kind_of_model(ROWWISE_ADAGRAD)
    strategy = make_strategy(model, pipeline)
    callbacks = [SaveSteps(folder, save_at)]
    trainer = make_trainer(strategy, callbacks=callbacks, max_epochs=epochs)
    path = None if resume is None else f"{folder}/{resume}.ckpt"
    if resume is not None:
        zeroed(model)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=StatefulBatches(kind), ckpt_path=path)
    losses = model.losses or [torch.zeros(())]
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    progress = (trainer.global_step, trainer.current_epoch, lr)
    return collect(model, trainer.optimizers[0], losses), (model.seen, model.epochs, progress)


class Moves(LightningDataModule):
    first = 0

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        return DataLoader([make_batch(TABLE_WISE, self.first + i, rank) for i in range(EPOCH)], batch_size=None)

    def state_dict(self) -> dict[str, int]:
        return {"first": self.first + EPOCH}

    def load_state_dict(self, state: dict[str, int]) -> None:
        self.first = state["first"]


def seen_with_a_data_module(folder: str) -> list[int]:
    path = f"{folder}/epoch=0.ckpt"
    for resume in (None, path):
        model, save = AsksForSteps(TABLE_WISE), SaveSteps(folder, () if resume else (EPOCH,))
        trainer = make_trainer(make_strategy(model), callbacks=[save], max_epochs=EPOCHS, limit_train_batches=EPOCH)
        trainer.fit(model, datamodule=Moves(), ckpt_path=resume)
    return [index for _, _, index in model.seen]


class Numbered(Dataset):
    """Batches by index, which a sampler of Lightning's deals out to the ranks in an order of each epoch's own."""

    def __len__(self) -> int:
        return 2 * EPOCH

    def __getitem__(self, index: int) -> Any:
        return make_batch(TABLE_WISE, index, 0)


def seen_in_the_order_of_a_sampler(folder: str, resume: str | None, save_at: tuple[int, ...] = ()) -> list[Any]:
    """Train or go on, in the middle of an epoch (`step=...`) with a stateful loader, else with a worker."""
    model = Watched(TABLE_WISE)
    is_stateful = bool(save_at) or (resume is not None and resume.startswith("step"))
    kind, workers = (StatefulDataLoader, 0) if is_stateful else (DataLoader, 1)
    how: dict[str, Any] = {"num_workers": workers, "multiprocessing_context": "fork" if workers else None}
    data = kind(Numbered(), 1, shuffle=not is_stateful, collate_fn=itemgetter(0), **how)
    saver = SaveSteps(folder, save_at or (-1,))
    trainer = make_trainer(make_strategy(model), callbacks=[saver], max_epochs=3, use_distributed_sampler=True)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, data, ckpt_path=None if resume is None else f"{folder}/{resume}.ckpt")
    return model.seen


def train_by_name(pipeline: str, folder: str, resumes: bool) -> tuple[Result, int]:
    """Train two epochs, or the second alone; return the end, and the number of parts of the module's tables."""
    case = dataclasses.replace(ROWWISE_ADAGRAD, tables=TABLE_WISE.tables)
    model, save = Model(case), SaveSteps(folder, () if resumes else (EPOCH,))
    trainer = make_trainer(
        OverlapEmbeddingStrategy(pipeline, sharding="table_wise"), callbacks=[save], max_epochs=EPOCHS
    )
    if resumes:
        zeroed(model)
    trainer.fit(model, datamodule=Batches(case, EPOCH), ckpt_path=f"{folder}/epoch=0.ckpt" if resumes else None)
    num_parts = len({one.sharding_type for one in model.ebc.module_sharding_plan.values()})
    return collect(model, trainer.optimizers[0], model.losses[-EPOCH:]), num_parts


class _Counts(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        self.counts = [(int(tbe.iter), int(tbe.iter_cpu)) for tbe in tbes(module.ebc)]


def counts_after_resuming(pipeline: str, folder: str, step: int) -> list[tuple[int, int]]:
    for path in (None, f"{folder}/step={step}.ckpt"):
        model, counts = Model(ROWWISE_ADAGRAD), _Counts()
        trainer = make_trainer(make_strategy(model, pipeline), callbacks=[SaveSteps(folder, (step,)), counts])
        trainer.fit(model, datamodule=StatefulBatches("own-sized"), ckpt_path=path)
    return counts.counts
