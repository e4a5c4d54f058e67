"""`ExponentialMovingAverage` equals a plain average of all weights at every sample, and evaluations use it."""

import copy
import pickle
import re
import signal
from collections.abc import Callable
from contextlib import nullcontext
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_overlap import MODES, STREAMS, ExponentialMovingAverage, OverlapEmbeddingStrategy
from lightning_overlap.callbacks.averages import Averages
from lightning_overlap.callbacks.row_averages import RowAverages
from lightning_overlap.plugin import unsupported
from lightning_overlap.plugin.run import HasRun
from lightning_overlap.tables import KernelShards, TableShard
from lightning_overlap.testing import RaceError
from lightning_overlap.updated_rows import RowNumbers, ids_by_table

from ..support.cases import MIXED
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from ..tables import supported_modules as kinds
from ..testing import test_checked_streams
from . import averaging
from .averaging import ALL, At, Averaged, case_of, shrink, train, unsharded_averages, validate_while_training

ROUNDING = 1e-6


def exact(found: list[Averaged], num_samples: int) -> bool:
    return all(one.off_by < ROUNDING and one.num_samples == num_samples and not one.warned for one in found)


@pytest.mark.parametrize("pipeline", MODES)
def test_equals_a_plain_average_in_every_mode(two_ranks: Ranks, pipeline: str) -> None:
    assert exact(two_ranks.run(train, ALL, pipeline), 10)


OTHERS: dict[str, tuple[Any, dict[str, Any], int]] = {
    "adagrad": (case_of("table_wise row_wise", optimizer=(torch.optim.Adagrad, {"lr": 0.5})), {}, 10),
    "sequences": (case_of("table_wise row_wise", sequence=True), {}, 10),
    "weighted": (case_of("row_wise table_wise", weighted=True), {}, 10),
    "empty": (case_of("table_wise row_wise", empty_feature="shared"), {}, 10),
    "every_third_step": (ALL, {"ema": {"every_n_steps": 3}}, 4),
    "later": (ALL, {"ema": {"start_step": 4, "every_n_steps": 2}}, 3),
    "accumulated": (ALL, {"accumulate_grad_batches": 2}, 5),
    "accumulated, every second": (ALL, {"accumulate_grad_batches": 2, "ema": {"every_n_steps": 2}}, 3),
    "two epochs": (ALL, {"max_epochs": 2, "num_steps": 5}, 10),
    "some tables": (ALL, {"ema": {"tables": ["t1"]}}, 10),
    "no tables": (ALL, {"ema": {"tables": False, "use_buffers": False}}, 10),
    "no memory": (ALL, {"ema": {"decay": 0.0}}, 10),
    "replicas": (
        case_of("table_wise row_wise data_parallel"),
        {"options": {"replicate_tables": ["t2"], "fused_optimizer": (torch.optim.SGD, {"lr": 1.0})}},
        10,
    ),
}


@pytest.mark.parametrize(
    ("name", "pipeline"), in_turn(OTHERS, ["fused_sparse_dist", "semi_sync_deferred", "split_backward", "async_lookup"])
)
def test_equals_a_plain_average_of_other_kinds(ranks: Ranks, name: str, pipeline: str) -> None:
    case, kwargs, num_samples = OTHERS[name]
    assert exact(ranks.run(train, case, pipeline, **kwargs), num_samples)


def test_only_what_is_asked_for_is_averaged(two_ranks: Ranks) -> None:
    for asked, has in ((["t1"], {"t1", "t3"}), (False, {"t3"}), (True, {"t0", "t1", "t2", "t3"})):
        found = two_ranks.run(train, ALL, ema={"tables": asked, "use_buffers": False}, num_steps=2)
        names = {name.split(" ")[0] for one in found for name in one.averages}
        assert {name.split(".")[-2] for name in names if "ebc" in name} == has  # t3 is the dense optimizer's
        assert {"top.0.weight", "bottom.0.bias"} < names
        assert not names & {"mean", "seen"}


def test_equals_the_average_of_the_unsharded_module(two_ranks: Ranks) -> None:
    case = case_of("table_wise column_wise row_wise", optimizer=(torch.optim.SGD, {"lr": 0.2}))
    found = two_ranks.run(train, case, after=averaging.state_of, model=averaging.Model)
    state, expected = found[0].seen["state"], unsharded_averages(case, 2, 10, 0.9)
    assert found[1].seen["state"] == {}
    for one in found:
        assert torch.equal(one.seen["table"], state["ebc.embedding_bags.t0.weight"])
    assert state.keys() == expected.keys()
    for name, average in expected.items():
        assert float((state[name] - average).abs().max()) < ROUNDING * max(1.0, float(average.abs().max())), name
    averaging.Model(case).load_state_dict(state)


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_tables_that_are_written_by_hand_in_each_step(two_ranks: Ranks, hook: str) -> None:
    found = two_ranks.run(train, ALL, callbacks=[At(hook, range(20), shrink)])
    assert exact(found, 10)


