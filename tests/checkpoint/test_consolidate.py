"""A folder made into a full file is what a full save of the same step would have written, entry by entry."""

import os
import shutil
import subprocess
import sys
import warnings
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.loggers.logger import DummyLogger
from torch import Tensor, nn

from lightning_overlap import ExponentialMovingAverage, open_checkpoint
from lightning_overlap.checkpoint import resolve_path
from lightning_overlap.consolidate import main
from lightning_overlap.plugin.first_words import LOGGER
from lightning_overlap.storage import DamagedError, place_at, read_seal

from ..plugin.strategies import logged
from ..support.cases import ROWWISE_ADAGRAD, Batches, Case, Model, TableSpec
from ..support.disk_changes import before_each_change, killed_before
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import RankError, Ranks
from ..support.saved import files_of, is_increment
from . import object_store, stores
from .damages import flip

KINDS = ("table_wise", "row_wise", "column_wise", "data_parallel")
ALL = Case(
    "consolidated",
    tuple(TableSpec(f"t{n}", (f"f{n}",), sharding=kind, dim=16) for n, kind in enumerate(KINDS)),
    optimizer=ROWWISE_ADAGRAD.optimizer,
)


class Remembers(nn.Module):
    """Has state that is no tensor, and perhaps tensors within it."""

    def __init__(self, state: Any) -> None:
        super().__init__()
        self.state = state

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class WithExtraState(Model):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.nested = Remembers({"seen": [torch.arange(3), torch.ones(2)], "a.b": {"c/d": torch.zeros(1)}, "x": "y"})
        self.words = Remembers("only words")


