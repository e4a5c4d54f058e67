"""Any batch: its samples, sent to other ranks in any way, are the same samples in the batches there."""

import dataclasses
import functools
from collections.abc import Callable
from typing import Any, NamedTuple

import numpy as np
import pytest
import torch
from hypothesis import given, settings
from hypothesis import strategies as st
from torchrec import JaggedTensor, KeyedJaggedTensor, KeyedTensor

from lightning_overlap import Balance
from lightning_overlap.balance.samples import samples_of

from ..support.modules import variable_batch
from .fields import FIELDS, Plain, by_sample


class Pair(NamedTuple):
    first: Any
    second: Any


@dataclasses.dataclass(frozen=True)
class Record:
    sparse: Any
    dense: Any
    unit: str = "clicks"


CONTAINERS: dict[str, Callable[[list[Any]], Any]] = {
    "list": list,
    "tuple": tuple,
    "dict": lambda fields: {f"f{index}": field for index, field in enumerate(fields)},
    "namedtuple": lambda fields: Pair(fields[0], {"rest": fields[1:]}),
    "dataclass": lambda fields: Record(fields[0], (fields[1:],)),
    "object": lambda fields: Plain(one=fields[0], rest=fields[1:]),
}


BALANCE = Balance(cost=lambda batch: batch)


@settings(max_examples=150, deadline=None)
@given(
    fields=st.lists(st.sampled_from([*FIELDS]), min_size=1, max_size=5),
    container=st.sampled_from([*CONTAINERS]),
    count=st.integers(0, 6),
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


@pytest.mark.parametrize("synced", [False, True])
def test_lengths_per_key_that_the_host_knows_stay_known(synced: bool) -> None:
    """Else a batch on a GPU would make the host wait for them, in each step."""
    kjt = FIELDS["kjt"](4, torch.Generator().manual_seed(0))
    samples = samples_of({"ids": kjt.sync() if synced else kjt}, 4, BALANCE)
    joined = samples.join([np.concatenate(samples.pack(np.arange(4)))], [4])["ids"]
    assert joined.length_per_key_or_none() == (kjt.length_per_key() if synced else None)


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


class _OwnKjt(KeyedJaggedTensor):
    pass


def _kjt(cls: type[KeyedJaggedTensor] = KeyedJaggedTensor, num: int = 8, **kwargs: Any) -> KeyedJaggedTensor:
    kwargs = kwargs or {"lengths": torch.ones(8, dtype=torch.int64)}
    return cls(["a", "b"], torch.arange(num), **kwargs)


ONES = torch.ones(8, dtype=torch.int64)


@pytest.mark.parametrize(
    ("field", "said"),
    [
        (_kjt(_OwnKjt), "is a _OwnKjt, a subclass of KeyedJaggedTensor"),
        (_kjt(num=9), "is a KeyedJaggedTensor with 9 values, of which samples have 8, from place 0 on"),
        (_kjt(num=7), "with 7 values, of which samples have 8"),
        (_kjt(offsets=torch.arange(1, 10), num=9), "with 9 values, of which samples have 8, from place 1 on"),
        (JaggedTensor(torch.arange(5), offsets=torch.arange(1, 6)), "is a JaggedTensor with 5 values.* from place 1"),
        (_kjt(lengths=ONES, weights=torch.ones(8, requires_grad=True)), "a tensor that requires a gradient"),
        (_kjt(lengths=ONES, weights=torch.ones(8, device="meta")), "on meta"),
        (KeyedTensor(["a"], [2], torch.ones(4, 2, requires_grad=True)), "a tensor that requires a gradient"),
        (
            _kjt(lengths=ONES, inverse_indices=(["a", "b"], torch.zeros(2, 4))),
            "a KeyedJaggedTensor with inverse_indices",
        ),
    ],
    ids=lambda one: one if isinstance(one, str) else "",
)
def test_what_a_new_field_could_not_have_is_refused(field: Any, said: str) -> None:
    """A batch that would lose something on its way, or be made of other parts, is an error and not another batch."""
    with pytest.raises(ValueError, match=rf"batch\['x'\] .*{said}"):
        samples_of({"x": field, "y": torch.ones(4)}, 4, BALANCE)


@dataclasses.dataclass
class Computes:
    ids: torch.Tensor

    @functools.cached_property
    def doubled(self) -> torch.Tensor:
        return self.ids * 2


class Items(dict[str, Any]):
    pass


class Many(list[Any]):
    pass


def _with(holder: Any, **attributes: Any) -> Any:
    vars(holder).update(attributes)
    return holder


@pytest.mark.parametrize(
    ("batch", "said"),
    [
        (_with(Computes(torch.arange(4)), doubled=torch.arange(4)), "a Computes holds a Tensor in doubled"),
        (_with(Items(ids=torch.arange(4)), lengths=np.arange(4)), "a Items holds a ndarray in lengths"),
        (_with(Many([torch.arange(4)]), more=[torch.arange(4)]), "the batch holds a Tensor in hidden"),
        ({"deep": [_with(Items(ids=torch.arange(4)), kjt=_kjt())]}, "a Items holds a KeyedJaggedTensor in kjt"),
    ],
    ids=["cached property", "dict", "list", "nested"],
)
def test_samples_beside_the_fields_are_not_left_behind(batch: Any, said: str) -> None:
    """They would be copied with the batch, and be those of other samples then."""
    samples = samples_of(batch, 4, BALANCE)
    chunks = [np.concatenate(samples.pack(np.arange(4)))]
    with pytest.raises(ValueError, match=said):
        samples.join(chunks, [4])


def test_a_batch_without_samples_is_refused() -> None:
    with pytest.raises(ValueError, match="a batch of the type dict has no tensor with samples"):
        samples_of({"x": 3}, 4, BALANCE)
