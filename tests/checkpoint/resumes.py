"""Stop at any step and go on, with loaders that know where they are. Functions that ranks run."""

import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from operator import itemgetter
from typing import Any

import torch
from lightning.pytorch import LightningDataModule
from lightning.pytorch.callbacks import Callback
from torch.utils.data import Dataset, IterableDataset
from torchdata.stateful_dataloader import StatefulDataLoader

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables.sharded_module import tbes

from ..support.cases import ROWWISE_ADAGRAD, TABLE_WISE, Case, Model, make_batch
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


def make_loader(kind: str, *source: Any) -> Any:
    """ "own-sized", "own-unsized", or torchdata's: "sized-0", "shuffled-0", "unsized-2", ..."""
    name, how = kind.rsplit("-", 1)
    if name == "own":
        return (StatefulSized if how == "sized" else Stateful)(*source)
    data = (Stream if name == "unsized" else Rows)(*source)
    context = "fork" if int(how) else None  # quick; the ranks themselves are spawned
    shuffle: dict[str, Any] = {}
    if name == "shuffled":
        shuffle = {"shuffle": True, "generator": torch.Generator().manual_seed(source[-1])}
    return StatefulDataLoader(data, batch_size=None, num_workers=int(how), multiprocessing_context=context, **shuffle)


class StatefulBatches(LightningDataModule):
    def __init__(self, kind: str, num: int = EPOCH, case: Case = ROWWISE_ADAGRAD) -> None:
        super().__init__()
        self.kind, self.num, self.case = kind, num, case

    def train_dataloader(self) -> Any:
        return make_loader(self.kind, self.case, self.num, self.trainer.global_rank)


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
    case: Case = ROWWISE_ADAGRAD,
    sharding: str | None = None,
) -> tuple[Result, Any]:
    torch.manual_seed(3)
    model = kind_of_model(case)
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=sharding) if sharding else make_strategy(model, pipeline)
    trainer = make_trainer(strategy, callbacks=[SaveSteps(folder, save_at)], max_epochs=epochs)
    path = None if resume is None else f"{folder}/{resume}.ckpt"
    if resume is not None:
        zeroed(model)
    with warnings.catch_warnings(action="ignore"):
        trainer.fit(model, datamodule=StatefulBatches(kind, case=case), ckpt_path=path)
    result = collect(model, trainer.optimizers[0], model.losses or [torch.zeros(())])
    lr = trainer.optimizers[0].param_groups[0]["lr"]
    counts = [(int(tbe.iter), int(tbe.iter_cpu)) for tbe in tbes(model.ebc)]
    num_parts = len({one.sharding_type for one in model.ebc.module_sharding_plan.values()})
    progress = (trainer.global_step, trainer.current_epoch, lr, counts, num_parts)
    return result, (model.seen, model.epochs, progress)


def seen_in_the_order_of_a_sampler(folder: str, resume: str | None, save_at: tuple[int, ...] = (-1,)) -> list[Any]:
    """Train three epochs or go on: a sampler of Lightning's gives each its own order."""
    model = Watched(TABLE_WISE)
    how: dict[str, Any] = {"collate_fn": itemgetter(0), "num_workers": 1, "multiprocessing_context": "fork"}
    data = StatefulDataLoader(Rows(TABLE_WISE, 2 * EPOCH, 0), 1, **how)
    callbacks = [SaveSteps(folder, save_at)]
    trainer = make_trainer(make_strategy(model), callbacks=callbacks, max_epochs=3, use_distributed_sampler=True)
    trainer.fit(model, data, ckpt_path=None if resume is None else f"{folder}/{resume}.ckpt")
    return model.seen
