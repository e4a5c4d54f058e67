"""Fits in the mode `async_lookup`, with a staleness and switches. Functions that ranks run."""

import warnings
from typing import Any

import torch
from torch.utils.data import DataLoader

from lightning_overlap import OverlapEmbeddingStrategy, Stage

from ..checkpoint.resumes import SaveSteps, Stateful
from ..laws.uneven import Counts, Uneven
from ..support.cases import Batches, Case, Model, make_batch
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
from .variants import Variant

NUM_STEPS = 14  # more than elsewhere: they are exact, stale and exact again
OPTIONS = (
    *("staleness", "defer_update", "stash_gradients", "start_batch", "end_batch"),
    *("observer", "gradient_as_bucket_view"),
)


class Stretch(Batches):
    """Batches of one epoch after the other, no two alike."""

    def train_dataloader(self) -> DataLoader:
        start, rank = self.trainer.current_epoch * self.num_batches, self.trainer.global_rank
        batches = [make_batch(self.case, start + index, rank) for index in range(self.num_batches)]
        return DataLoader(batches, batch_size=None)


class StatefulBatches(Batches):
    def train_dataloader(self) -> Any:
        return Stateful(self.case, self.num_batches, self.trainer.global_rank)


def _strategy(model: Model, options: dict[str, Any]) -> OverlapEmbeddingStrategy:
    own = {name: options.pop(name) for name in OPTIONS if name in options}
    return make_strategy(model, "async_lookup", **own)


def _fit(case: Case, data: Batches, *, path: str | None = None, **options: Any) -> Result:
    model = Model(case)
    trainer = make_trainer(_strategy(model, options), **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=data, ckpt_path=path)
    return collect(model, trainer.optimizers[0], model.losses)


def fit(case: Case, *, num_steps: int = NUM_STEPS, **options: Any) -> Result:
    return _fit(case, Variant(case, "dataclass", num_steps), **{"limit_val_batches": 0, **options})


def fit_epochs(case: Case, num_batches: int, num_epochs: int, **options: Any) -> Result:
    """Train epochs that go on with the batches where the one before ended."""
    return _fit(case, Stretch(case, num_batches), max_epochs=num_epochs, reload_dataloaders_every_n_epochs=1, **options)


def fit_and_save(case: Case, num_steps: int, stop: int, folder: str, **options: Any) -> Result:
    return _fit(case, StatefulBatches(case, num_steps), callbacks=[SaveSteps(folder, (stop,))], **options)


def go_on(case: Case, num_steps: int, stop: int, folder: str, **options: Any) -> Result:
    return _fit(case, StatefulBatches(case, num_steps), path=f"{folder}/step={stop}.ckpt", **options)


def watched(case: Case, **options: Any) -> tuple[list[int], int]:
    """Train; return the batches in the order of their lookups, and the most that were in flight at once."""
    lookups: list[int] = []
    in_flight: set[int] = set()
    most = 0

    def observe(kind: str, stage: Stage, batch: int) -> None:
        nonlocal most
        if kind != "issue":
            return
        if stage is Stage.EMBEDDING_LOOKUP:
            lookups.append(batch)
        if stage is Stage.COPY_BATCH_TO_DEVICE:
            in_flight.add(batch)
        if stage is Stage.OPTIMIZER_STEP:
            in_flight.discard(batch)
        most = max(most, len(in_flight))

    fit(case, observer=observe, **options)
    return lookups, most


def fit_uneven(lengths: tuple[int, int], **options: Any) -> list[tuple[int, int]]:
    """Train two epochs of unequal data; return `(epoch, batch)` of each step."""
    model = Counts()
    trainer = make_trainer(_strategy(model, options), max_epochs=2, num_sanity_val_steps=0, **options)
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        trainer.fit(model, datamodule=Uneven(lengths, True))
    assert torch.stack(model.losses).isfinite().all()
    return [entry[:2] for entry in model.seen if entry != "validation"]


class WithLBFGS(Model):
    def configure_optimizers(self) -> torch.optim.Optimizer:
        [group] = super().configure_optimizers().param_groups
        return torch.optim.LBFGS(group["params"])


def with_lbfgs(case: Case) -> str:
    model = WithLBFGS(case)
    trainer = make_trainer(_strategy(model, {"staleness": 1, "stash_gradients": True}))
    with warnings.catch_warnings():
        warnings.simplefilter("ignore")
        try:
            trainer.fit(model, datamodule=Batches(case, 4))
        except RuntimeError as error:
            return str(error)
    return "nothing"
