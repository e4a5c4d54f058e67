"""Fits with `frozen_window=True`. Functions that ranks run."""

import warnings
from collections.abc import Callable
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor
from torch.utils.data import DataLoader
from torchrec.distributed.types import ShardedModule

from lightning_overlap import Mode, OverlapEmbeddingStrategy
from lightning_overlap.tables.sharded_module import tbes

from ..checkpoint.resumes import StatefulSized
from ..sparse.update_rates import Scheduled
from ..support.cases import NUM_STEPS, Batches, ByHand, Case, MakesInput, Model, TableSpec, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect

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


class Data(Batches):
    def __init__(self, case: Case, *lengths: int, stateful: bool = False, nones: tuple[int, ...] = ()) -> None:
        super().__init__(case)
        self.lengths, self.stateful, self.nones = lengths, stateful, nones

    def train_dataloader(self) -> Any:
        rank = self.trainer.global_rank
        length = self.lengths[rank % len(self.lengths)]
        if self.stateful:
            return StatefulSized(self.case, length, rank)
        start = self.trainer.current_epoch * length  # no two batches alike where loaders are made anew
        numbers = range(start, start + length)
        batches = [None if index in self.nones else make_batch(self.case, index, rank) for index in numbers]
        return DataLoader(batches, batch_size=None)

    def val_dataloader(self) -> DataLoader:
        rank = self.trainer.global_rank
        return DataLoader([make_batch(self.case, 100 + index, rank) for index in range(2)], batch_size=None)


class Manual(ByHand, Model):
    pass


class AsksTwice(Model):
    """An optimizer that evaluates its closure several times in a step."""

    def configure_optimizers(self) -> Any:
        return torch.optim.LBFGS([*self.bottom.parameters(), *self.top.parameters()], max_iter=2)


MODELS: dict[str, type[Model]] = {
    "plain": Model,
    "makes_input": MakesInput,
    "scheduled": Scheduled,
    "manual": Manual,
    "asks_twice": AsksTwice,
}


def make(case: Case, pipeline: str, model: str = "plain", **options: Any) -> tuple[Model, OverlapEmbeddingStrategy]:
    module = MODELS[model](case)
    return module, make_strategy(module, pipeline, **{"frozen_window": True, **options})


def train(
    case: Case,
    k: int,
    *,
    pipeline: str = "fused_sparse_dist",
    model: str = "plain",
    lengths: tuple[int, ...] = (NUM_STEPS,),
    options: dict[str, Any] | None = None,
    callbacks: tuple[Callback, ...] = (),
    ckpt_path: str | None = None,
    stateful: bool = False,
    nones: tuple[int, ...] = (),
    **kwargs: Any,
) -> Result:
    """Train, k batches for each optimizer step; every warning but those of uneven ranks is an error."""
    module, strategy = make(case, pipeline, model, **(options or {}))
    trainer = make_trainer(strategy, accumulate_grad_batches=k, callbacks=[*callbacks], **kwargs)
    with warnings.catch_warnings():
        warnings.filterwarnings("ignore", message=".*another rank")
        warnings.filterwarnings("ignore", message=".*not overlapped")
        warnings.filterwarnings("ignore", message=".*train_dataloader yielded None")
        warnings.filterwarnings("ignore", message=".*accumulates dense gradients only")
        trainer.fit(module, datamodule=Data(case, *lengths, stateful=stateful, nones=nones), ckpt_path=ckpt_path)
    return collect(module, trainer.optimizers[0], module.losses or [torch.zeros(())])


def message_of(case: Case, *args: Any, **kwargs: Any) -> str:
    try:
        train(case, *args, **kwargs)
    except (ValueError, RuntimeError) as err:
        return str(err)
    return "trained"


# -- what is seen between two batches ----------------------------------------------------------------------------------


