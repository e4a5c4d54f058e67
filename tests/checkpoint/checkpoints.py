"""Save, load, go on. Functions that ranks run."""

import dataclasses
import resource
import warnings
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Callback, ModelCheckpoint
from torch import Tensor
from torch.distributed._shard.sharded_tensor import Shard, ShardedTensor, init_from_local_shards
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.keyed import KeyedOptimizerWrapper
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint.table_state import on_host
from lightning_overlap.plugin.first_words import LOGGER
from lightning_overlap.tables.sharded_module import tbes
from lightning_overlap.tables.supported_modules import sharded_modules

from ..plugin.strategies import logged
from ..support import modules
from ..support.cases import TABLE_WISE, Batches, Case, Model, TableSpec, make_plan
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect

EPOCH = 6

Plan = str | None
"""One word a table: the rank of a table-wise one, or a word of `PLACES`."""

PLACES: dict[str, modules.Placement] = {
    "0": lambda table: modules.whole(0),
    "1": lambda table: modules.whole(1),
    "cw": lambda table: modules.halves(0, 1),
    "rw": modules.rows,
    "dp": modules.copies,
    "dense": modules.whole_dense,
}


def planned(case: Case, plan: Plan) -> Case:
    """The case, with the fused optimizer left out where the plan is data-parallel or dense."""
    if plan is None:
        return case
    kinds = [{"dp": "data_parallel", "dense": "data_parallel"}.get(word, "table_wise") for word in plan.split()]
    tables = (dataclasses.replace(table, sharding=kind) for table, kind in zip(case.tables, kinds, strict=True))
    return dataclasses.replace(case, tables=tuple(tables))


def build_plan(case: Case, model: Model, plan: Plan) -> ShardingPlan:
    if plan is None:
        return make_plan(case, model, dist.get_world_size())
    words = enumerate(zip(case.tables, plan.split(), strict=True))
    of_tables = {table.name: PLACES[word](index) for index, (table, word) in words}
    return ShardingPlan(plan={"ebc": modules.plan_of(model.ebc, of_tables)})


def zeroed(model: Model) -> Model:
    with torch.no_grad():
        for parameter in model.parameters():
            parameter.zero_()
    return model


@dataclasses.dataclass
class Trained:
    result: Result
    whole: dict[str, list[tuple[Any, Tensor]]]  # its parts of tables and of their state: (window, values)
    checkpoint: str
    warnings: list[str]


def train(
    case: Case,
    folder: str,
    *,
    epochs: int = 1,
    resume: str | None = None,
    plan: Plan = None,
    pipeline: str = "fused_sparse_dist",
    callbacks: tuple[Callback, ...] = (),
    model_class: type[Model] = Model,
    max_steps: int = -1,
    **kwargs: Any,
) -> Trained:
    case = planned(case, plan)
    model = model_class(case)
    if kwargs.get("checkpoint_format") == "incremental":
        callbacks = (*callbacks, SavesEarly(f"{folder}/early.ckpt"))
        kwargs.setdefault("most_increments", 10)
    if resume is not None:
        zeroed(model)
    saver = ModelCheckpoint(folder, filename="{epoch}", save_top_k=-1, enable_version_counter=False)
    strategy = OverlapEmbeddingStrategy(pipeline=pipeline, sharding=build_plan(case, model, plan), **kwargs)
    limits: dict[str, Any] = {"max_epochs": epochs, "max_steps": max_steps}
    trainer = make_trainer(strategy, enable_checkpointing=True, callbacks=[saver, *callbacks], **limits)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(model, datamodule=Batches(case, EPOCH), ckpt_path=resume)
    result = collect(model, trainer.optimizers[0], model.losses or [torch.zeros(())])
    said = [str(warning.message) for warning in caught if "optimizer" in str(warning.message)]
    return Trained(result, parts_of(model), str(saver.best_model_path), said)


class SavesEarly(Callback):
    """Saves in the middle of an epoch, so that an incremental checkpoint at its end has changed rows only."""

    def __init__(self, path: str) -> None:
        self.path = path

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx in (1, 3):
            trainer.save_checkpoint(self.path)


def parts_of(model: Model) -> dict[str, list[tuple[Any, Tensor]]]:
    found: dict[str, list[tuple[Any, Tensor]]] = {}

    def put(name: str, window: Any, value: Tensor) -> None:
        found.setdefault(name, []).append((window, value.detach().clone()))

    for sharded in sharded_modules(model).values():
        for key, value in sharded.state_dict().items():
            for window, part in _parts(value):
                put(key.split(".")[-2], window, part)
        for key, weight in sharded.fused_optimizer.params.items():
            for kind, value in sharded.fused_optimizer.state[weight].items():
                table = f"{key.split('.')[-2]} {kind.split('.')[-1]}"
                shards = zip(weight.local_shards(), value.local_shards(), strict=True)
                for of_weight, of_state in shards:
                    row_wise = of_state.tensor.dim() == 1
                    state = of_state.tensor[:, None].expand_as(of_weight.tensor) if row_wise else of_state.tensor
                    put(table, _window(of_weight.metadata), state)
        counts = {(int(tbe.iter), int(tbe.iter_cpu), tbe.get_learning_rate()) for tbe in tbes(sharded)}
        found["kernels"] = [(None, torch.tensor(sorted(counts)))]
    return found


