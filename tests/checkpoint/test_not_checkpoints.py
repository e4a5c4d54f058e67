"""What is not a checkpoint is named as what it is, by a fit and by an evaluation."""

import errno
import zipfile
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint import load_file, why_no_checkpoint

from ..support.cases import TABLE_WISE
from ..support.ranks import Ranks
from . import checkpoints

WHOLE = {"state_dict": {"a": torch.zeros(1000)}, "epoch": 0, "global_step": 0, "pytorch-lightning_version": "2.6.0"}


def saved(path: Path, content: Any = WHOLE, *, keep: float = 1.0, **options: Any) -> None:
    torch.save(content, path, **options)
    written = path.read_bytes()
    path.write_bytes(written[: int(keep * len(written))])


def zipped(path: Path) -> None:
    with zipfile.ZipFile(path, "w") as archive:
        archive.writestr("a.txt", "text")


def folder_of(*names: str) -> Callable[[Path], None]:
    def make(path: Path) -> None:
        path.mkdir()
        for name in names:
            (path / name).touch()

    return make


OLD = {"_use_new_zipfile_serialization": False}
PART = "g000001-s000000000010-r00000of00002-c00000of00001.arrow"
KINDS: dict[str, tuple[Callable[[Path], Any], str]] = {
    "empty": (Path.touch, "is no checkpoint: it is an empty file"),
    "text": (lambda path: path.write_text("hello"), "is no checkpoint: it is a text file that begins with 'hello'"),
    "lfs": (lambda path: path.write_text("version https://git-lfs.github.com/spec/v1\noid"), "Run git lfs pull"),
    "picture": (lambda path: path.write_bytes(b"\x89PNG\r\n\x1a\n"), "a file that torch.save has not written"),
    "zip": (zipped, "it is a zip archive that torch.save has not written"),
    "half": (lambda path: saved(path, keep=0.5), "is a truncated checkpoint: the end of the file is missing"),
    "almost": (lambda path: saved(path, keep=0.999), "is a truncated checkpoint: the end of the file is missing"),
    "half of an old one": (lambda path: saved(path, keep=0.5, **OLD), "is a damaged checkpoint: torch.load cannot"),
    "start of an old one": (lambda path: saved(path, keep=0.02, **OLD), "is a damaged checkpoint: torch.load cannot"),
    "list": (lambda path: saved(path, [1, 2]), "torch.save has written 'list' to it"),
    "weights": (lambda path: saved(path, {"w": torch.ones(2)}), "it has w, but no 'state_dict'"),
    "empty folder": (Path.mkdir, "is an empty folder"),
    "folder of checkpoints": (folder_of("epoch=0.ckpt", "last.ckpt"), "Pass one of them: epoch=0.ckpt, last.ckpt"),
    "deltas": (folder_of(PART), "is a folder of deltas"),
    "copy": (
        folder_of(".metadata", "__0_0.distcp"),
        "without checksums.json: a copy of a checkpoint that lacks",
    ),
    "folder": (folder_of("a.txt"), "is a folder without checksums.json and thus not a checkpoint"),
}


@pytest.fixture
def path(tmp_path: Path, what: str) -> Path:
    path = tmp_path / "a.ckpt"
    KINDS[what][0](path)
    return path


@pytest.mark.parametrize("what", KINDS)
def test_every_call_of_a_trainer_says_what_it_is(two_ranks: Ranks, path: Path, what: str) -> None:
    calls = ("fit", "validate", "test", "predict")
    for fn in calls if what in ("text", "empty folder") else (calls[list(KINDS).index(what) % 4],):
        first, second = two_ranks.run(checkpoints.load_from, TABLE_WISE, str(path), fn)
        assert first == second
        assert first.startswith(f"ValueError: {path} ")
        assert KINDS[what][1] in first


@pytest.mark.parametrize("what", KINDS)
def test_it_is_known_before_it_is_read(path: Path, what: str) -> None:
    why = why_no_checkpoint(path)
    if what in ("list", "weights", "half of an old one", "start of an old one"):
        assert why is None  # the kind of file is right: who reads it finds out
        return
    assert why is not None
    assert why.startswith(f"{path} ")
    assert KINDS[what][1] in why


def test_what_may_be_a_checkpoint_is_left_to_those_who_load_it(tmp_path: Path) -> None:
    for name, options in ({"new": {}, "old": OLD, "old_4": {**OLD, "pickle_protocol": 4}}).items():
        saved(tmp_path / name, **options)
        assert why_no_checkpoint(tmp_path / name) is None


def test_a_disk_that_fails_damages_no_checkpoint(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    def fail(*_: Any, **__: Any) -> None:
        raise OSError(errno.EIO, "Input/output error")

    saved(tmp_path / "a.ckpt")
    monkeypatch.setattr(torch, "load", fail)
    with pytest.raises(OSError, match="Input/output error"):
        load_file(tmp_path / "a.ckpt", weights_only=True)


def test_what_torch_load_has_read_is_no_path(two_ranks: Ranks) -> None:
    for message in two_ranks.run(load_content):
        assert "ckpt_path is the path of a checkpoint, or 'last', 'best', 'hpc' or 'registry', got a dict" in message


def load_content() -> str:
    with pytest.raises(TypeError) as info:
        checkpoints.load_from(TABLE_WISE, {"state_dict": {}})  # type: ignore[arg-type]
    return str(info.value)


def test_a_remote_file_is_named(tmp_path: Path) -> None:
    import fsspec

    with fsspec.open("memory://bucket/a.ckpt", "w") as file:
        file.write("hello")
    trainer = Trainer(
        strategy=OverlapEmbeddingStrategy(), accelerator="cpu", devices=1, logger=False, default_root_dir=tmp_path
    )
    with pytest.raises(Exception) as info:  # noqa: PT011  # fsspec's, pickle's or torch's
        trainer.strategy.load_checkpoint("memory://bucket/a.ckpt")
    assert "could not load memory://bucket/a.ckpt" in info.value.__notes__[0]
