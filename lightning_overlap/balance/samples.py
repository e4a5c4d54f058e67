"""The samples of a batch: which of its fields have one part for each, as bytes for other ranks, and together again."""

import copy
import pickle
from collections.abc import Callable, Mapping, Sequence
from enum import Enum
from typing import Any, Protocol

import numpy as np
import torch
from numpy.typing import NDArray
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from ..runtime import leaves, path_text
from .options import Balance

Bytes = NDArray[np.uint8]
Places = NDArray[np.int64]  # of samples in a batch, ascending
OWN = "Give Balance the functions split and join for such batches"

_CONSTANTS = (type(None), bool, int, float, complex, str, bytes, Enum, np.generic, torch.dtype, torch.device)


class Samples(Protocol):
    """A batch, seen as samples."""

    count: int
    """How many samples it has."""

    def describe(self) -> list[tuple[str, str]]:
        """Return the fields and what they are, in a fixed order: ranks with other descriptions exchange nothing."""

    def pack(self, places: Places) -> list[Bytes]:
        """Return samples as bytes, which another rank's `join` can read."""

    def join(self, chunks: Sequence[Bytes], counts: Sequence[int]) -> Any:
        """Return the batch of the samples in `chunks`, one chunk after the other; `counts` are samples of each."""


def samples_of(batch: Any, count: int, balance: Balance) -> Samples:
    """Return the samples of a batch that has `count` of them; raise a ValueError that names a field without samples."""
    if balance.split is not None and balance.join is not None:
        return _UsersSamples(list(balance.split(batch)), count, balance.join)
    return _FieldSamples(batch, count)


class _UsersSamples:
    """Samples that the user's functions split and join."""

    def __init__(self, samples: Sequence[Any], count: int, join: Callable[[list[Any]], Any]) -> None:
        if len(samples) != count:
            raise ValueError(f"split returned {len(samples)} samples, cost returned {count} numbers.")
        self.count, self._samples, self._join = count, samples, join

    def describe(self) -> list[tuple[str, str]]:
        return [("batch", "split by the user's function")]

    def pack(self, places: Places) -> list[Bytes]:
        return [np.frombuffer(pickle.dumps([self._samples[place] for place in places.tolist()]), np.uint8)]

    def join(self, chunks: Sequence[Bytes], counts: Sequence[int]) -> Any:
        return self._join([sample for chunk in chunks if len(chunk) for sample in pickle.loads(chunk.tobytes())])


class _FieldSamples:
    """Samples of a batch of tensors in containers; other values are constants, the same on all ranks."""

    def __init__(self, batch: Any, count: int) -> None:
        self.count, self._batch = count, batch
        self._fields: list[tuple[str, _Field]] = []
        self._constants: list[tuple[str, str]] = []
        for path, leaf in sorted(((path_text(path), leaf) for path, leaf in leaves(batch, _is_field)), key=_by_path):
            if (field := _field_of(path, leaf, count)) is not None:
                self._fields.append((path, field))
            else:
                self._constants.append((path, f"{_constant_kind(leaf)} {_constant(path, leaf)!r}"))
        if not self._fields:
            raise ValueError(f"a batch of the type {type(batch).__name__} has no tensor with samples. {OWN}.")

    def describe(self) -> list[tuple[str, str]]:
        return [*((path, field.description) for path, field in self._fields), *self._constants]

    def pack(self, places: Places) -> list[Bytes]:
        return [part for _, field in self._fields for part in field.pack(places)]

    def join(self, chunks: Sequence[Bytes], counts: Sequence[int]) -> Any:
        readers = [_Reader(chunk) for chunk in chunks]
        joined = {id(field.leaf): field.join(readers, counts) for _, field in self._fields}
        copied = dict(joined)
        batch = copy.deepcopy(self._batch, copied)  # it takes the fields that are known, by `id`
        _check_copied(copied, joined)
        return batch


class _Reader:
    """Reads the bytes of a chunk from its beginning to its end."""

    def __init__(self, chunk: Bytes) -> None:
        self._chunk, self._place = chunk, 0

    def take(self, num_bytes: int) -> Bytes:
        found = self._chunk[self._place : self._place + num_bytes]
        self._place += num_bytes
        return found