def whole(trained: list[Trained]) -> dict[str, Tensor]:
    """Put the ranks' parts together; row-wise state is given for every column."""
    tables: dict[str, Tensor] = {}
    for name in sorted({name for rank in trained for name in rank.whole if name != "kernels"}):
        parts = [part for rank in trained for part in rank.whole.get(name, [])]
        size = [max(window[dim].stop for window, _ in parts) for dim in range(2)]
        tables[name] = torch.full(size, torch.nan)
        for window, part in parts:
            tables[name][window] = part
    return tables


def _parts(value: Any) -> list[tuple[Any, Tensor]]:
    if isinstance(value, ShardedTensor):
        return [(_window(shard.metadata), shard.tensor) for shard in value.local_shards()]
    return [(tuple(slice(0, size) for size in value.shape), value)]


def _window(metadata: Any) -> tuple[slice, ...]:
    return tuple(
        slice(start, start + size) for start, size in zip(metadata.shard_offsets, metadata.shard_sizes, strict=True)
    )


def copy_one_row() -> list[torch.Size]:
    rank = dist.get_rank()
    row = Shard.from_tensor_and_offsets(torch.ones(int(rank == 0), 4), [min(rank, 1), 0], rank)
    return [shard.tensor.shape for shard in on_host(init_from_local_shards([row], 1, 4)).local_shards()]


def load_unsharded(case: Case, path: str) -> dict[str, Tensor]:
    model = zeroed(Model(case))
    loaded = type(model).load_from_checkpoint(path, case=case, weights_only=True)
    return {name: parameter.detach() for name, parameter in loaded.named_parameters()}


def save_to(path: str, storage_options: Any = None, **kwargs: Any) -> str:
    model = Model(TABLE_WISE)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise", **kwargs))
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 2))
    try:
        trainer.save_checkpoint(path, storage_options=storage_options)
    except (ValueError, OSError) as err:
        return str(err)
    return "saved"


def fit_with_checkpoints_at(folder: str, **kwargs: Any) -> list[Any]:
    """Return how many batches are trained, and how the fit ends."""
    model = Model(TABLE_WISE)
    saver = ModelCheckpoint(folder, every_n_train_steps=2)
    trainer = make_trainer(make_strategy(model, **kwargs), callbacks=[saver], enable_checkpointing=True)
    said = "trained"
    try:
        trainer.fit(model, datamodule=Batches(TABLE_WISE, 2))
    except ValueError as err:
        said = str(err).partition(". ")[0]
    return [len(model.losses), said]


def save_on_a_full_disk(folder: str, full_on: int, **kwargs: Any) -> str:
    wide = Case("wide", tuple(TableSpec(f"t{table}", (f"f{table}",), dim=64) for table in range(2)))
    model = Model(wide)
    saver = ModelCheckpoint(folder, every_n_train_steps=2)
    trainer = make_trainer(make_strategy(model, **kwargs), callbacks=[saver], enable_checkpointing=True)
    soft, hard = resource.getrlimit(resource.RLIMIT_FSIZE)
    if dist.get_rank() == full_on:
        resource.setrlimit(resource.RLIMIT_FSIZE, (10_000, hard))
    try:
        trainer.fit(model, datamodule=Batches(wide, 2))
    except OSError as err:
        return str(err)
    finally:
        resource.setrlimit(resource.RLIMIT_FSIZE, (soft, hard))
    return "saved"


def load_from(case: Case, path: str, fn: str = "fit", model_class: Any = None, **kwargs: Any) -> str:
    model = (model_class or Evaluated)(case)
    trainer = make_trainer(make_strategy(model))
    try:
        getattr(trainer, fn)(model, datamodule=EvaluatedBatches(case, 2), ckpt_path=path, **kwargs)
    except (RuntimeError, ValueError, OSError) as err:
        return f"{type(err).__name__}: {err}"
    return "loaded"


class Evaluated(Model):
    def predict_step(self, batch: Any, batch_idx: int) -> Tensor:
        loss = self(batch)
        self.losses.append(loss.detach())
        return loss

    validation_step = test_step = predict_step


class EvaluatedBatches(Batches):
    def val_dataloader(self) -> Any:
        return self.train_dataloader()

    test_dataloader = predict_dataloader = val_dataloader


