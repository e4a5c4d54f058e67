"""Fits with `frozen_window=True`. Functions that ranks run."""

import warnings
from collections.abc import Iterator
from contextlib import suppress
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader, IterableDataset
from torchrec.distributed.types import ShardedModule

from lightning_overlap import Mode, OverlapEmbeddingStrategy
from lightning_overlap.tables.sharded_module import tbes

from ..checkpoint.resumes import StatefulSized
from ..sparse.update_rates import Scheduled
from ..support import cases
from ..support.cases import NUM_STEPS, TABLE_WISE, Batch, Batches, Case, Model, TableSpec, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
from .faults import Fault, InjectedError

ALL_KINDS = Case(
    "all_kinds",
    (
        TableSpec("t0", ("f0",)),
        TableSpec("t1", ("f1", "f0")),
        TableSpec("wide", ("w",), "column_wise", dim=16),
        TableSpec("rows", ("f2",), "row_wise"),
        TableSpec("d0", ("f1",), "data_parallel"),
        TableSpec("u0", ("f1", "f2"), collection="second"),
    ),
)
"""Table-, column- and row-wise, data-parallel, and two collections."""


class _Stream(IterableDataset):
    def __init__(
        self, num: int, rank: int, nones: tuple[int, ...] = (), case: Case = TABLE_WISE, first: int = 0
    ) -> None:
        self.numbers, self.rank, self.nones, self.case = range(first, first + num), rank, nones, case

    def __iter__(self) -> Iterator[Batch | None]:
        for index in self.numbers:
            yield None if index in self.nones else make_batch(self.case, index, self.rank)


class Data(Batches):
    """So many batches on each rank, these of them None; with or without a length."""

    def __init__(
        self, case: Case, *lengths: int, stateful: bool = False, nones: tuple[int, ...] = (), sized: bool = True
    ) -> None:
        super().__init__(case)
        self.lengths, self.stateful, self.nones, self.sized = lengths, stateful, nones, sized

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        length = self.lengths[rank % len(self.lengths)]
        if self.stateful:
            return StatefulSized(self.case, length, rank)
        first = self.trainer.current_epoch * length  # no two batches alike where loaders are made anew
        stream = _Stream(length, rank, self.nones, self.case, first)
        return DataLoader(list(stream) if self.sized else stream, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        return DataLoader(list(_Stream(2, self.trainer.global_rank, (), self.case, 100)), batch_size=None)


class Manual(cases.ByHand, Model):
    pass


class AsksTwice(Model):
    """An optimizer that evaluates its closure several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS([*self.bottom.parameters(), *self.top.parameters()], max_iter=2)


EXPECTED = ("another rank", "not overlapped", "train_dataloader yielded None", "accumulates dense gradients only")
MODELS: dict[str, type[Model]] = {
    "plain": Model,
    "makes_input": cases.MakesInput,
    "scheduled": Scheduled,
    "manual": Manual,
    "asks_twice": AsksTwice,
}


def train(
    case: Case,
    k: int,
    *,
    pipeline: str = "fused_sparse_dist",
    model: str = "plain",
    lengths: tuple[int, ...] = (NUM_STEPS,),
    options: dict[str, Any] | None = None,
    data: dict[str, Any] | None = None,
    ckpt_path: str | None = None,
    **kwargs: Any,
) -> Result:
    """Train, k batches for each optimizer step; every warning but those of uneven ranks is an error."""
    module = MODELS[model](case)
    strategy = make_strategy(module, pipeline, **{"frozen_window": True, **(options or {})})
    trainer = make_trainer(strategy, accumulate_grad_batches=k, **kwargs)
    with warnings.catch_warnings():
        for message in EXPECTED:
            warnings.filterwarnings("ignore", message=f".*{message}")
        trainer.fit(module, datamodule=Data(case, *lengths, **(data or {})), ckpt_path=ckpt_path)
    return collect(module, trainer.optimizers[0], module.losses or [torch.zeros(())])


def message_of(case: Case, *args: Any, **kwargs: Any) -> str:
    try:
        train(case, *args, **kwargs)
    except (ValueError, RuntimeError) as err:
        return str(err)
    return "trained"


def tables_of(module: Model) -> list[Tensor]:
    """Copy this rank's shards, without a word to the strategy."""
    shards = [child for child in module.modules() if isinstance(child, ShardedModule)]
    kernels = [tbe for shard in shards for tbe in tbes(shard)]
    return [weight.detach().clone() for tbe in kernels for weight in tbe.split_embedding_weights()]


class _Watch(Callback):
    """Notes the number of optimizer steps and the tables after each batch and before each validation."""

    def __init__(self) -> None:
        self.seen: list[tuple[int, Tensor]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        self.seen.append((trainer.global_step, torch.cat([table.flatten() for table in tables_of(module)])))

    on_validation_start = on_train_batch_end


def watched(case: Case, k: int, **kwargs: Any) -> list[tuple[int, Tensor]]:
    watch = _Watch()
    train(case, k, callbacks=[watch], **kwargs)
    return watch.seen


class After(Callback):
    """Does something after so many batches."""

    def __init__(self, num_batches: int, do: str, path: str = "") -> None:
        self.num_batches, self.do, self.path = num_batches, do, path

    def on_train_batch_end(self, trainer: Any, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.num_batches and self.do == "stop":
            trainer.should_stop = True
        elif batch_idx + 1 == self.num_batches and self.do == "save":
            trainer.save_checkpoint(self.path)
        elif batch_idx + 1 == self.num_batches:
            with torch.no_grad():
                for weight in module.ebc.parameters():
                    weight.mul_(0.5)
            trainer.strategy.tables_changed()


def failing(case: Case, k: int, place: str, batch: int) -> tuple[Result, int]:
    """Fail in a place of a batch; return what is left, and how many batches a second fit then trains."""
    module = Model(case)
    strategy = make_strategy(module, frozen_window=True, observer=Fault(place, batch).observe)
    trainer = make_trainer(strategy, accumulate_grad_batches=k)
    with suppress(InjectedError):
        trainer.fit(module, datamodule=Data(case, NUM_STEPS))
    result = collect(module, trainer.optimizers[0], module.losses)
    second = OverlapEmbeddingStrategy(Mode(frozen_window=True), sharding=strategy.sharding)
    module.losses = []
    make_trainer(second, accumulate_grad_batches=k).fit(module, datamodule=Data(case, 6))
    return result, len(module.losses)
