"""Fits in the mode `async_lookup`, with a staleness and switches. Functions that ranks run."""

from typing import Any

from torch.utils.data import DataLoader

from ..checkpoint.resumes import SaveSteps, Stateful
from ..support.cases import Batches, Case, Model
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect
from .variants import Variant

NUM_STEPS = 14  # more than elsewhere: they are exact, stale and exact again
OPTIONS = ("staleness", "defer_update", "start_batch", "end_batch", "gradient_as_bucket_view")


class Stretch(Batches):
    """Batches of one epoch after the other, no two alike."""

    def train_dataloader(self) -> DataLoader:
        start = self.trainer.current_epoch * self.num_batches
        return self.loader_of(range(start, start + self.num_batches))


class StatefulBatches(Batches):
    def train_dataloader(self) -> Any:
        return Stateful(self.case, self.num_batches, self.trainer.global_rank)


def _fit(case: Case, data: Batches, *, path: str | None = None, **options: Any) -> Result:
    model = Model(case)
    own = {name: options.pop(name) for name in OPTIONS if name in options}
    trainer = make_trainer(make_strategy(model, "async_lookup", **own), **options)
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
