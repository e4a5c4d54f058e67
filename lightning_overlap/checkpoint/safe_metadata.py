"""Read folders of `torch.distributed.checkpoint` without executing their content.

A folder's list of tensors is a pickle. Here it may name only classes of such a list, read as records without behaviour.
"""

import io
import pickle
from collections.abc import Mapping, Sequence
from dataclasses import fields
from math import prod
from typing import Any, TypeAlias

import torch
from torch.distributed.checkpoint import metadata as dcp
from torch.distributed.checkpoint.default_planner import DefaultLoadPlanner
from torch.distributed.checkpoint.filesystem import FileSystemReader
from torch.distributed.checkpoint.planner import ReadItem
from typing_extensions import override

from ..compat.torch import NAMES_IN_METADATA, StoragePlace
from ..storage import DamagedError, Manifest, damaged_part, is_plain_name
from .stored_files import CheckedFiles

_CLASSES = (dcp.MetadataIndex, dcp.TensorStorageMetadata, dcp.BytesStorageMetadata, dcp.ChunkStorageMetadata)
_REAL = {kind.__name__: kind for kind in (*_CLASSES, StoragePlace)}

LIST_NAME = ".metadata"

_RECORDS = {
    *((kind.__module__, name) for name, kind in _REAL.items()),
    *((dcp.__name__, name) for name in ("Metadata", "StorageMeta", "TensorProperties")),
    *NAMES_IN_METADATA,
    ("builtins", "getattr"),  # some versions of Python write enums with it
    *((module, name) for module in ("pathlib", "pathlib._local") for name in ("PosixPath", "WindowsPath")),
}
"""(module, name) that a pickle may contain and that are read as records."""

_VALUES: Mapping[tuple[str, str], Any] = {
    ("torch", "Size"): torch.Size,
    ("collections", "OrderedDict"): dict,
    **{("torch", name): value for name, value in vars(torch).items() if isinstance(value, torch.dtype)},
}
"""(module, name) -> value that a pickle may contain: builtin types and dtypes, which a pickle cannot change."""


class SafeReader(FileSystemReader):
    """Reads what a manifest lists without executing its `.metadata`; no file that is not as it was saved.

    Raises a DamagedError for a file that is, or for a tensor of which a part is nowhere.
    """

    def __init__(self, manifest: Manifest) -> None:
        super().__init__("")  # names are found by `fs`
        self._shown = manifest.shown
        self.fs = CheckedFiles(manifest)  # type: ignore[assignment]

    @override
    def read_metadata(self, *args: Any, **kwargs: Any) -> dcp.Metadata:
        with self.fs.create_stream(LIST_NAME, "rb") as file:
            try:
                state = _Unpickler(file).load().state
                entries = {str(name): _real(entry) for name, entry in state["state_dict_metadata"].items()}
                places = {_real(index): _real(place) for index, place in state["storage_data"].items()}
                for one in places.values():
                    if not is_plain_name(one.relative_path) or one.transform_descriptors:
                        raise pickle.UnpicklingError(f"it has a tensor in {one.relative_path!r}")
                paths = _paths(state.get("planner_data"))
                metadata = dcp.Metadata(entries, paths, places, version=state.get("version"))
            except Exception as err:  # the file may contain anything
                if isinstance(err, EOFError) or "truncated" in str(err):
                    what = "is truncated" if file.seek(0, io.SEEK_END) else "is empty"
                    raise DamagedError(damaged_part(self._shown, LIST_NAME, what)) from err
                raise RuntimeError(
                    f"{self._shown}/{LIST_NAME} is not a list of tensors as this strategy writes it; none of it was "
                    f"executed: {type(err).__name__}: {err}. Load another checkpoint, or copy this checkpoint again."
                ) from err
        metadata.storage_meta = dcp.StorageMeta(load_id=self.load_id)
        _check_whole(self._shown, metadata)
        return metadata