ENTRIES: dict[str, Any] = {"averages": {"ctr": 0.5}, "averaging": [1, 2]}
"""What `WithState` adds to a checkpoint, under names that a user may choose."""


class WithState(Evaluated):
    """Has buffers that differ by rank after a step, and entries of its own in a checkpoint."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.entries: dict[str, Any] = {}
        for number in range(8):
            self.register_buffer(f"seen{number}", torch.zeros(2))

    @property
    def seen(self) -> list[Tensor]:
        return [buffer for name, buffer in self.named_buffers() if name.startswith("seen")]

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        for seen in self.seen:
            seen += self.trainer.global_rank + 1
        return super().training_step(batch, batch_idx)

    def on_save_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        checkpoint.update(ENTRIES)

    def on_load_checkpoint(self, checkpoint: dict[str, Any]) -> None:
        self.entries = {name: checkpoint.get(name) for name in ENTRIES}


def save_and_load_state(path: str, saved_as: str) -> tuple[list[Tensor], list[Tensor], dict[str, Any]]:
    """Return the buffers after a fit, and the buffers and entries that its checkpoint gives back."""
    models = WithState(TABLE_WISE), WithState(TABLE_WISE)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise", checkpoint_format=saved_as))
    trainer.fit(models[0], datamodule=Batches(TABLE_WISE, 3))
    trainer.save_checkpoint(path)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise"))
    trainer.validate(models[1], datamodule=EvaluatedBatches(TABLE_WISE, 1), ckpt_path=path)
    trained, loaded = models
    return trained.seen, loaded.seen, loaded.entries


def evaluate(case: Case, path: str | None, fn: str, weights: dict[str, Tensor] | None = None) -> Tensor:
    model = zeroed(Evaluated(case))
    if weights is not None:
        model.load_state_dict(weights)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise"))
    kwargs = {"return_predictions": False} if fn == "predict" else {}
    getattr(trainer, fn)(model, datamodule=EvaluatedBatches(case, 3), ckpt_path=path, **kwargs)
    return torch.stack(model.losses)


def train_with_savers(folder: str, save_last: Any, **options: Any) -> dict[str, Any]:
    case = TABLE_WISE
    of_steps: Any = {"every_n_train_steps": 4, "save_top_k": 1, "save_last": save_last}
    steps = ModelCheckpoint(f"{folder}/steps", filename="{step}", **of_steps)
    epochs = ModelCheckpoint(f"{folder}/epochs", filename="{epoch}", monitor="epoch", mode="max", save_top_k=2)

    def trainer(max_epochs: int, *callbacks: Callback) -> Trainer:
        strategy = OverlapEmbeddingStrategy(sharding="table_wise", **options)
        return make_trainer(strategy, enable_checkpointing=True, callbacks=list(callbacks), max_epochs=max_epochs)

    first = trainer(3, steps, epochs)
    model = Evaluated(case)
    first.fit(model, datamodule=EvaluatedBatches(case, EPOCH), ckpt_path="last")
    there = sorted(entry.relative_to(folder).as_posix() for entry in Path(folder).glob("*/*"))
    again = zeroed(Model(case))
    second = trainer(4, ModelCheckpoint(f"{folder}/steps", save_last=save_last))
    with logged(LOGGER) as words:
        second.fit(again, datamodule=Batches(case, EPOCH), ckpt_path="last")
    said = [text for text in words if "continues" in text]
    best = Path(epochs.best_model_path).name
    model.losses.clear()
    first.validate(model, datamodule=EvaluatedBatches(case, 2), ckpt_path="best")
    return {"there": there, "steps": second.global_step, "trained": len(again.losses), "best": best, "said": said}


class Keyed(Model):
    def configure_optimizers(self) -> Any:
        dense = dict(in_backward_optimizer_filter(self.named_parameters()))
        return KeyedOptimizerWrapper(dense, lambda params: torch.optim.Adam(params, 0.05))


class Scheduled(Model):
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        if self.trainer.global_step == 2:
            for _, fused in self.ebc.fused_optimizer.optimizers:
                fused.param_groups[0]["lr"] = 0.125
                fused.step()


class SteppedAtFirst(Model):
    """A run of two epochs has no scheduler."""

    def configure_optimizers(self) -> Any:
        optimizer = super().configure_optimizers()
        if self.trainer.max_epochs == 2:
            return optimizer
        return [optimizer], [torch.optim.lr_scheduler.StepLR(optimizer, 1, 0.5)]

    def on_train_end(self) -> None:
        [group] = self.trainer.optimizers[0].param_groups
        assert group["lr"] == 0.1  # after the first epoch, and as it was saved


class Opaque:
    """What torch.load does not load unless told to trust the file."""


class DenseAdam(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.Adam([p for _, p in in_backward_optimizer_filter(self.named_parameters())], 0.05)
