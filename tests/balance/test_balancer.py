"""What balancing refuses: on all ranks alike, with what is wrong and what to do, and nothing hangs."""

import dataclasses
from itertools import chain
from typing import Any

import numpy as np
import pytest
import torch

from lightning_overlap import Balance, OverlapEmbeddingStrategy

from ..support.ranks import Ranks
from . import balanced
from .balanced import num_ids


def _same(batch: Any, index: int, rank: int) -> Any:
    return batch


class _Odd:
    __slots__ = ()


def _too_few(batch: Any) -> Any:
    return num_ids(batch)[:-1]


def _nan(batch: Any) -> Any:
    costs = num_ids(batch)
    costs[3] = float("nan")
    return costs


def _negative(batch: Any) -> Any:
    return -1 - num_ids(batch)


def _flat(batch: Any) -> Any:
    return num_ids(batch)[None]


def _text(batch: Any) -> Any:
    return "much"


def _raises(batch: Any) -> Any:
    if batch.inputs["sparse"][1] == 2 and torch.distributed.get_rank() == 1:
        raise KeyError("no such field")
    return num_ids(batch)


def _with(**fields: Any) -> Any:
    def change(batch: Any, index: int, rank: int) -> Any:
        values = {name: value(rank) if callable(value) else value for name, value in fields.items()}
        return dataclasses.replace(batch, inputs=batch.inputs | values)

    return change


def _hide(batch: Any, index: int, rank: int) -> Any:
    if rank:
        vars(batch)["lengths"] = torch.ones(16)
    return batch


def _only_on_one(batch: Any, index: int, rank: int) -> Any:
    return dataclasses.replace(batch, inputs=batch.inputs | ({"more": torch.ones(16)} if rank else {}))


def _ends(batch: Any) -> Any:
    if torch.distributed.get_rank() == 1:
        raise SystemExit(3)
    return num_ids(batch)


def _huge(batch: Any) -> Any:
    return num_ids(batch) + 1e39


def _copies(batch: Any) -> Any:
    return [batch] * 16


def _splits_not(batch: Any) -> Any:
    if torch.distributed.get_rank() == 1:
        raise OSError("no file")
    return _copies(batch)


def _joins_not(samples: Any) -> Any:
    if torch.distributed.get_rank() == 0:
        raise ValueError("no place")
    return samples[0]


def _lambda(sample: Any) -> Any:
    return [lambda: sample] * 16


CASES: dict[str, tuple[Any, Any, Any, str]] = {
    "too few": (
        _too_few,
        _same,
        {},
        "batch 0 of the epoch on rank 0: batch.dense has the shape (16, 6), which does not",
    ),
    "nan": (_nan, _same, {}, "cost returned nan for sample 3, which is not a finite number"),
    "negative": (_negative, _same, {}, "for sample 0, which is negative"),
    "flat": (_flat, _same, {}, "numbers of the shape (1, 16): it has to return one for each sample"),
    "text": (_text, _same, {}, "cost returned 'much': it has to return a number for each sample"),
    "raises": (_raises, _same, {}, "batch 2 of the epoch on rank 1: KeyError: 'no such field'"),
    "no sample's": (
        num_ids,
        _with(prior=torch.ones(3)),
        {},
        "batch.inputs['prior'] has the shape (3,)",
    ),
    "an object": (num_ids, _with(odd=_Odd()), {}, "batch.inputs['odd'] is a _Odd, whose samples the package does not"),
    "objects": (num_ids, _with(names=np.array(["a"] * 16, object)), {}, "batch.inputs['names'] is a ndarray of object"),
    "sparse": (
        num_ids,
        _with(sparse2=torch.eye(16).to_sparse()),
        {},
        "batch.inputs['sparse2'] is a Tensor",
    ),
    "constants": (
        num_ids,
        _with(day=lambda rank: f"day {rank}"),
        {},
        "batch.inputs['day'] is str 'day 0' on rank 0, str 'day 1' on rank 1",
    ),
    "dtypes": (
        num_ids,
        _with(more=lambda rank: torch.ones(16, dtype=torch.float32 if rank else torch.float64)),
        {},
        "batch.inputs['more'] is Tensor torch.float64 [] on rank 0, Tensor torch.float32 [] on rank 1",
    ),
    "only on one": (num_ids, _only_on_one, {}, "batch.inputs['more'] is nothing on rank 0, Tensor torch.float32 [] on"),
    "split": (
        num_ids,
        _same,
        {"split": lambda batch: [1, 2], "join": list},
        "split returned 2 samples",
    ),
    "pickle": (
        num_ids,
        _same,
        {"split": _lambda, "join": list},
        "batch 0 of the epoch on rank 0: AttributeError: Can't pickle",
    ),
    "ends": (_ends, _same, {}, "batch 0 of the epoch on rank 1: SystemExit: 3"),
    "huge": (_huge, _same, {}, "which is too large: costs are sent as float32"),
    "split on one": (num_ids, _same, {"split": _splits_not, "join": list}, "epoch on rank 1: OSError: no file"),
    "join on one": (num_ids, _same, {"split": _copies, "join": _joins_not}, "batch 0 of the epoch on rank 0: no place"),
    "hidden": (num_ids, _hide, {}, "a Batch holds a Tensor in lengths, which is no field or item of it"),
}