def _paths(planner_data: Any) -> dict[str, tuple[str | int, ...]]:
    """Return the names in a list -> the keys, one in the other, under which the state that was saved had them."""
    found = {str(name): tuple(keys) for name, keys in (planner_data or {}).items()}
    for name, keys in found.items():
        if not keys or not all(type(key) in (str, int) for key in keys):
            raise pickle.UnpicklingError(f"it has {name!r} at {keys!r}")
    return found


def _check_whole(shown: str, metadata: dcp.Metadata) -> None:
    """Raise a DamagedError unless each element of each tensor in a list is in one chunk, whose file is listed too."""
    for name, entry in metadata.state_dict_metadata.items():
        offsets: list[Sequence[int] | None] = [None]
        if isinstance(entry, dcp.TensorStorageMetadata):
            boxes = [(tuple(chunk.offsets), tuple(chunk.sizes)) for chunk in entry.chunks if prod(chunk.sizes)]
            num_listed = sum(prod(sizes) for _, sizes in boxes)
            if num_listed != prod(entry.size) or not _are_apart(boxes, tuple(entry.size)):
                what = f"lists {num_listed} of the {prod(entry.size)} elements of {name}, or some twice"
                raise DamagedError(damaged_part(shown, LIST_NAME, what))
            offsets = [offset for offset, _ in boxes]
        for offset in offsets:
            place = dcp.MetadataIndex(name, None if offset is None else torch.Size(offset))
            if place not in metadata.storage_data:
                raise DamagedError(damaged_part(shown, LIST_NAME, f"does not say where {name} is"))


_Box: TypeAlias = tuple[tuple[int, ...], tuple[int, ...]]
"""Offsets and sizes of a chunk."""


def _are_apart(boxes: Sequence[_Box], size: tuple[int, ...]) -> bool:
    """Return whether boxes are within a tensor's size and have no element in common."""
    open_boxes: list[_Box] = []  # that reach the rows of the next one
    for offsets, sizes in sorted(boxes):
        box = tuple(zip(offsets, sizes, strict=True))
        if any(start < 0 or start + length > most for (start, length), most in zip(box, size, strict=True)):
            return False
        open_boxes = [other for other in open_boxes if other[0][0] + other[1][0] > offsets[0]] if size else open_boxes
        for other in open_boxes:
            sides = zip(box, zip(*other, strict=True), strict=True)
            if all(a < b + size_b and b < a + size_a for (a, size_a), (b, size_b) in sides):
                return False
        open_boxes.append((offsets, sizes))
    return True


class SafePlanner(DefaultLoadPlanner):
    """Loads objects with `torch.load` and `weights_only`; the base class would execute their pickles."""

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
    """Keeps the state of an object in the list, and ignores constructor arguments."""

    state: Any = None

    def __init__(self, *_: Any) -> None: ...

    def __setstate__(self, state: Any) -> None:
        self.state = state


class _Unpickler(pickle.Unpickler):
    def __init__(self, file: Any) -> None:
        super().__init__(file)
        # A pickle can set attributes of classes: each reading gets new classes.
        self._known = {**{(module, name): type(name, (_Record,), {}) for module, name in _RECORDS}, **_VALUES}

    def find_class(self, module: str, name: str) -> Any:
        if (module, name) not in self._known:
            raise pickle.UnpicklingError(f"it names {module}.{name}")
        return self._known[module, name]


def _real(value: Any) -> Any:
    if isinstance(value, list):
        return [_real(one) for one in value]
    if not isinstance(value, _Record):
        return value
    if type(value).__name__ == dcp.TensorProperties.__name__:
        return dcp.TensorProperties(dtype=value.state[0])  # its other fields are deprecated
    kind = _REAL[type(value).__name__]
    known = {field.name for field in fields(kind)} & (value.state or {}).keys()  # a newer torch may write other fields
    return kind(**{name: _real(value.state[name]) for name in known})
