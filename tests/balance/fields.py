"""Fields of batches, and what each of their samples has. Without the package under test."""

import dataclasses
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

KEYS = ["a", "b", "c"]


class Plain:
    def __init__(self, **fields: Any) -> None:
        vars(self).update(fields)


def _jagged(count: int, generator: torch.Generator, features: int, weighted: bool, dim: tuple[int, ...] = ()) -> Any:
    lengths = torch.randint(0, 4, (features * count,), generator=generator, dtype=torch.int32)
    num = int(lengths.sum())
    values = torch.randint(0, 1000, (num, *dim), generator=generator)
    weights = torch.rand(num, generator=generator) if weighted else None
    if features > 1:
        return KeyedJaggedTensor(KEYS[:features], values, weights, lengths=lengths)
    return JaggedTensor(values, weights=weights, lengths=lengths)


def _by_offsets(kjt: KeyedJaggedTensor, dtype: torch.dtype) -> KeyedJaggedTensor:
    if not kjt.stride():  # TorchRec cannot count the lengths of no samples
        return kjt
    offsets = kjt.offsets().to(dtype)
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), kjt.weights_or_none(), offsets=offsets, stride=kjt.stride())


Make = Callable[[int, torch.Generator], Any]  # from the number of samples
FIELDS: dict[str, Make] = {
    "kjt": lambda n, g: _jagged(n, g, 3, False),
    "weighted": lambda n, g: _jagged(n, g, 2, True),
    "by offsets": lambda n, g: _by_offsets(_jagged(n, g, 3, True), torch.int64),
    "by 32-bit offsets": lambda n, g: _by_offsets(_jagged(n, g, 2, False), torch.int32),
    "without keys": lambda n, g: KeyedJaggedTensor([], torch.empty(0), lengths=torch.empty(0).int(), stride=n),
    "of a kjt": lambda n, g: _jagged(n, g, 3, True)["b"],
    "jagged": lambda n, g: _jagged(n, g, 1, False),
    "jagged of vectors": lambda n, g: _jagged(n, g, 1, True, (3,)),
    "keyed": lambda n, g: KeyedTensor(["a", "b"], [2, 3], torch.rand(n, 5, generator=g)),
    "floats": lambda n, g: torch.rand(n, 3, 2, generator=g),
    "not contiguous": lambda n, g: torch.rand(3, n, generator=g).t(),
    "expanded": lambda n, g: torch.rand(1, 3, generator=g).expand(n, 3),
    "half": lambda n, g: torch.rand(n, 2, generator=g).half(),
    "8 bits": lambda n, g: torch.rand(n, generator=g).to(torch.float8_e4m3fn).view(torch.uint8),
    "bfloat16": lambda n, g: torch.rand(n, generator=g).bfloat16(),
    "bools": lambda n, g: torch.rand(n, 5, generator=g) > 0.5,
    "complex": lambda n, g: torch.rand(n, 2, generator=g).to(torch.complex64),
    "no columns": lambda n, g: torch.rand(n, 0, generator=g),
    "numpy": lambda n, g: torch.rand(n, 3, generator=g).numpy(),
    "big-endian": lambda n, g: torch.randint(0, 9, (n,), generator=g).numpy().astype(">i4"),
    "columns first": lambda n, g: np.asfortranarray(torch.rand(n, 3, generator=g).numpy()),
    "number": lambda n, g: 3.5,
    "scalar": lambda n, g: torch.tensor(4),
    "none": lambda n, g: None,
    "names": lambda n, g: ["x", "y"],
    "nothing": lambda n, g: [],
}


def by_sample(batch: Any, count: int) -> list[Any]:
    """Return what each sample has, as plain lists: slowly, and without the package."""
    if isinstance(batch, KeyedJaggedTensor):
        features = [by_sample(batch[key], count) for key in batch.keys()]  # noqa: SIM118
        return list(zip(*features, strict=True)) if features else [()] * batch.stride()
    if isinstance(batch, JaggedTensor):
        weights = batch.weights_or_none()
        ends = batch.lengths().cumsum(0).tolist()
        spans = list(zip([0, *ends[:-1]], ends, strict=True)) if count else []
        return [
            (batch.values()[begin:end].tolist(), None if weights is None else weights[begin:end].tolist())
            for begin, end in spans
        ]
    if isinstance(batch, KeyedTensor):
        return list(zip(batch.values().tolist(), [str(batch.keys())] * count, strict=True))
    if isinstance(batch, Tensor | np.ndarray) and batch.ndim:
        return [(row.tolist(), str(batch.dtype)) for row in batch]
    if isinstance(batch, dict):
        fields = [*batch.values()]
    elif isinstance(batch, Plain):
        fields = [*vars(batch).values()]
    elif dataclasses.is_dataclass(batch):
        fields = [getattr(batch, field.name) for field in dataclasses.fields(batch)]
    elif isinstance(batch, list | tuple):
        fields = [*batch]
    else:
        return [(str(batch), type(batch).__name__)] * count
    return list(zip(*(by_sample(field, count) for field in fields), strict=True)) if fields else [()] * count