def test_tables_that_are_written_between_epochs(two_ranks: Ranks) -> None:
    found = two_ranks.run(
        train, ALL, callbacks=[At("on_train_epoch_start", range(1, 20), shrink)], max_epochs=3, num_steps=4
    )
    assert exact(found, 12)


def announce(trainer: Any, module: Any) -> None:
    next(one for one in trainer.callbacks if isinstance(one, ExponentialMovingAverage)).bring_up_to_date()
    shrink(trainer, module)


def test_a_write_in_the_middle_is_announced_or_warned_of(two_ranks: Ranks) -> None:
    found = two_ranks.run(train, ALL, callbacks=[At("on_train_batch_start", [7], announce)])
    assert exact(found, 10)
    found = two_ranks.run(train, ALL, callbacks=[At("on_train_batch_start", [7], shrink)])
    assert all("Call ExponentialMovingAverage.bring_up_to_date() before" in one.warned[0] for one in found)
    assert any(one.off_by > ROUNDING for one in found)


@pytest.mark.parametrize(
    ("pipeline", "ema"),
    [
        ("fused_sparse_dist", {}),
        ("semi_sync_deferred", {}),
        ("async_lookup", {"every_n_steps": 2}),
        ("split_backward", {"tables": ["t0", "t2"]}),
        ("base", {"tables": False}),
    ],
)
def test_evaluations_use_the_averages_and_training_does_not_notice(
    ranks: Ranks, pipeline: str, ema: dict[str, Any]
) -> None:
    kwargs = {"val_check_interval": 3, "num_sanity_val_steps": 3}
    found = ranks.run(validate_while_training, ALL, pipeline, ema, **kwargs)
    nothing_differs: list[list[str]] = []
    for one in found:
        assert one["validations"] == 4  # a sanity check, before the first sample
        assert len(one["in_fit"]) == 12
        assert len(one["later"]) == 9 + 2  # two steps before the error
        for what in ("in_fit", "weights_back", "later"):
            assert [names for names in one[what] if names] == nothing_differs, what
        assert one["in_the_end"] == []
        assert one["off_by"] < ROUNDING
    without = ranks.run(train, ALL, pipeline, ema={"start_step": 99}, data=averaging.Evaluations, **kwargs)
    for one, other in zip(found, without, strict=True):
        assert torch.equal(one["losses"], other.losses)
        assert averaging.differing(one["weights"], other.weights) == []


def test_answers_are_those_of_the_averaged_module(two_ranks: Ranks) -> None:
    """Not only do the weights read as averages: lookups read them too."""

    def largest(one: Tensor) -> float:
        return float(one.abs().max())

    for found in two_ranks.run(answers_after_training):
        assert largest(found["answers"] - found["expected"]) < 1e-5
        assert largest(found["answers"] - found["trained"]) > 1e-3


def answers_after_training() -> dict[str, Tensor]:
    def evaluate(trainer: Any, module: Any, data: Any, average: Any) -> dict[str, Any]:
        module.answers.clear()
        trainer.validate(module, datamodule=data)
        whole = trainer.strategy.broadcast(average.averaged_state_dict())
        plain = averaging.SeesWeights(module.case)
        plain.load_state_dict(whole)
        batches = [averaging.make_batch(module.case, index, trainer.global_rank) for index in range(100, 103)]
        with torch.no_grad():
            expected = torch.stack([plain(batch) for batch in batches])
            trained = torch.stack([module(batch) for batch in batches])
        return {"answers": torch.stack(module.answers), "expected": expected, "trained": trained}

    kwargs: dict[str, Any] = {"model": averaging.SeesWeights, "data": averaging.Evaluations, "after": evaluate}
    return train(ALL, **kwargs).seen


@pytest.mark.parametrize(
    ("kwargs", "error", "match"),
    [
        ({"decay": 1.0}, ValueError, "decay must be at least 0 and below 1, got 1.0"),
        ({"every_n_steps": 0}, ValueError, "every_n_steps must be at least 1, got 0"),
        ({"start_step": -1}, ValueError, "start_step must be at least 0, got -1"),
        ({"tables": "t0"}, TypeError, "tables must be True, False or a list of names of tables, got 't0'"),
    ],
)
def test_arguments_are_checked(kwargs: dict[str, Any], error: type[Exception], match: str) -> None:
    with pytest.raises(error, match=match):
        ExponentialMovingAverage(**kwargs)