@pytest.mark.timeout(120)
def test_errors_are_read_on_all_ranks(two_ranks: Ranks) -> None:
    names = list(CASES)
    for found in two_ranks.run(errors_of, names):
        for name in names:
            assert CASES[name][3] in found[name], name


def errors_of(names: list[str]) -> dict[str, str]:
    return balanced.errors({name: CASES[name][:3] for name in names})


def test_a_rank_that_fails_alone_is_waited_for_as_long_as_the_timeout_says(get_ranks: Any) -> None:
    """The others are in an exchange that it never joins; they name its error."""
    ranks = get_ranks(2)
    try:
        first, second = ranks.run(balanced.fail_alone, 5)
    finally:
        ranks.close()  # their groups are of no use any more
    assert "ValueError: no more files" in second[0]
    assert "rank 1 had failed" in first[0]
    assert "no more files" in first[0]
    assert first[1] < 40


def test_a_rank_without_the_option_is_an_error_on_all_ranks(two_ranks: Ranks) -> None:
    for said in two_ranks.run(balanced.balance_on_one_rank):
        assert said.startswith("rank 1 has the option balance= and rank 0 has not")


def test_what_cannot_be_balanced_is_said_and_nothing_else(two_ranks: Ranks) -> None:
    """Lightning sets up the data before each epoch."""
    said, of_rank_1 = two_ranks.run(balanced.said_to_have_no_effect)
    assert said == {
        "balances": [],
        "reloads its loader": [],
        "has no batches": [],
        "takes the iterator": ["balance has no effect: training_step takes the data loader's iterator, not batches."],
        "has no tables": [
            "balance has no effect: the module has no TorchRec tables, so it trains as with DDPStrategy."
        ],
    }
    assert not any(of_rank_1.values())


@pytest.mark.parametrize("rank", [0, 1])
def test_a_signal_in_an_exchange_ends_all_ranks_after_the_same_step(two_ranks: Ranks, rank: int) -> None:
    (steps, seconds, alive), (others, its_seconds, its_alive) = two_ranks.run(balanced.terminate, rank)
    assert steps == others
    assert 3 < steps < 12
    assert max(seconds, its_seconds) < 20
    assert alive == its_alive == []


@pytest.mark.parametrize("num_ranks", [2, 3])
def test_each_sample_of_a_global_batch_is_on_one_rank(get_ranks: Any, num_ranks: int) -> None:
    """Whatever batches come, a rank's batch lacking, larger, wrong or of another loader among them; all ranks agree."""
    num = 60
    of_ranks = get_ranks(num_ranks).run(balanced.exchange_many, 7, num)
    num_moved = 0
    for number, found in enumerate(zip(*of_ranks, strict=True)):
        alone, before = found[0][0], [samples for _, samples, *_ in found]
        if alone == "raises":
            said = {text for _, _, _, text in found}
            assert len(said) == 1, said
            assert f"batch {number} of the epoch on rank" in said.pop()
            continue
        after, balanced_by = [one[3] for one in found], [one[4] for one in found]
        if alone == "lacks":
            assert after == [None] * num_ranks
        elif alone in ("more", "loader"):
            assert after == before
            assert balanced_by == [None] * num_ranks
        else:
            assert sorted(map(str, chain(*after))) == sorted(map(str, chain(*before)))
            assert [len(one) for one in after] == [len(one) for one in before]
            assert len({(one.before, one.after, one.num_moved) for one in balanced_by}) == 1
            assert balanced_by[0].before == tuple(float(sum(costs)) for _, _, costs, *_ in found)
            num_moved += balanced_by[0].num_moved
            if not balanced_by[0].num_moved:
                assert after == before
    assert num_moved > num // 2


@pytest.mark.parametrize(
    ("given", "error", "said"),
    [
        ({"cost": 3}, TypeError, "cost is a function, got 3"),
        ({"cost": num_ids, "split": 1, "join": list}, TypeError, "split is a function, got 1"),
        ({"cost": num_ids, "split": list}, ValueError, "split needs join as well"),
        ({"cost": num_ids, "join": list}, ValueError, "join needs split as well"),
        ({"cost": num_ids, "evaluation": 1}, TypeError, "evaluation is True or False, got 1"),
    ],
)
def test_options_that_are_none(given: Any, error: type[Exception], said: str) -> None:
    with pytest.raises(error, match=said):
        Balance(**given)


def test_another_object_than_balance_is_refused() -> None:
    with pytest.raises(TypeError, match=r"balance is a lightning_overlap\.Balance, or None, got <function num_ids"):
        OverlapEmbeddingStrategy(balance=num_ids)  # type: ignore[arg-type]
