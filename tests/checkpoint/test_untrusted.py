"""A checkpoint from anywhere executes nothing, unless it is trusted."""

import os
import pickle
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from functools import partial
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex
from torch.distributed.checkpoint.state_dict_saver import save

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint.safe_metadata import SafeReader
from lightning_overlap.storage import DiskStore, Manifest, SavedFile, checksum_of

from ..support.cases import TABLE_WISE, Batches, Case
from ..support.fits import make_trainer
from ..support.saved import manifest_of
from .checkpoints import Evaluated, Opaque, load_from, save_to
from .damages import remake_manifest

MARK = "executed"


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


def _files(path: Path) -> Path:
    """Return the folder of a checkpoint's files."""
    return path / manifest_of(path).save


@contextmanager
def _list_of(path: Path) -> Iterator[Any]:
    path = _files(path)
    metadata = pickle.loads((path / ".metadata").read_bytes())
    yield metadata
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _elsewhere(path: Path, mark: Path) -> None:
    with _list_of(path) as metadata:
        for place in metadata.storage_data.values():
            place.relative_path = f"../{place.relative_path}"


def _evil_objects(path: Path, mark: Path) -> None:
    file = _files(path) / "meta.pt" if path.is_dir() else path
    torch.save({**torch.load(file, weights_only=True), "more": Evil(mark)}, file)


def _put(name: str, path: Path, mark: Path) -> None:
    torch.save(Evil(mark), _files(path) / "evil.distcp")
    with _list_of(path) as metadata:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        size = (_files(path) / "evil.distcp").stat().st_size
        metadata.storage_data[MetadataIndex(name)] = _StorageInfo("evil.distcp", 0, size)


HAS_OBJECTS = "contains objects that load only if you trust the file"
CHANGES: dict[str, tuple[str, Callable[[Path, Path], object], str]] = {
    "list": (
        "sharded",
        lambda path, mark: (_files(path) / ".metadata").write_bytes(pickle.dumps(Evil(mark))),
        "none of it was executed: UnpicklingError: it names posix.mkdir",
    ),
    "tensor": ("sharded", partial(_put, "model.bottom.0.bias"), "its bottom.0.bias are objects, not tensors"),
    "extra_state": ("sharded", partial(_put, "model._extra_state"), HAS_OBJECTS),
    "elsewhere": ("sharded", _elsewhere, "it has a tensor in '../"),
    "meta.pt": ("sharded", _evil_objects, HAS_OBJECTS),
    "file": ("full", _evil_objects, HAS_OBJECTS),
}


class WithState(Evaluated):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.told: Any = Opaque()

    def get_extra_state(self) -> Any:
        return self.told

    def set_extra_state(self, state: Any) -> None:
        self.told = state


def save_and_load_state(folder: str, *, trust: bool) -> tuple[str, Any]:
    path = f"{folder}/a.ckpt"
    model = WithState(TABLE_WISE)
    model.told.word = "kept"
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise", checkpoint_format="sharded"))
    trainer.fit(model, datamodule=Batches(TABLE_WISE, 1))
    trainer.save_checkpoint(path)
    again = WithState(TABLE_WISE)
    with torch.serialization.safe_globals([Opaque] if trust else []):
        said = load_from(TABLE_WISE, path, model_class=lambda case: again)
    return said, getattr(again.told, "word", None)


def load_changed(folder: str, what: str, fn: str, weights_only: bool | None) -> str:
    checkpoint_format, change, _ = CHANGES[what]
    path = Path(folder) / "a.ckpt"
    assert save_to(str(path), checkpoint_format=checkpoint_format) == "saved"
    change(path, Path(folder) / MARK)
    if path.is_dir():
        remake_manifest(path)
    model_class: type[nn.Module] = WithState if what == "extra_state" else Evaluated
    return load_from(TABLE_WISE, str(path), fn, weights_only=weights_only, model_class=model_class)


@pytest.mark.parametrize("what", CHANGES)
def test_nothing_is_executed(get_ranks: Any, what: str, tmp_path: Path) -> None:
    for fn, weights_only in (("validate", True), ("fit", None)):
        folder = tmp_path / fn
        [said] = get_ranks(1).run(load_changed, str(folder), what, fn, weights_only)
        assert said.startswith("RuntimeError: ")
        assert CHANGES[what][2] in said
        assert not (folder / MARK).exists()


def test_what_is_trusted_is_loaded(get_ranks: Any, tmp_path: Path) -> None:
    for num_ranks in (1, 2):
        run = partial(get_ranks(num_ranks).run, save_and_load_state, str(tmp_path / str(num_ranks)))
        assert run(trust=True) == [("loaded", "kept")] * num_ranks
        for said, _ in run(trust=False):
            assert HAS_OBJECTS in said
            assert "TORCH_FORCE_NO_WEIGHTS_ONLY_LOAD=1" in said


def test_what_a_newer_torch_adds_to_the_list_is_left_out(tmp_path: Path) -> None:
    store, save_name = DiskStore(tmp_path), f"save-{'0' * 32}"
    save({"a": torch.arange(3)}, checkpoint_id=tmp_path / "a" / save_name, no_dist=True)
    path = tmp_path / "a" / save_name / ".metadata"
    metadata = pickle.loads(path.read_bytes())
    for place in metadata.storage_data.values():
        vars(place)["newer"] = 1
    vars(metadata)["newer"] = 2
    content = pickle.dumps(metadata)
    path.write_bytes(content)
    files = {".metadata": SavedFile(len(content), checksum_of(content), save_name)}
    read = SafeReader(Manifest(store, "a", save_name, files)).read_metadata()
    assert read.state_dict_metadata == metadata.state_dict_metadata
    assert [place.relative_path for place in read.storage_data.values()] == ["__0_0.distcp"]
