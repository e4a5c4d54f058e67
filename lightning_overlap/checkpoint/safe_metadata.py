"""Reads what `torch.distributed.checkpoint` writes without executing anything of it.

The list of a folder's tensors, `.metadata`, is a pickle: reading one calls what it names. Here it can name nothing but
what such a list consists of, and each of these names means an inert record, made anew for each reading. Of the records
the list is built. Objects that are no tensors are read by `torch.load`, with its `weights_only`.
"""

from __future__ import annotations

import io
import pickle
from collections.abc import Mapping
from pathlib import PurePath
from typing import Any, NoReturn

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader, _StorageInfo
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

_METADATA, _FILES = dcp.__name__, _StorageInfo.__module__
_RECORDS = {
    *((_METADATA, name) for name in ("Metadata", "MetadataIndex", "StorageMeta", "TensorProperties")),
    *((_METADATA, name) for name in ("TensorStorageMetadata", "BytesStorageMetadata", "ChunkStorageMetadata")),
    (_METADATA, "_MEM_FORMAT_ENCODING"),
    (_FILES, "_StorageInfo"),
    ("torch.serialization", "_get_layout"),
    ("builtins", "getattr"),  # by which some versions of Python write enums
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}
"""What a list of tensors may name, by module; each name means a record."""

_VALUES: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): tuple,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""And what it may name that means something."""


class SafeReader(FileSystemReader):
    """Reads a folder; whatever its `.metadata` holds, nothing of it is executed."""

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        path = PurePath(self.path) / ".metadata"
        with open(path, "rb") as file:
            try:
                metadata = _metadata(_Unpickler(file).load())
            except Exception as err:  # of whatever kind: it may hold anything
                raise RuntimeError(
                    f"{path} is not the list of tensors that this strategy writes; nothing of it was executed: "
                    f"{type(err).__name__}: {err}. Load another checkpoint, or copy this one anew from where it was "
                    "saved."
                ) from err
        metadata.storage_meta = dcp.StorageMeta(load_id=self.load_id)
        return metadata


class SafePlanner(DefaultLoadPlanner):
    """Loads objects as `torch.load` does with its `weights_only`, and not, as its parent, whatever they execute."""

    def __init__(self, weights_only: bool | None) -> None:
        super().__init__()
        self._weights_only = weights_only

    @override
    def load_bytes(self, read_item: ReadItem, value: io.BytesIO) -> None:
        *path, last = self.mappings[read_item.dest_index.fqn]
        target: Any = self.original_state_dict
        for key in path:
            target = target[key]
        target[last] = torch.load(value, map_location="cpu", weights_only=self._weights_only)


class _Record:
    """Something of the list: its state, and not what it was made with."""

    state: Any = None

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # A pickle can set attributes of what it names: so it gets classes of its own.
        self._kinds = {(module, name): type(name, (_Record,), {}) for module, name in _RECORDS}

    def find_class(self, module: str, name: str) -> Any:
        for known in (self._kinds, _VALUES):
            if (module, name) in known:
                return known[module, name]
        raise pickle.UnpicklingError(f"it names {module}.{name}")


def _metadata(record: Any) -> dcp.Metadata:
    fields = _state(record, dcp.Metadata)
    entries = {_of_type(name, str): _entry(entry) for name, entry in fields["state_dict_metadata"].items()}
    places = {_index(index): _place(place) for index, place in fields["storage_data"].items()}
    return dcp.Metadata(state_dict_metadata=entries, storage_data=places, version=fields.get("version"))


def _entry(record: Any) -> dcp.TensorStorageMetadata | dcp.BytesStorageMetadata:
    if type(record).__name__ == dcp.BytesStorageMetadata.__name__:
        return dcp.BytesStorageMetadata()
    fields = _state(record, dcp.TensorStorageMetadata)
    dtype, *_ = _state(fields["properties"], dcp.TensorProperties)
    chunks = [_state(chunk, dcp.ChunkStorageMetadata) for chunk in fields["chunks"]]
    return dcp.TensorStorageMetadata(
        dcp.TensorProperties(dtype=_of_type(dtype, torch.dtype)),
        torch.Size(fields["size"]),
        [dcp.ChunkStorageMetadata(torch.Size(chunk["offsets"]), torch.Size(chunk["sizes"])) for chunk in chunks],
    )


def _index(record: Any) -> dcp.MetadataIndex:
    fields = _state(record, dcp.MetadataIndex)
    offset = fields.get("offset")
    offset = None if offset is None else torch.Size(offset)
    return dcp.MetadataIndex(_of_type(fields["fqn"], str), offset, fields.get("index"))


def _place(record: Any) -> _StorageInfo:
    fields = _state(record, _StorageInfo)
    name = _of_type(fields["relative_path"], str)
    if PurePath(name).name != name or fields.get("transform_descriptors"):
        _refuse(f"a tensor in {name!r}")
    return _StorageInfo(name, _of_type(fields["offset"], int), _of_type(fields["length"], int))


def _state(record: Any, kind: type) -> Any:
    if not isinstance(record, _Record) or type(record).__name__ != kind.__name__:
        _refuse(f"{type(record).__name__} in the place of {kind.__name__}")
    return record.state


def _of_type(value: Any, kind: Any) -> Any:
    if not isinstance(value, kind):
        _refuse(f"{type(value).__name__} in the place of {kind.__name__}")
    return value


def _refuse(what: str) -> NoReturn:
    raise pickle.UnpicklingError(f"it has {what}")
