"""Which checkpoint `ckpt_path="last"` is, where several could be it."""

import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import given
from hypothesis import strategies as st
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint import write_file
from lightning_overlap.plugin.checkpoint_hooks import _remove
from lightning_overlap.plugin.checkpoint_links import is_last
from lightning_overlap.storage import About, place_at

from ..support.cases import Batches
from ..support.fits import make_trainer
from .crashes import ONE_TABLE, Small, last_at
from .test_replaced_folders import save_at


def saved(path: Path, time: float, *stands_for: str, resumes: bool = True) -> None:
    content: dict[str, Any] = {"state_dict": {}, "optimizer_states": []}
    write_file(content, place_at(path), None, About(time, stands_for, resumes))


@given(times=st.tuples(st.integers(1, 3), st.integers(1, 3), st.integers(1, 3)), stands=st.booleans())
def test_the_newest_is_the_last_one(tmp_path_factory: Any, times: tuple[int, int, int], stands: bool) -> None:
    """By the time in it, whenever the file was written or copied; among equal ones the one with the name."""
    folder: Path = tmp_path_factory.mktemp("run")
    last, other, weights = times
    saved(folder / "step=9.ckpt", other, *(["last"] if stands else []))
    saved(folder / "last.ckpt", last)
    saved(folder / "last-v1.ckpt", weights, resumes=False)
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = last_at(folder)
    is_other = stands and other > last
    assert found == str(folder / ("step=9.ckpt" if is_other else "last.ckpt"))
    assert any("was saved after the last checkpoint" in str(one.message) for one in caught) == is_other


def test_weights_alone_are_the_last_one_if_there_is_no_other(tmp_path: Path) -> None:
    saved(tmp_path / "last.ckpt", 1, resumes=False)
    saved(tmp_path / "pretrained.ckpt", 2)
    assert last_at(tmp_path) == str(tmp_path / "last.ckpt")


@pytest.mark.parametrize(
    ("pattern", "name", "expected"),
    [
        ("last", "last.ckpt", True),
        ("last", "last-v3.ckpt", True),
        ("last", "step=1.ckpt", False),
        ("last", "last.txt", False),
        ("{epoch}-last", "epoch=1-last.ckpt", True),
        ("{epoch}-last", "epoch=1.ckpt", False),
        ("last-{step}", "last-step=3.ckpt", True),
    ],
)
def test_names_of_last_checkpoints(pattern: str, name: str, expected: bool) -> None:
    callback = ModelCheckpoint()
    callback.CHECKPOINT_NAME_LAST = pattern
    assert is_last([callback], name) == expected


class SavesAtAnError(Callback):
    def __init__(self, folder: Path) -> None:
        self.folder = folder

    def on_before_optimizer_step(self, trainer: Trainer, *_: Any) -> None:
        if trainer.global_step == 2:
            raise ValueError("an error within a step")

    def on_exception(self, trainer: Trainer, *_: Any) -> None:
        trainer.save_checkpoint(self.folder / "half.ckpt")


def fail_and_save(folder: str, checkpoint_format: str) -> bool:
    path, sgd = Path(folder), (torch.optim.SGD, {"lr": 0.5})
    saver = ModelCheckpoint(folder, "{step}", every_n_train_steps=1, save_last=True)
    strategy = OverlapEmbeddingStrategy(fused_optimizer=sgd, checkpoint_format=checkpoint_format)
    trainer = make_trainer(strategy, enable_checkpointing=True, callbacks=[SavesAtAnError(path), saver], max_epochs=1)
    with pytest.raises(ValueError, match="an error within a step"):
        trainer.fit(Small(), datamodule=Batches(ONE_TABLE, 6))
    return place_at(path / "half.ckpt").exists()


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_what_is_saved_after_an_error_is_not_the_last_one(
    get_ranks: Any, tmp_path: Path, checkpoint_format: str
) -> None:
    assert get_ranks(1).run(fail_and_save, str(tmp_path), checkpoint_format) == [True]
    assert last_at(tmp_path) == str(tmp_path / "last.ckpt")


def test_a_link_does_not_lead_to_another_folder(tmp_path: Path) -> None:
    last, one, other = (place_at(tmp_path / name) for name in ("a/last.ckpt", "a/e1.ckpt", "b/e2.ckpt"))
    save_at(one)
    save_at(other)
    last.lead(one)
    with pytest.raises(FileNotFoundError, match="is not beside"):
        last.lead(other)
    _remove(one, other, [ModelCheckpoint(save_last="link")])
    manifest = last.manifest()
    assert manifest is not None
    assert manifest.gone() == []
