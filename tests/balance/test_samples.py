"""Any batch: its samples, sent to other ranks in any way, are the same samples in the batches there."""

import dataclasses
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torch import Tensor
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_overlap import Balance
from lightning_overlap.balance.samples import samples_of

from ..support.modules import variable_batch

KEYS = ["a", "b", "c"]


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Record:
    sparse: Any
    dense: Any
    unit: str = "clicks"


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


Make = Callable[[int, torch.Generator], Any]  # from the number of samples
FIELDS: dict[str, Make] = {
    "kjt": lambda n, g: _jagged(n, g, 3, False),
    "weighted": lambda n, g: _jagged(n, g, 2, True),
    "jagged": lambda n, g: _jagged(n, g, 1, False),
    "jagged of vectors": lambda n, g: _jagged(n, g, 1, True, (3,)),
    "keyed": lambda n, g: KeyedTensor(["a", "b"], [2, 3], torch.rand(n, 5, generator=g)),
    "floats": lambda n, g: torch.rand(n, 3, 2, generator=g),
    "not contiguous": lambda n, g: torch.rand(3, n, generator=g).t(),
    "bfloat16": lambda n, g: torch.rand(n, generator=g).bfloat16(),
    "bools": lambda n, g: torch.rand(n, 5, generator=g) > 0.5,
    "complex": lambda n, g: torch.rand(n, 2, generator=g).to(torch.complex64),
    "no columns": lambda n, g: torch.rand(n, 0, generator=g),
    "numpy": lambda n, g: torch.rand(n, 3, generator=g).numpy(),
    "number": lambda n, g: 3.5,
    "scalar": lambda n, g: torch.tensor(4),
    "none": lambda n, g: None,
    "names": lambda n, g: ["x", "y"],
}
CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda fields: {f"f{index}": field for index, field in enumerate(fields)},
    "namedtuple": lambda fields: Pair(fields[0], {"rest": fields[1:]}),
    "dataclass": lambda fields: Record(fields[0], (fields[1:],)),
    "object": lambda fields: Plain(one=fields[0], rest=fields[1:]),
}


def by_sample(batch: Any, count: int) -> list[Any]:
    """Return what each sample has, as plain lists: slowly, and without the package."""
    if isinstance(batch, KeyedJaggedTensor):
        return list(zip(*(by_sample(batch[key], count) for key in batch.keys()), strict=True))  # noqa: SIM118
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


BALANCE = Balance(cost=lambda batch: batch)


@settings(max_examples=150, deadline=None)
@given(
    fields=st.lists(st.sampled_from([*FIELDS]), min_size=1, max_size=5),
    container=st.sampled_from([*CONTAINERS]),
    count=st.integers(1, 6),
    seed=st.integers(0, 1000),
    data=st.data(),
)
def test_samples_arrive_as_they_were(
    fields: list[str], container: str, count: int, seed: int, data: st.DataObject
) -> None:
    generator = torch.Generator().manual_seed(seed)
    fields = ["kjt", *fields]
    num_ranks = data.draw(st.integers(1, 3))
    batches = [CONTAINERS[container]([FIELDS[name](count, generator) for name in fields]) for _ in range(num_ranks)]
    owners = np.array(data.draw(st.permutations([*range(num_ranks)] * count))).reshape(num_ranks, count)
    before = [by_sample(batch, count) for batch in batches]
    samples = [samples_of(batch, count, BALANCE) for batch in batches]
    assert len({str(one.describe()) for one in samples}) == 1
    for rank in range(num_ranks):
        places = [np.flatnonzero(row == rank) for row in owners]
        chunks = [np.concatenate(one.pack(own)) for one, own in zip(samples, places, strict=True)]
        joined = samples[rank].join(chunks, [len(own) for own in places])
        assert type(joined) is type(batches[rank])
        expected = [before[source][place] for source, own in enumerate(places) for place in own]
        assert by_sample(joined, count) == expected
    assert [by_sample(batch, count) for batch in batches] == before


def test_the_functions_of_the_user() -> None:
    """A batch that the package cannot split: samples second."""
    balance = Balance(
        cost=lambda batch: batch,
        split=lambda batch: list(zip(batch["x"].t(), batch["texts"], strict=True)),
        join=lambda samples: {"x": torch.stack([x for x, _ in samples], 1), "texts": [text for _, text in samples]},
    )
    batches = [
        {"x": torch.arange(6).view(2, 3) + 10 * rank, "texts": [f"{rank}{place}" for place in "abc"]} for rank in (0, 1)
    ]
    samples = [samples_of(batch, 3, balance) for batch in batches]
    places = [np.array([0, 2]), np.array([1])]
    chunks = [one.pack(own)[0] for one, own in zip(samples, places, strict=True)]
    joined = samples[1].join([*chunks, np.empty(0, np.uint8)], [2, 1, 0])
    assert joined["texts"] == ["0a", "0c", "1b"]
    assert joined["x"].tolist() == [[0, 2, 11], [3, 5, 14]]


def test_variable_batch_sizes_are_refused_by_name() -> None:
    kjt = variable_batch(torch.Generator().manual_seed(0))
    with pytest.raises(ValueError, match=r"batch\['ids'\] is a KeyedJaggedTensor with variable batch sizes"):
        samples_of({"ids": kjt}, 8, BALANCE)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (torch.ones(4, device="meta"), r"batch\['x'\] is on meta: samples are exchanged on the host"),
        (torch.ones(4, requires_grad=True), r"batch\['x'\] is a tensor that requires a gradient"),
        (torch.ones(3), r"batch\['x'\] has the shape \(3,\).*no sample's"),
        (JaggedTensor(torch.ones(2), lengths=torch.tensor([1, 1])), r"batch\['x'\] is a JaggedTensor of 2 samples"),
        (KeyedTensor(["a"], [4], torch.ones(4, 4), 0), r"batch\['x'\] is a KeyedTensor with its features along dimen"),
        (print, r"batch\['x'\] is a builtin_function_or_method"),
    ],
    ids=str,
)
def test_a_field_without_samples_is_named(field: Any, said: str) -> None:
    with pytest.raises(ValueError, match=f"{said}.*"):
        samples_of({"x": field, "y": torch.ones(4)}, 4, BALANCE)


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of the type dict has no tensor with samples"):
        samples_of({"x": 3}, 4, BALANCE)