class _Rows:
    """Rows of a dense tensor or array, as bytes."""

    def __init__(self, values: Any) -> None:
        self.values, self.shape = values, tuple(values.shape[1:])
        self.row_bytes = values.itemsize * int(np.prod(self.shape, dtype=np.int64))
        rows = _bytes_of(values)
        # One element for each row, so that numpy takes rows fast.
        kind = f"u{self.row_bytes}" if self.row_bytes in (1, 2, 4, 8) else f"V{self.row_bytes}"
        self._rows = rows.view(kind) if self.row_bytes else None
        self.description = f"{values.dtype} {list(self.shape)}"

    def take(self, places: NDArray[np.int64]) -> Bytes:
        return np.empty(0, np.uint8) if self._rows is None else self._rows[places].view(np.uint8)

    def join(self, parts: Sequence[Bytes], num_rows: int) -> Any:
        joined: Any
        if isinstance(self.values, Tensor):
            pinned = self.values.is_pinned()
            joined = torch.empty((num_rows, *self.shape), dtype=self.values.dtype, pin_memory=pinned)
        else:
            joined = np.empty((num_rows, *self.shape), self.values.dtype)
        if len(into := _bytes_of(joined)):
            np.concatenate(parts, out=into)
        return joined


class _Field(Protocol):
    leaf: Any
    description: str

    def pack(self, places: Places) -> list[Bytes]: ...
    def join(self, readers: Sequence[_Reader], counts: Sequence[int]) -> Any: ...


class _Dense:
    """A tensor or array with samples first."""

    def __init__(self, leaf: Any) -> None:
        self.leaf, self._rows = leaf, _Rows(leaf)
        self.description = f"{type(leaf).__name__} {self._rows.description}"

    def pack(self, places: Places) -> list[Bytes]:
        return [self._rows.take(places)]

    def join(self, readers: Sequence[_Reader], counts: Sequence[int]) -> Any:
        parts = [reader.take(num * self._rows.row_bytes) for reader, num in zip(readers, counts, strict=True)]
        return self._rows.join(parts, sum(counts))


class _Keyed(_Dense):
    """A KeyedTensor: the columns of several features side by side."""

    def __init__(self, leaf: KeyedTensor) -> None:
        super().__init__(leaf.values())
        self._keyed, self.leaf = leaf, leaf
        self.description = f"KeyedTensor {leaf.keys()} {leaf.length_per_key()} {self.description}"

    def join(self, readers: Sequence[_Reader], counts: Sequence[int]) -> Any:
        values = super().join(readers, counts)
        return KeyedTensor(self._keyed.keys(), self._keyed.length_per_key(), values, self._keyed.key_dim())


class JaggedField:
    """A JaggedTensor, or a KeyedJaggedTensor, whose values are in the order of its features."""

    def __init__(self, leaf: JaggedTensor | KeyedJaggedTensor, count: int) -> None:
        self.leaf = leaf
        keys = leaf.keys() if isinstance(leaf, KeyedJaggedTensor) else None
        self._num_keys = 1 if keys is None else len(keys)
        lengths, weights = leaf.lengths(), leaf.weights_or_none()
        self._lengths_of = lengths
        self._lengths = lengths.numpy().reshape(self._num_keys, count)
        self._starts = np.cumsum(self._lengths, dtype=np.int64).reshape(self._lengths.shape) - self._lengths
        self._values = _Rows(leaf.values())
        self._weights = None if weights is None else _Rows(weights)
        of_weights = "no weights" if self._weights is None else f"weights {self._weights.description}"
        name = type(leaf).__name__ if keys is None else f"{type(leaf).__name__} {keys}"
        self.description = f"{name} lengths {lengths.dtype} values {self._values.description} {of_weights}"

    @property
    def _all_rows(self) -> list[_Rows]:
        return [self._values] if self._weights is None else [self._values, self._weights]

    def pack(self, places: Places) -> list[Bytes]:
        """Return the lengths of these samples, then their values, then their weights if there are any."""
        lengths = np.ascontiguousarray(self._lengths[:, places])
        flat, starts = lengths.ravel(), self._starts[:, places].ravel()
        # Of each value its place in this batch: those of a sample and a feature are side by side.
        begins = np.cumsum(flat, dtype=np.int64) - flat
        of_values = np.repeat(starts - begins, flat) + np.arange(int(flat.sum()), dtype=np.int64)
        return [lengths.reshape(-1).view(np.uint8), *(rows.take(of_values) for rows in self._all_rows)]

    def join(self, readers: Sequence[_Reader], counts: Sequence[int]) -> Any:
        """Return the field of the samples that the readers have, `counts` of each."""
        dtype = self._lengths.dtype
        lengths = [
            reader.take(self._num_keys * num * dtype.itemsize).view(dtype).reshape(self._num_keys, num)
            for reader, num in zip(readers, counts, strict=True)
        ]
        num_values = [one.sum(axis=1, dtype=np.int64) for one in lengths]  # by chunk, of each feature
        joined = []
        for rows in self._all_rows:
            chunks = []
            for reader, nums in zip(readers, num_values, strict=True):
                chunk = reader.take(int(nums.sum()) * rows.row_bytes)
                chunks.append(np.split(chunk, np.cumsum(nums[:-1]) * rows.row_bytes))
            parts = [by_feature[feature] for feature in range(self._num_keys) for by_feature in chunks]
            joined.append(rows.join(parts, int(sum(map(np.sum, num_values)))))
        values, weights = joined[0], joined[1] if len(joined) > 1 else None
        pinned = self._lengths_of.is_pinned()
        flat = torch.empty(self._num_keys * sum(counts), dtype=self._lengths_of.dtype, pin_memory=pinned)
        np.concatenate(lengths, axis=1, out=flat.numpy().reshape(self._num_keys, sum(counts)))
        if isinstance(self.leaf, KeyedJaggedTensor):
            kjt = KeyedJaggedTensor(self.leaf.keys(), values, weights, lengths=flat, stride=sum(counts))
            # On a device the lengths per key would have to be read from there.
            return kjt if self.leaf.length_per_key_or_none() is None else kjt.sync()
        return JaggedTensor(values, weights, lengths=flat)


