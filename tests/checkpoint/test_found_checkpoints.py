"""A checkpoint that some ranks do not find or cannot read: every rank is told at once which rank, and where."""

import contextlib
import os
import shutil
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch.distributed as dist
from lightning.pytorch.callbacks import ModelCheckpoint

from lightning_overlap.storage import place_at

from ..laws.preempted import slurm
from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks

SOON_S = 20  # the groups wait for 60


def save_last(folders: list[str], **options: Any) -> None:
    """Train and keep a last checkpoint; each rank looks for it in its own folder, and rank 0's name counts."""
    _fit(folders, None, **options)


def _fit(folders: list[str], ckpt_path: str | None, fn: str = "fit", root: str | None = None, **options: Any) -> None:
    model = Model(TABLE_WISE)
    saving = ModelCheckpoint(folders[dist.get_rank()], save_last=True)
    kwargs = {"callbacks": [saving], "enable_checkpointing": True, "default_root_dir": root, "num_sanity_val_steps": 0}
    trainer = make_trainer(make_strategy(model, **options), **kwargs)
    getattr(trainer, fn)(model, datamodule=_Evaluated(TABLE_WISE, 3), ckpt_path=ckpt_path)


class _Evaluated(Batches):
    def val_dataloader(self) -> Any:
        return self.loader_of(range(2))


def load(folders: list[str], paths: list[str | None], fn: str = "fit", **options: Any) -> tuple[str, float]:
    """Load what each rank is told, in a working directory of its own; return the error, and after which time."""
    start = time.monotonic()
    with contextlib.chdir(folders[dist.get_rank()]):
        try:
            _fit(folders, paths[dist.get_rank()], fn, **options)
        except Exception as error:
            return f"{type(error).__name__}: {error}", time.monotonic() - start
    return "", time.monotonic() - start


def load_preempted(folders: list[str]) -> tuple[str, float]:
    """Start a job again whose tasks have root folders of their own."""
    mine = folders[dist.get_rank()]
    with slurm(mine), mock.patch.dict(os.environ):
        del os.environ["SLURM_NTASKS_PER_NODE"]
        return load(folders, [None] * 2, root=mine)


@pytest.fixture
def folders(tmp_path: Path) -> list[str]:
    found = [tmp_path / name for name in ("disk0", "disk1")]
    for folder in found:
        folder.mkdir()
    return list(map(str, found))


def assert_said(told: list[tuple[str, float]], *words: str) -> None:
    for said, seconds in told:
        assert all(word in said for word in words), said
        assert "a file system that all hosts share" in said
        assert seconds < SOON_S
    assert len({said for said, _ in told}) == 1


@pytest.mark.parametrize("finder", [0, 1])
def test_last_that_one_rank_does_not_find(two_ranks: Ranks, folders: list[str], finder: int) -> None:
    two_ranks.run(save_last, folders)  # in rank 0's folder
    told = two_ranks.run(load, folders if finder == 0 else folders[::-1], ["last", "last"])
    found = f"found {folders[0]}/last.ckpt"
    assert_said(told, f"FileNotFoundError: ckpt_path: rank {1 - finder} (on ", f"rank {finder} (on ", found)


@pytest.mark.parametrize("fn", ["fit", "validate"])
def test_a_path_that_only_one_rank_gives(two_ranks: Ranks, folders: list[str], fn: str) -> None:
    two_ranks.run(save_last, folders)
    path = f"{folders[0]}/last.ckpt"
    assert_said(two_ranks.run(load, folders, [None, path], fn), "rank 0 (on ", f"found {path}")


def test_a_preempted_job_whose_checkpoint_one_rank_does_not_find(two_ranks: Ranks, folders: list[str]) -> None:
    two_ranks.run(save_last, folders)
    Path(folders[0], "last.ckpt").rename(Path(folders[0], "hpc_ckpt_1.ckpt"))
    assert_said(two_ranks.run(load_preempted, folders), "rank 1 (on ", f"found {folders[0]}/hpc_ckpt_1.ckpt")


