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
import torch.distributed.checkpoint as dcp
from torch import nn
from torch.distributed.checkpoint.filesystem import _StorageInfo
from torch.distributed.checkpoint.metadata import BytesStorageMetadata, MetadataIndex

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.checkpoint.safe_metadata import SafeReader

from ..support.cases import TABLE_WISE, Batches, Case
from ..support.fits import make_trainer
from .checkpoints import Evaluated, Opaque, load_from, save_to

MARK = "executed"


class Evil:
    def __init__(self, mark: Path) -> None:
        self.mark = str(mark)

    def __reduce__(self) -> Any:
        return os.mkdir, (self.mark,)


@contextmanager
def _list_of(path: Path) -> Iterator[Any]:
    metadata = pickle.loads((path / ".metadata").read_bytes())
    yield metadata
    (path / ".metadata").write_bytes(pickle.dumps(metadata))


def _evil_inside_list(path: Path, mark: Path) -> None:
    with _list_of(path) as metadata:
        metadata.planner_data = Evil(mark)


def _elsewhere(path: Path, mark: Path) -> None:
    with _list_of(path) as metadata:
        for place in metadata.storage_data.values():
            place.relative_path = f"../{place.relative_path}"


def _evil_rest(path: Path, mark: Path) -> None:
    rest = torch.load(path / "meta.pt", weights_only=True)
    torch.save({**rest, "more": Evil(mark)}, path / "meta.pt")


def _evil_file(path: Path, mark: Path) -> None:
    torch.save({**torch.load(path, weights_only=True), "more": Evil(mark)}, path)


def _put(name: str, path: Path, mark: Path) -> None:
    torch.save(Evil(mark), path / "evil.distcp")
    with _list_of(path) as metadata:
        metadata.state_dict_metadata[name] = BytesStorageMetadata()
        size = (path / "evil.distcp").stat().st_size
        metadata.storage_data[MetadataIndex(name)] = _StorageInfo("evil.distcp", 0, size)


NAMES_MKDIR = "none of it was executed: UnpicklingError: it names posix.mkdir"
HAS_OBJECTS = "contains objects that load only if you trust the file"
CHANGES: dict[str, tuple[str, Callable[[Path, Path], object], str]] = {
    "list": ("sharded", lambda path, mark: (path / ".metadata").write_bytes(pickle.dumps(Evil(mark))), NAMES_MKDIR),
    "in_list": ("sharded", _evil_inside_list, NAMES_MKDIR),
    "tensor": ("sharded", partial(_put, "model.bottom.0.bias"), "its bottom.0.bias are objects, not tensors"),
    "extra_state": ("sharded", partial(_put, "model._extra_state"), HAS_OBJECTS),
    "elsewhere": ("sharded", _elsewhere, "it has a tensor in '../"),
    "meta.pt": ("sharded", _evil_rest, HAS_OBJECTS),
    "file": ("full", _evil_file, HAS_OBJECTS),
}


class WithState(Evaluated):
    def __init__(self, case: Case, told: Any = None) -> None:
        super().__init__(case)
        self.told = Opaque() if told is None else told

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
        folder = tmp_path / str(num_ranks)
        told = get_ranks(num_ranks).run(save_and_load_state, str(folder), trust=True)
        assert told == [("loaded", "kept")] * num_ranks
    for said, _ in get_ranks(2).run(save_and_load_state, str(tmp_path / "_"), trust=False):
        assert HAS_OBJECTS in said


def test_what_a_newer_torch_adds_to_a_list_is_left_out(tmp_path: Path) -> None:
    dcp.save({"a": torch.arange(3)}, checkpoint_id=tmp_path, no_dist=True)
    written = pickle.loads((tmp_path / ".metadata").read_bytes())
    for place in written.storage_data.values():
        vars(place)["newer"] = 1
    vars(written)["newer"] = 2
    (tmp_path / ".metadata").write_bytes(pickle.dumps(written))
    read = SafeReader(tmp_path).read_metadata()
    assert read.state_dict_metadata == written.state_dict_metadata
    assert [place.relative_path for place in read.storage_data.values()] == ["__0_0.distcp"]