def _is_field(node: Any) -> bool:
    return isinstance(node, (Tensor, np.ndarray, JaggedTensor, KeyedJaggedTensor, KeyedTensor))


def _by_path(one: tuple[str, Any]) -> str:
    return one[0]  # not by the order of the containers: a dict may have another on another rank


def _bytes_of(values: Any) -> Bytes:
    """Return the bytes of a tensor or array: its own memory if it is contiguous."""
    if isinstance(values, np.ndarray):
        return np.ascontiguousarray(values).reshape(-1).view(np.uint8)
    flat = values.detach().contiguous().reshape(-1)
    if not len(flat):
        return np.empty(0, np.uint8)
    if flat.dtype.is_complex:
        flat = torch.view_as_real(flat).reshape(-1)
    return flat.view(torch.uint8).numpy()  # type: ignore[no-any-return]


def _check_copied(copied: dict[int, Any], joined: dict[int, Any]) -> None:
    """Raise a ValueError if a batch's copy has samples that are no field's: they would be those from before."""
    originals = copied.get(id(copied), ())  # `deepcopy` keeps them there
    for key, value in copied.items():
        if key not in joined and _is_field(value) and not (isinstance(value, (Tensor, np.ndarray)) and not value.ndim):
            holders = ((one, name) for one in originals for name, held in _attributes(one) if id(held) == key)
            of, name = next(((f"a {type(one).__name__}", name) for one, name in holders), ("the batch", "hidden"))
            raise ValueError(
                f"{of} holds a {type(value).__name__} in {name}, which is no field or item of it, so that its samples "
                f"are not exchanged. Make it a field, or leave it out of the batch. {OWN}."
            )


def _attributes(holder: Any) -> list[tuple[str, Any]]:
    return [*getattr(holder, "__dict__", {}).items()]