def tables_of(module: Model) -> list[Tensor]:
    """Copy this rank's shards, without a word to the strategy."""
    shards = [child for child in module.modules() if isinstance(child, ShardedModule)]
    kernels = [tbe for shard in shards for tbe in tbes(shard)]
    return [weight.detach().clone() for tbe in kernels for weight in tbe.split_embedding_weights()]


class Watch(Callback):
    """Notes the tables after each batch and before each validation, with the number of optimizer steps."""

    def __init__(self) -> None:
        self.seen: list[tuple[str, int, list[Tensor]]] = []

    def on_train_batch_end(self, trainer: Trainer, module: Any, *args: Any) -> None:
        self.seen.append(("batch", trainer.global_step, tables_of(module)))

    def on_validation_start(self, trainer: Trainer, module: Any) -> None:
        self.seen.append(("validation", trainer.global_step, tables_of(module)))


def watched(case: Case, k: int, **kwargs: Any) -> tuple[Result, list[tuple[str, int]], list[int]]:
    """Train with validations; return what was seen, each time with the number of versions of the tables so far."""
    watch = Watch()
    result = train(case, k, callbacks=(watch,), **kwargs)
    versions: list[list[Tensor]] = []
    numbers = []
    for _, _, tables in watch.seen:
        if not versions or any(not torch.equal(a, b) for a, b in zip(tables, versions[-1], strict=True)):
            versions.append(tables)
        numbers.append(len(versions))
    return result, [(what, step) for what, step, _ in watch.seen], numbers


class _After(Callback):
    def __init__(self, num_batches: int, do: Callable[[Trainer, Any], None]) -> None:
        self.num_batches, self.do = num_batches, do

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx + 1 == self.num_batches:
            self.do(trainer, module)


def save_and_go_on(case: Case, k: int, stop: int, folder: str, **kwargs: Any) -> tuple[Result, Result, list[int]]:
    """Train and save after a batch; resume. Return both, and what the resumed kernels begin to count at."""
    path, counts = f"{folder}/after={stop}.ckpt", Counts()
    whole = train(case, k, callbacks=(_After(stop, lambda trainer, _: trainer.save_checkpoint(path)),), **kwargs)
    rest = train(case, k, callbacks=(counts,), ckpt_path=path, **kwargs)
    return whole, rest, counts.counts


class Counts(Callback):
    def on_train_start(self, trainer: Trainer, module: Any) -> None:
        self.counts = [int(tbe.iter) for tbe in tbes(module.ebc)]


def stopped(case: Case, k: int, stop: int, **kwargs: Any) -> Result:
    def end(trainer: Trainer, module: Any) -> None:
        trainer.should_stop = True

    return train(case, k, callbacks=(_After(stop, end),), **kwargs)


def writing(case: Case, k: int, after: int) -> str:
    def write(trainer: Trainer, module: Any) -> None:
        with torch.no_grad():
            for child in module.modules():
                if isinstance(child, ShardedModule):
                    for weight in child.parameters():
                        weight.mul_(0.5)
        trainer.strategy.tables_changed()

    return message_of(case, k, callbacks=(_After(after, write),))


def failing(case: Case, k: int, place: str, batch: int) -> tuple[Result, int]:
    """Fail in a place of a batch; return what is left, and how many batches a second fit then trains."""
    failed: list[str] = []

    def observe(kind: str, stage: Any, index: int) -> None:
        if (f"{kind} {stage}", index) == (place, batch) and not failed:
            failed.append(place)
            raise KeyError("the user's own error")

    module, strategy = make(case, "fused_sparse_dist", observer=observe)
    trainer = make_trainer(strategy, accumulate_grad_batches=k)
    try:
        trainer.fit(module, datamodule=Data(case, NUM_STEPS))
    except KeyError:
        result = collect(module, trainer.optimizers[0], module.losses)
    second = OverlapEmbeddingStrategy(Mode(frozen_window=True), sharding=strategy.sharding)
    module.losses = []
    make_trainer(second, accumulate_grad_batches=k).fit(module, datamodule=Data(case, 6))
    return result, len(module.losses)