def damage(path: Path) -> None:
    path.write_bytes(path.read_bytes()[:100])


def replace(path: Path) -> None:
    path.unlink()
    path.mkdir()
    (path / "checksums.json").touch()


def meta_is_missing(path: Path) -> None:
    (path / "checksums.json").unlink()


ON_ONE_DISK: dict[str, tuple[str, Callable[[Path], Any], str]] = {
    "no file": ("full", Path.unlink, "rank 1 (on {}): FileNotFoundError: Checkpoint file not found: last.ckpt"),
    "a damaged file": ("full", damage, "rank 1 (on {}): "),
    "no folder": ("sharded", shutil.rmtree, "rank 1 (on {}): FileNotFoundError: Checkpoint file not found: last.ckpt"),
    "a part of a folder": (
        "sharded",
        meta_is_missing,
        "is a folder without checksums.json",
    ),
    "a folder beside a file": ("full", replace, "rank 0 (on {0}): a file, rank 1 (on {0}): a folder"),
}


@pytest.mark.parametrize("what", ON_ONE_DISK)
def test_what_one_host_has_on_its_own_disk(two_ranks: Ranks, folders: list[str], what: str) -> None:
    """Each rank's working directory stands for the disk of its host."""
    checkpoint_format, change, words = ON_ONE_DISK[what]
    two_ranks.run(save_last, folders, checkpoint_format=checkpoint_format)
    ours, theirs = (Path(folder, "last.ckpt") for folder in folders)
    (shutil.copytree if ours.is_dir() else shutil.copy)(ours, theirs)
    change(theirs)
    told = two_ranks.run(load, folders, ["last.ckpt", "last.ckpt"])
    assert_said(told, "last.ckpt", words.format(os.uname().nodename))


@pytest.mark.parametrize("checkpoint_format", ["full", "sharded"])
def test_copies_on_every_disk_load(two_ranks: Ranks, folders: list[str], checkpoint_format: str) -> None:
    two_ranks.run(save_last, folders, checkpoint_format=checkpoint_format)
    ours, theirs = (Path(folder, "last.ckpt") for folder in folders)
    (shutil.copytree if ours.is_dir() else shutil.copy)(ours, theirs)
    assert [said for said, _ in two_ranks.run(load, folders, ["last.ckpt", "last.ckpt"])] == ["", ""]


def test_a_last_checkpoint_that_leads_nowhere(two_ranks: Ranks, folders: list[str]) -> None:
    """Training would begin again, though a whole checkpoint lies beside the link."""
    shared = [folders[0]] * 2
    two_ranks.run(save_last, shared)
    last = Path(folders[0]) / "last.ckpt"
    last.rename(last.with_name("step=3.ckpt"))
    last.symlink_to("step=9.ckpt")
    told = two_ranks.run(load, shared, ["last"] * 2)
    for said, seconds in told:
        assert "last.ckpt leads to step=9.ckpt, which is gone. Pass ckpt_path=" in said
        assert "step=3.ckpt" in said
        assert seconds < SOON_S


def test_a_last_checkpoint_whose_files_are_gone(two_ranks: Ranks, folders: list[str]) -> None:
    """With save_last="link" it lists the files of another one, which somebody has renamed."""
    shared = [folders[0]] * 2
    two_ranks.run(save_last, shared)
    last = place_at(Path(folders[0]) / "last.ckpt")
    last.path.rename(last.path.with_name("step=3.ckpt"))
    last.lead(last.beside("step=3.ckpt"))
    last.path.with_name("step=3.ckpt").rename(last.path.with_name("kept.ckpt"))
    for said, _ in two_ranks.run(load, shared, ["last"] * 2):
        assert "last.ckpt leads to step=3.ckpt, which is gone. Pass ckpt_path=" in said
        assert "kept.ckpt" in said