def swap_between_steps(trainer: Any, module: Any) -> None:
    """A lookup of the next batch may be under way."""
    with next(one for one in trainer.callbacks if isinstance(one, ExponentialMovingAverage)).averaged():
        pass


def train_on_checked_streams(pipeline: str, policy: str) -> int:
    average = ExponentialMovingAverage(0.9, tables=True)
    swaps = At("on_train_batch_end", range(3, 20, 2), swap_between_steps)
    test_checked_streams.train(MIXED, pipeline, policy, callbacks=[average, swaps], max_epochs=2)
    return average.num_samples


@pytest.mark.parametrize(("pipeline", "policy"), in_turn(MODES, STREAMS))
def test_no_race_in_any_mode(pipeline: str, policy: str) -> None:
    assert train_on_checked_streams(pipeline, policy) == 14


def test_a_swap_that_waits_for_no_lookup_is_a_race() -> None:
    with mock.patch.object(HasRun, "between_lookups", nullcontext), pytest.raises(RaceError):
        train_on_checked_streams("fused_sparse_dist", "dedicated")


def interrupt_a_swap(during: int) -> tuple[list[str], bool]:
    """Press Ctrl-C in the middle of a swap; return which weights differ afterwards, and whether it was in a swap."""
    pressed = []
    exchange = Averages._exchange

    def press(self: Averages, *args: Any) -> None:
        pressed.append(self.is_swapped)
        if len(pressed) == during:
            signal.raise_signal(signal.SIGINT)
        exchange(self, *args)

    def validate(trainer: Any, module: Any, data: Any, average: ExponentialMovingAverage) -> dict[str, Any]:
        before = averaging.parts_of(module.state_dict())
        with mock.patch.object(Averages, "_exchange", press), pytest.raises((KeyboardInterrupt, SystemExit)):
            trainer.validate(module, datamodule=data, verbose=False)
        return {"differing": averaging.differing(averaging.parts_of(module.state_dict()), before)}

    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # shells start what is in the background without
    try:
        found = train(ALL, data=averaging.Evaluations, after=validate, num_steps=3)
    finally:
        signal.signal(signal.SIGINT, before)
    return found.seen["differing"], len(pressed) > during


@pytest.mark.parametrize("during", [3, 14])
def test_a_swap_is_not_cut_in_two_by_an_interrupt(get_ranks: Callable[..., Ranks], during: int) -> None:
    assert get_ranks(1).run(interrupt_a_swap, during) == [([], True)]


def fit_a_copy() -> tuple[int, int]:
    def copy_and_fit(trainer: Any, module: Any, data: Any, average: ExponentialMovingAverage) -> dict[str, Any]:
        copied = copy.deepcopy(average)
        pickle.loads(pickle.dumps(average))
        nums = copied.num_samples, average.num_samples
        fresh = averaging.Norm(module.case)
        again = averaging.make_trainer(averaging.make_strategy(fresh), callbacks=[copied])
        again.fit(fresh, datamodule=averaging.Batches(module.case, 3))
        return {"nums": (*nums, copied.num_samples)}

    return train(ALL, after=copy_and_fit).seen["nums"]


def test_a_copy_begins_without_averages(two_ranks: Ranks) -> None:
    assert two_ranks.run(fit_a_copy) == [(0, 10, 3)] * 2


def fit_twice() -> tuple[float, int]:
    """Go on with the module in a second fit; a plain average of both fits goes beside."""

    def fit_on(trainer: Any, module: Any, data: Any, average: ExponentialMovingAverage) -> dict[str, Any]:
        plain = next(one for one in trainer.callbacks if isinstance(one, averaging.PlainAverage))
        trainer.validate(module, datamodule=data, verbose=False)
        trainer.fit_loop.max_epochs = 2
        trainer.fit(module, datamodule=data)
        return {"off_by": plain.off_by(averaging.parts_of(average.memory())), "num": average.num_samples}

    return tuple(train(ALL, data=averaging.Evaluations, after=fit_on, num_steps=5).seen.values())


def test_a_second_fit_goes_on_with_the_averages(two_ranks: Ranks) -> None:
    for off_by, num_samples in two_ranks.run(fit_twice):
        assert off_by < ROUNDING
        assert num_samples == 10


def fit_kind(name: str, tables: bool | list[str]) -> tuple[float, int, int]:
    """Return how far the averages are off, and the number of samples, and of those to come that visit all rows."""
    module = kinds.KindModel(name)
    average, plain = ExponentialMovingAverage(0.9, tables=tables), averaging.PlainAverage(0.9)
    strategy = OverlapEmbeddingStrategy(sharding=kinds.make_plan(module))
    trainer = averaging.make_trainer(strategy, callbacks=[average, plain], limit_val_batches=0)
    trainer.fit(module, datamodule=kinds.Batches(module.case, 6))
    return plain.off_by(averaging.parts_of(average.memory())), average.num_samples, average._made().num_whole


