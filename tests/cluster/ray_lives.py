"""Three lives of the workers of one training by Ray, on Ray Data: killed, refused, resumed. Run it with a folder."""

import json
import os
import re
import signal
import sys
from pathlib import Path
from typing import Any
from unittest import mock

import numpy as np
import ray
import ray.data
from lightning.pytorch import Callback, Trainer, seed_everything
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.plugins.environments import LightningEnvironment
from numpy.typing import NDArray
from ray.train import FailureConfig, RunConfig, ScalingConfig
from ray.train.lightning import RayLightningEnvironment, RayTrainReportCallback, prepare_trainer
from ray.train.torch import TorchTrainer

from lightning_overlap.data import RecBatch
from lightning_overlap.data.batch import collate_batch
from lightning_overlap.models import DLRM
from lightning_overlap.ray import RayOverlapStrategy

from ..support.ranks import ROOT

STEPS_OF_EPOCH, NUM_EPOCHS, SAVE_EVERY, KILLED_AT = 8, 3, 5, 11
ROWS = {"a": 100, "b": 50}
BATCH_SIZE, NUM_WORKERS = 32, 2


class Records(Callback):
    """Writes each step's loss, with all its bits, and kills rank 1 in its first life, right after a report."""

    def __init__(self, file: Path, kills: bool) -> None:
        self.file, self.kills = file, kills

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, *args: Any) -> None:
        with self.file.open("a", encoding="utf-8") as file:
            print(json.dumps([trainer.global_step, outputs["loss"].item().hex()]), file=file)
        if self.kills and trainer.global_step == KILLED_AT:
            os.kill(os.getpid(), signal.SIGKILL)


def collate(columns: dict[str, NDArray[Any]]) -> RecBatch:
    number = columns["id"]
    ids = np.concatenate([number % ROWS["a"], number * 7 % ROWS["b"]])
    dense = np.stack([np.sin(number), np.cos(number)], axis=1)
    return collate_batch(list(ROWS), dense, ids, np.ones((2, len(number)), dtype=np.int64), number % 3 == 0)


def resumable(batches: Any) -> Any:
    """Return batches with a state, as the page shows it."""
    page, names = (ROOT / "docs" / "clusters.md").read_text(encoding="utf-8"), dict[str, Any]()
    block = re.search(r"^```python\n(class Resumable\b.*?)^```$", page, flags=re.DOTALL | re.MULTILINE)
    assert block is not None
    exec(block[1], names)
    return names["Resumable"](batches)


def make_trainer(callbacks: list[Callback], **options: Any) -> Trainer:
    options = {"strategy": RayOverlapStrategy(), "plugins": [RayLightningEnvironment()]} | options
    saves = any(isinstance(callback, ModelCheckpoint) for callback in callbacks)
    quiet = {"max_epochs": NUM_EPOCHS, "logger": False, "enable_progress_bar": False, "enable_model_summary": False}
    return Trainer(accelerator="cpu", callbacks=callbacks, enable_checkpointing=saves, **{**quiet, **options})


def life(folder: str) -> None:
    """A worker: the first life trains until it is killed, the second forgets to resume, the third resumes."""
    rank = ray.train.get_context().get_world_rank()
    number = len(list(Path(folder).glob(f"rank{rank}.life*")))
    file = Path(folder, f"rank{rank}.life{number}")
    file.touch()

    def fit(callbacks: list[Callback], ckpt_path: str | None = None, **options: Any) -> None:
        seed_everything(0)
        batches = ray.train.get_dataset_shard("train").iter_torch_batches(batch_size=BATCH_SIZE, collate_fn=collate)
        model = DLRM(ROWS, 2, table_learning_rate=0.05)
        make_trainer(callbacks, **options).fit(model, resumable(batches), ckpt_path=ckpt_path)

    def refused(*callbacks: Callback, **options: Any) -> None:
        try:
            fit(list(callbacks), **options)
        except (RuntimeError, ValueError) as err:
            with file.open("a", encoding="utf-8") as out:
                print(json.dumps([type(err).__name__, str(err)]), file=out)
        else:
            raise AssertionError("it was not refused")

    saves = ModelCheckpoint(f"{folder}/saved", "{step}", every_n_train_steps=SAVE_EVERY, save_last=True)
    reports = RayTrainReportCallback()
    if number == 0:
        refused(plugins=[LightningEnvironment()])
        refused(ModelCheckpoint("saved", save_last=True))
        trainer = make_trainer([])
        assert prepare_trainer(trainer) is trainer
        assert (trainer.world_size, trainer.strategy.num_processes) == (NUM_WORKERS, NUM_WORKERS)
        fit([Records(file, kills=rank == 1), saves, reports])
    elif number == 1:
        refused(reports)
        with mock.patch.object(ray.train, "get_checkpoint", return_value=None):
            RayOverlapStrategy._has_begun = False  # as in a third life, with a script that does not report
            refused(saves)
        raise RuntimeError("the second life ends")
    else:
        checkpoint = ray.train.get_checkpoint()
        assert checkpoint is not None
        with checkpoint.as_directory() as found:
            path = Path(found, RayTrainReportCallback.CHECKPOINT_NAME)
            assert path.is_file(), "not one full file"
            fit([Records(file, kills=False), reports], str(path))
        fit([Records(file, kills=False)], f"{folder}/saved/last.ckpt")  # of the middle of an epoch
        fit([], max_epochs=1)  # a later fit may begin at step 0


if __name__ == "__main__":
    [storage] = sys.argv[1:]
    ray.init(num_cpus=NUM_WORKERS + 1, include_dashboard=False, object_store_memory=100_000_000)  # one for Ray Data
    ray.data.DataContext.get_current().execution_options.preserve_order = True
    num_rows = NUM_WORKERS * STEPS_OF_EPOCH * BATCH_SIZE
    TorchTrainer(
        life,
        train_loop_config=storage,
        datasets={"train": ray.data.range(num_rows, override_num_blocks=8)},
        scaling_config=ScalingConfig(num_workers=NUM_WORKERS),
        run_config=RunConfig(name="run", storage_path=storage, failure_config=FailureConfig(max_failures=2)),
    ).fit()
    ray.shutdown()