def _field_of(path: str, leaf: Any, count: int) -> _Field | None:
    """Return a field with samples; None for a constant. Raise a ValueError that names any other field."""
    if isinstance(leaf, (KeyedJaggedTensor, JaggedTensor)):
        return _jagged_of(path, leaf, count)
    if isinstance(leaf, KeyedTensor):
        _check_kind(path, leaf, KeyedTensor)
        _check_tensor(path, leaf.values())
        if leaf.key_dim() != 1:
            raise ValueError(f"{path} is a KeyedTensor with its features along dimension {leaf.key_dim()}. {OWN}.")
        _check_count(path, "a KeyedTensor", len(leaf.values()), count)
        return _Keyed(leaf)
    if isinstance(leaf, Tensor):
        _check_tensor(path, leaf)
        if leaf.dim() == 0:
            return None
    elif isinstance(leaf, np.ndarray):
        if leaf.dtype.hasobject or type(leaf) is not np.ndarray or leaf.dtype.kind not in "biufc":
            raise ValueError(f"{path} is a {type(leaf).__name__} of {leaf.dtype}, which is not sent as bytes. {OWN}.")
        if leaf.ndim == 0:
            return None
    else:
        return None
    if leaf.shape[0] != count:
        raise ValueError(
            f"{path} has the shape {tuple(leaf.shape)}, which does not begin with the batch's {count} samples: it is "
            f"no sample's. Make it a number or leave it out of the batch, or: {OWN[0].lower()}{OWN[1:]}."
        )
    return _Dense(leaf)


def _jagged_of(path: str, leaf: JaggedTensor | KeyedJaggedTensor, count: int) -> JaggedField:
    is_keyed = isinstance(leaf, KeyedJaggedTensor)
    _check_kind(path, leaf, KeyedJaggedTensor if is_keyed else JaggedTensor)
    for tensor in (leaf.values(), leaf.weights_or_none()):
        if tensor is not None:
            _check_tensor(path, tensor)
    if is_keyed and leaf.variable_stride_per_key():
        raise ValueError(
            f"{path} is a KeyedJaggedTensor with variable batch sizes (of its features {', '.join(leaf.keys())}), "
            f"whose samples share parts. {OWN}."
        )
    if is_keyed and leaf.inverse_indices_or_none() is not None:
        raise ValueError(f"{path} is a KeyedJaggedTensor with inverse_indices, whose samples share parts. {OWN}.")
    found = leaf.stride() if is_keyed else len(leaf.lengths())
    _check_count(path, f"a {type(leaf).__name__}", found, count)
    in_lengths, offsets = int(leaf.lengths().sum()), leaf.offsets_or_none()
    begins = 0 if offsets is None or not len(offsets) else int(offsets[0])
    if begins or in_lengths != len(leaf.values()):
        raise ValueError(
            f"{path} is a {type(leaf).__name__} with {len(leaf.values())} values, of which samples have {in_lengths}, "
            f"from place {begins} on: no sample has the others. Leave them out. {OWN}."
        )
    return JaggedField(leaf, count)


def _check_kind(path: str, leaf: Any, kind: type) -> None:
    if type(leaf) is not kind:
        raise ValueError(
            f"{path} is a {type(leaf).__name__}, a subclass of {kind.__name__}, which the package cannot make. {OWN}."
        )


def _check_tensor(path: str, tensor: Tensor) -> None:
    """Raise a ValueError unless a tensor is a plain one on the host, whose rows can be taken as bytes."""
    if tensor.device.type != "cpu":
        raise ValueError(
            f"{path} is on {tensor.device}: samples are exchanged on the host, before a batch is copied to the device. "
            "Let the data loader make its batches on the CPU, as Lightning copies them."
        )
    plain = type(tensor) is Tensor and tensor.layout is torch.strided and not tensor.is_quantized
    if not plain or tensor.is_conj() or tensor.is_neg() or tensor.requires_grad:
        what = "a tensor that requires a gradient" if tensor.requires_grad else f"a {_kind_of(tensor)}"
        raise ValueError(f"{path} is {what}, of which samples cannot be taken. {OWN}.")


def _check_count(path: str, what: str, found: int, count: int) -> None:
    if found != count:
        raise ValueError(f"{path} is {what} of {found} samples, and cost returned {count} numbers.")


def _kind_of(tensor: Tensor) -> str:
    layout = str(tensor.layout).removeprefix("torch.")
    return f"{type(tensor).__name__} of the layout {layout} and {tensor.dtype}"


def _constant_kind(leaf: Any) -> str:
    return type(leaf).__name__ + (f" {leaf.dtype}" if isinstance(leaf, (Tensor, np.ndarray)) else "")


def _constant(path: str, leaf: Any) -> Any:
    if isinstance(leaf, (Tensor, np.ndarray)):
        return leaf.item()
    if isinstance(leaf, _CONSTANTS) or (isinstance(leaf, (Sequence, Mapping)) and not len(leaf)):
        return leaf
    raise ValueError(f"{path} is a {type(leaf).__name__}, whose samples the package does not know. {OWN}.")