def refused_kind(name: str, tables: bool | list[str]) -> tuple[str, int]:
    """Return the error of a fit, and the number of steps before it; MPZCH is not refused for the CPU's sake here."""
    module = kinds.KindModel(name)
    strategy = OverlapEmbeddingStrategy(sharding=kinds.make_plan(module))
    average = ExponentialMovingAverage(0.9, tables=tables)
    trainer = averaging.make_trainer(strategy, callbacks=[average], limit_val_batches=0)
    with mock.patch.object(unsupported, "HashZchManagedCollisionModule", ()), pytest.raises(ValueError) as caught:  # noqa: PT011
        trainer.fit(module, datamodule=kinds.Batches(module.case, 6))
    return str(caught.value), len(module.losses)


KINDS = (
    *("feature_processors", "bags_some_dense_kernel", "variable_batch", "towers", "fused_bags", "managed_bags"),
    *("mixed_bags_and_sequences", "pool", "managed_bags_beside_tables"),
)
# The others are averaged whole. "t2" is beside managed collisions.
TABLES_OF_KINDS: dict[str, bool | list[str]] = {"managed_bags": False, "managed_bags_beside_tables": ["t2"]}


@pytest.mark.parametrize("name", KINDS)
def test_other_kinds_of_modules(ranks: Ranks, name: str) -> None:
    for off_by, *nums in ranks.run(fit_kind, name, TABLES_OF_KINDS.get(name, True)):
        assert off_by < ROUNDING
        assert nums == [6, 0]


@pytest.mark.parametrize(
    ("name", "tables"),
    [("managed_bags", True), ("managed_sequences", ["t1"]), ("managed_bags_beside_tables", True), ("hashed", True)],
)
def test_rows_that_are_assigned_as_they_come_are_refused(two_ranks: Ranks, name: str, tables: bool | list[str]) -> None:
    """Before the first step, by the names of the tables: of `MCHManagedCollisionModule`, and of MPZCH ("hashed")."""
    first = "t1" if tables == ["t1"] else "t0"
    for said, num_steps in two_ranks.run(refused_kind, name, tables):
        assert re.match(rf"mc\.\S+\.{first}\.weight.*: managed collision modules assign these rows to ids", said)
        assert "ebc" not in said
        assert "ExponentialMovingAverage(tables=[...])" in said
        assert num_steps == 0


@pytest.mark.parametrize("sizes", [None, (3, 5, 2)])
def test_rows_are_brought_up_to_date_alike_on_a_host_and_on_a_device(sizes: tuple[int, ...] | None) -> None:
    """On a device it is not known which ids are of which table: a CPU's tensors take that way here."""
    generator = torch.Generator().manual_seed(5)
    num_rows, features = (7, 4), [0, 1, 0]
    weights = [torch.randn(rows, 4, generator=generator) for rows in num_rows]
    shards = [TableShard(f"t{at}", (len(one), 4), 0, 0, one) for at, one in enumerate(weights)]
    kernel = KernelShards(torch.nn.Module(), shards, features, False, True)
    host, device = (RowAverages(kernel, {0: weights[0].clone(), 1: weights[1].clone()}, 0.9) for _ in range(2))
    device._numbers = RowNumbers(num_rows, features, torch.device("cpu"))
    of_host, of_device = host.tensors[:2], device.tensors[:2]
    plain = [one.double() for one in weights]
    for one in (host, device):
        one.begin(1)
    for _ in range(8):
        num_bags = sum(sizes or (4, 4, 4))
        lengths = torch.randint(0, 3, (num_bags,), generator=generator)
        offsets = torch.cat([torch.zeros(1, dtype=torch.int64), lengths.cumsum(0)])
        indices = torch.randint(-1, 6, (int(lengths.sum()),), generator=generator)
        for one in (host, device):
            one.before_update(indices, offsets, sizes)
        for table, ids in ids_by_table(indices, offsets, sizes, features):
            weights[table][ids * ((ids >= 0) & (ids < num_rows[table]))] += 0.5
        for one in (host, device):
            one.sample(visits_all=False)
        plain = [average + 0.1 * (one - average) for average, one in zip(plain, weights, strict=True)]
    for one in (host, device):
        one.bring_all()
    for averages in zip(of_host, of_device, plain, strict=True):
        assert float((averages[0] - averages[2]).abs().max()) < ROUNDING
        assert float((averages[1] - averages[2]).abs().max()) < ROUNDING