class SavesBoth(Callback):
    """Saves what a fit has in the end as a folder and as a full file; before it once, for increments to stand on."""

    def __init__(self, folder: str) -> None:
        self.folder = folder

    def on_train_batch_end(self, trainer: Trainer, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx == 3:
            trainer.save_checkpoint(f"{self.folder}/early.ckpt")

    def on_train_epoch_end(self, trainer: Trainer, pl_module: Any) -> None:
        trainer.save_checkpoint(f"{self.folder}/last.ckpt")
        trainer.strategy.checkpoint_format = "full"  # type: ignore[attr-defined]
        trainer.save_checkpoint(f"{self.folder}/full.ckpt")


def save_both(folder: str, checkpoint_format: str) -> None:
    model = WithExtraState(ALL)
    strategy = make_strategy(model, checkpoint_format=checkpoint_format, most_increments=10)
    callbacks = [ExponentialMovingAverage(0.5, tables=["t0"]), SavesBoth(folder)]
    make_trainer(strategy, callbacks=callbacks).fit(model, datamodule=Batches(ALL, 6))


def differences(one: Any, other: Any, place: str = "") -> list[str]:
    """Name the places where two nested values differ."""
    if type(one) is not type(other):
        return [place]
    if isinstance(other, Tensor):
        alike = (one.dtype, one.layout) == (other.dtype, other.layout)
        return [] if alike and torch.equal(one.to_dense(), other.to_dense()) else [place]
    if isinstance(other, dict):
        found = [f"{place}/{key}" for key in one.keys() ^ other.keys()]
        for key in one.keys() & other.keys():
            found += differences(one[key], other[key], f"{place}/{key}")
        return found
    if isinstance(other, list | tuple):
        pairs = enumerate(zip(one, other, strict=False))
        return [place] * (len(one) != len(other)) + [
            where for number, pair in pairs for where in differences(*pair, f"{place}/{number}")
        ]
    return [] if one == other else [place]


@pytest.mark.parametrize("checkpoint_format", ["sharded", "incremental"])
def test_a_consolidated_folder_equals_a_full_save(ranks: Ranks, tmp_path: Path, checkpoint_format: str) -> None:
    ranks.run(save_both, str(tmp_path), checkpoint_format)
    assert is_increment(tmp_path / "last.ckpt") == (checkpoint_format == "incremental")
    out = tmp_path / "out" / "a.ckpt"
    assert main([str(tmp_path / "last.ckpt"), str(out)]) == 0
    one, other = (torch.load(path, weights_only=True) for path in (out, tmp_path / "full.ckpt"))
    assert differences(one, other) == []
    assert other["lightning_overlap_fused_optimizer"]
    assert other["lightning_overlap_averages"]
    seal = read_seal(out)
    assert seal is not None
    seal.check()
    assert [path.name for path in out.parent.iterdir()] == ["a.ckpt"]
    for path in (out, tmp_path / "full.ckpt", tmp_path / "last.ckpt"):
        with open_checkpoint(path) as file:
            loaded = WithExtraState.load_from_checkpoint(file, case=ALL, weights_only=True)
        assert differences(loaded.state_dict(), other["state_dict"]) == []
    flip(next((tmp_path / "last.ckpt").rglob("*.distcp")), 500)
    flip(tmp_path / "full.ckpt", 500)
    for path in (tmp_path / "last.ckpt", tmp_path / "full.ckpt"):
        with pytest.raises(DamagedError, match="is a damaged checkpoint"):
            open_checkpoint(path)
    with pytest.raises(ValueError, match="is a folder of checkpoints"):
        open_checkpoint(tmp_path)


class Uploads(DummyLogger):
    """As Lightning's loggers for W&B and MLflow are, which `tests/compat` looks at."""

    def __init__(self, log_model: bool) -> None:
        super().__init__()
        self._log_model = log_model


def said_of_saves(folder: str, checkpoint_format: str, log_model: bool, saves: bool) -> dict[str, Any]:
    """Return what a fit that saves twice and its resume log and warn of."""
    said: dict[str, Any] = {}
    with logged(LOGGER) as seen, warnings.catch_warnings(record=True, action="always") as caught:
        for epochs in (1, 2):
            model = Model(ALL)
            strategy = make_strategy(model, checkpoint_format=checkpoint_format)
            callbacks = [ModelCheckpoint(folder, save_last=True, every_n_train_steps=2)] if saves else []
            trainer = make_trainer(
                strategy, callbacks=callbacks, logger=Uploads(log_model), max_epochs=epochs, enable_checkpointing=saves
            )
            trainer.fit(model, datamodule=Batches(ALL, 4), ckpt_path=f"{folder}/last.ckpt" if epochs == 2 else None)
            if not saves:
                trainer.save_checkpoint(f"{folder}/last.ckpt")
        said |= {"folders": [text for text in seen if "load_from_checkpoint takes" in text]}
        said |= {"uploads": [text for text in seen if "uploads no checkpoint" in text]}
    return said | {"warned": [str(one.message) for one in caught if "torch.distributed is" in str(one.message)]}


@pytest.mark.parametrize(
    ("checkpoint_format", "log_model", "saves"),
    [("sharded", True, True), ("incremental", False, True), ("sharded", True, False), ("full", True, True)],
)
def test_what_a_save_of_a_folder_says(
    ranks: Ranks, tmp_path: Path, checkpoint_format: str, log_model: bool, saves: bool
) -> None:
    """How it is read without this strategy, once a strategy; that no logger uploads it; and nothing of torch's own."""
    first, *others = ranks.run(said_of_saves, str(tmp_path), checkpoint_format, log_model, saves)
    assert all(other == {"folders": [], "uploads": [], "warned": []} for other in others)
    assert first["warned"] == []
    is_folder = checkpoint_format != "full"
    assert len(first["folders"]) == (2 if is_folder else 0)  # each fit has a strategy of its own
    for text in first["folders"]:
        assert "lightning_overlap.open_checkpoint(FOLDER)" in text
        assert "python -m lightning_overlap.consolidate FOLDER" in text
    assert len(first["uploads"]) == (2 if log_model and saves and is_folder else 0)
    for text in first["uploads"]:
        assert "Uploads with log_model" in text
        assert "checkpoint_format='full'" in text


@pytest.mark.slow
def test_the_command_says_the_name_of_its_file_alone(get_ranks: Any, tmp_path: Path) -> None:
    get_ranks(1).run(save_both, str(tmp_path), "sharded")
    command = [sys.executable, "-m", "lightning_overlap.consolidate", "last.ckpt"]
    done = subprocess.run(command, cwd=tmp_path, capture_output=True, text=True, timeout=100)
    assert (done.returncode, done.stdout, done.stderr) == (0, "last.ckpt.consolidated\n", "")


def consolidate_and_crash(folder: Path, how: str, in_store: bool) -> int:
    """Look at what a crash before any change of the disk leaves, and consolidate again there; return how many differ.

    The folder that is read is on the same disk, or in an object store.
    """
    run, source = (stores.RUN, folder / "store") if in_store else (str(folder / "run"), folder / "run")
    outs, left = folder / "outs", set()
    first = outs / "0" / "a.ckpt"

    def look() -> None:
        there = sorted(first.parent.iterdir()) if first.parent.exists() else []
        sizes = tuple((path.suffix, path.stat().st_size) for path in there)
        if sizes not in left:
            left.add(sizes)
            for path in there:
                (outs / str(len(left))).mkdir(exist_ok=True)
                shutil.copy2(path, outs / str(len(left)))

    with object_store.store_in(folder / "store"), warnings.catch_warnings(action="ignore"):
        stores.fit(how, 3, address=run)
        before = {path: path.read_bytes() for path in source.rglob("*") if path.is_file()}
        with before_each_change(look):
            assert main([f"{run}/last.ckpt", str(first)]) == 0
        look()
        for number in range(1, len(left) + 1):
            out = outs / str(number) / "a.ckpt"
            for unfinished in out.parent.glob(".a.ckpt.*.unfinished"):
                with pytest.raises(ValueError, match="is the leftover of an unfinished save"):
                    resolve_path(place_at(unfinished))
            expected = 2 if out.exists() else 0  # it replaces no file
            assert main([f"{run}/last.ckpt", str(out)]) == expected
            assert out.read_bytes() == first.read_bytes()
            assert os.listdir(out.parent) == ["a.ckpt"]
        assert {path: path.read_bytes() for path in source.rglob("*") if path.is_file()} == before
    return len(left)


def consolidate_until_killed(source: str, store: Path, out: str, num: int) -> None:
    """SIGKILL ends this process before its `num`th change of the disk."""
    with object_store.store_in(store), killed_before(num):
        main([source, out])


@pytest.mark.parametrize("in_store", [False, True], ids=["disk", "store"])
@pytest.mark.parametrize("how", ["sharded", "incremental"])
def test_a_crash_at_any_change(get_ranks: Any, how: str, in_store: bool, tmp_path: Path) -> None:
    """A file of that name is whole; the folder is as it was; the next call makes the file, and leaves nothing else."""
    [num_left] = get_ranks(1).run(consolidate_and_crash, tmp_path, how, in_store)
    assert num_left >= 4  # nothing, an empty file, a part, the whole file


@pytest.mark.slow
@pytest.mark.parametrize("in_store", [False, True], ids=["disk", "store"])
def test_a_command_that_is_killed(get_ranks: Any, in_store: bool, tmp_path: Path) -> None:
    run, out = stores.RUN if in_store else str(tmp_path / "run"), str(tmp_path / "out" / "a.ckpt")
    get_ranks(1).run(consolidate_and_crash, tmp_path, "sharded", in_store)
    whole = (tmp_path / "outs" / "0" / "a.ckpt").read_bytes()
    for num in (2, 3, 4):
        with pytest.raises(RankError):
            get_ranks(1).run(consolidate_until_killed, f"{run}/last.ckpt", tmp_path / "store", out, num)
        assert not Path(out).exists()
    with object_store.store_in(tmp_path / "store"):
        assert main([f"{run}/last.ckpt", out]) == 0
    assert Path(out).read_bytes() == whole
    assert os.listdir(Path(out).parent) == ["a.ckpt"]


def test_what_cannot_be_consolidated_is_named(
    two_ranks: Ranks, tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    two_ranks.run(save_both, str(tmp_path), "sharded")
    folder, there = tmp_path / "last.ckpt", tmp_path / "there"
    there.touch()
    for arguments, words in (
        ([tmp_path / "full.ckpt"], "is no checkpoint folder, but perhaps a file already"),
        ([tmp_path / "none"], "Checkpoint file not found"),
        ([tmp_path], "is a folder of checkpoints"),
        ([folder, there], "there exists"),
    ):
        assert main([str(one) for one in arguments]) == 2
        assert words in capsys.readouterr().err
    flip(files_of(folder)["__0_0.distcp"], 500)
    assert main([str(folder)]) == 2
    assert "is a damaged checkpoint: its __" in capsys.readouterr().err
    assert not any("consolidated" in path.name for path in tmp_path.iterdir())
