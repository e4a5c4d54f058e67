"""Replicated tables: trained as the sharded ones are, and alike on all ranks."""

import dataclasses
import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_overlap import MODES, OverlapEmbeddingStrategy

from ..support.cases import NUM_STEPS
from ..support.ranks import RankError, Ranks
from ..support.reference import Result
from ..support.windows import train_windows, windows_of
from . import replicas
from .replicas import OPTIMIZERS, SMALL, case_of

ALL = ["s0", "s1", "s2", "t0", "t1"]


def whole(results: list[Result], part: str) -> dict[str, Tensor]:
    """Return what the ranks hold, tables whole; what several hold has to be the same bit for bit."""
    found: dict[str, Tensor] = {}
    for result in results:
        for key, value in getattr(result, part).items():
            name = key.partition(" [")[0]
            assert torch.equal(found.setdefault(name, value), value), f"ranks differ in {name}"
    return found


def assert_close(ours: list[Result], theirs: list[Result]) -> None:
    """Equal to rounding: gradients are summed in another order."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.losses, other.losses, rtol=1e-4, atol=1e-5)
    for part in ("tables", "fused_state", "dense", "dense_state"):
        torch.testing.assert_close(whole(ours, part), whole(theirs, part), rtol=1e-3, atol=1e-4)


PIPELINES = {
    "sgd": ("base", "fused_sparse_dist", "semi_sync"),
    "adagrad": ("sparse_dist", "semi_sync_deferred"),
    "rowwise": ("fused_sparse_dist", "semi_sync"),
}


@pytest.mark.parametrize(
    ("optimizer", "pipeline"), [(name, pipeline) for name, some in PIPELINES.items() for pipeline in some]
)
def test_trained_as_in_the_plain_loop_that_shards_all_tables(two_ranks: Ranks, optimizer: str, pipeline: str) -> None:
    """Replicas are never stale."""
    case = case_of(optimizer)
    ours = two_ranks.run(replicas.fit, case, pipeline)
    assert_close(ours, two_ranks.run_once(replicas.reference, case, MODES[pipeline].staleness))
    assert set(whole(ours, "tables")) == {table.name for table in case.tables}
    assert all(set(SMALL) <= set(result.tables) for result in ours), "every rank has them whole"


def test_exact_modes_are_equal_bit_for_bit(two_ranks: Ranks) -> None:
    first, *others = [
        two_ranks.run(replicas.fit, case_of("rowwise"), pipeline)
        for pipeline, schedule in MODES.items()
        if not schedule.staleness
    ]
    for other in others:
        assert [mine.differences(theirs) for mine, theirs in zip(other, first, strict=True)] == [[], []]


@pytest.mark.parametrize(
    ("pipeline", "replicated"),
    [("semi_sync", SMALL), ("fused_sparse_dist", ALL), ("fused_sparse_dist_after_optimizer", ALL)],
)
def test_rates_follow_the_schedule(two_ranks: Ranks, pipeline: str, replicated: Sequence[str]) -> None:
    """Where all tables are replicated, no kernel of another one asks for the rates of a backward."""
    case = case_of("adagrad")
    ours = two_ranks.run(replicas.fit, case, pipeline, "Scheduled", {"replicated": replicated})
    assert_close(ours, two_ranks.run(replicas.reference, case, MODES[pipeline].staleness, scheduled=True))


def test_a_combined_optimizer_and_the_log_show_the_rates_of_replicas(two_ranks: Ranks) -> None:
    groups = [("fused_0.7", 0.7), ("fused_2.0", 2.0)]
    lines = [
        "ebc: t0, t1: table_wise, trained by SGD in the backward, lr 2",
        "ebc: s0, s1: replicated, trained by SGD in the backward, lr 2",
        "ebc: s2: replicated, trained by SGD in the backward, lr 0.7",
    ]
    assert two_ranks.run(replicas.shown_of, case_of("sgd"), SMALL) == [(groups, lines)] * 2
    assert [shown[0] for shown in two_ranks.run(replicas.shown_of, case_of("sgd"), None)] == [groups] * 2


@pytest.mark.parametrize(
    ("model", "optimizer", "kwargs"),
    [
        ("Model", "adagrad", {"accumulate_grad_batches": 3}),
        ("TwoBackwards", "rowwise", {}),
        ("TwoCalls", "adagrad", {}),
        ("Frozen", "rowwise", {}),
        ("Model", "rowwise", {"precision": "bf16-mixed"}),
    ],
)
def test_updated_whenever_a_sharded_table_is(
    two_ranks: Ranks, model: str, optimizer: str, kwargs: dict[str, Any]
) -> None:
    """In the backward of every batch, once for each call."""
    case = case_of(optimizer)
    sharded = two_ranks.run(replicas.fit, case, "base", model, {"replicated": None}, **kwargs)
    assert_close(two_ranks.run(replicas.fit, case, "fused_sparse_dist", model, **kwargs), sharded)


def test_a_replica_that_is_written_between_two_steps_is_looked_up_anew(two_ranks: Ranks) -> None:
    """As the sharded table is in the reference mode; where nobody writes, no batch ahead is compared in each step."""
    case = case_of("rowwise")
    (ours, compared), (_, unwritten) = (
        zip(*two_ranks.run(replicas.num_compared, case, model), strict=True) for model in ("Writes", "Model")
    )
    assert_close(list(ours), two_ranks.run(replicas.fit, case, "base", "Writes", {"replicated": None}))
    assert unwritten == (0, 0)
    assert min(compared) > 0


@pytest.mark.parametrize(
    ("optimizer", "pipeline", "model"),
    [("rowwise", "fused_sparse_dist", "Model"), ("adagrad", "sparse_dist", "MakesInput"), ("sgd", "base", "Model")],
)
def test_a_frozen_window_holds_their_updates_too(two_ranks: Ranks, optimizer: str, pipeline: str, model: str) -> None:
    """Also where a module runs its own forward, with validations within windows, and a last window of two batches."""
    case, k = case_of(optimizer), 4
    options = {"frozen_window": pipeline != "base"}
    kwargs = {"accumulate_grad_batches": k, "val_check_interval": 3, "limit_val_batches": 2}
    ours = two_ranks.run(replicas.fit, case, pipeline, model, options, **kwargs)
    expected = two_ranks.run_once(train_windows, case, windows_of(NUM_STEPS, k), updates_in_backward=pipeline == "base")
    assert_close(ours, expected)


def test_a_stop_in_a_frozen_window_leaves_their_updates_out(two_ranks: Ranks) -> None:
    """Batches 4 and 5 have no optimizer step; a backward after the fit makes its own update again."""
    case = case_of("rowwise")
    left, moved = zip(*two_ranks.run(replicas.stopped_in_a_window, case, 4, 6), strict=True)
    assert {len(result.losses) for result in left} == {6}
    first_step = [dataclasses.replace(result, losses=result.losses[:4]) for result in left]
    assert_close(first_step, two_ranks.run_once(train_windows, case, windows_of(4, 4)))
    assert all(set(SMALL) <= set(names) for names in moved)


@pytest.mark.parametrize(
    ("optimizer", "checkpoint_format", "saved_by", "loaded_by"),
    [
        ("rowwise", "sharded", (2, SMALL), (2, None)),
        ("rowwise", "full", (2, None), (2, SMALL)),
        ("adagrad", "full", (2, SMALL), (1, None)),
        ("adagrad", "sharded", (1, None), (2, SMALL)),
        ("sgd", "sharded", (2, SMALL), (2, SMALL)),
    ],
)
def test_a_checkpoint_moves(
    get_ranks: Callable[..., Ranks],
    tmp_path: Path,
    optimizer: str,
    checkpoint_format: str,
    saved_by: tuple[int, Any],
    loaded_by: tuple[int, Any],
) -> None:
    """What is loaded is what was saved, to the bit, and on as many ranks training goes on as it would have."""
    case, options = case_of(optimizer), {"checkpoint_format": checkpoint_format}
    (ranks_before, replicated_before), (ranks_after, replicated) = saved_by, loaded_by
    before = get_ranks(ranks_before).run(
        replicas.train_from, case, str(tmp_path / "a"), replicated=replicated_before, epochs=1, **options
    )
    path = before[0][1]
    loaded = get_ranks(ranks_after).run(
        replicas.train_from, case, str(tmp_path / "b"), replicated=replicated, epochs=1, resume=path, **options
    )
    for part in ("tables", "fused_state"):
        saved = whole([result for result, *_ in before], part)
        torch.testing.assert_close(whole([result for result, *_ in loaded], part), saved, rtol=0, atol=0)
    assert [said for *_, said in loaded] == [[]] * ranks_after
    if checkpoint_format == "full":
        torch.testing.assert_close(
            replicas.load_unsharded(case, path), whole([result for result, *_ in before], "tables"), rtol=0, atol=0
        )
    if ranks_before == ranks_after:
        on, through = (
            get_ranks(ranks_after).run(
                replicas.train_from, case, str(tmp_path / name), replicated=own, epochs=2, resume=resume, **options
            )
            for name, own, resume in (("on", replicated, path), ("through", replicated_before, None))
        )
        for part in ("tables", "fused_state", "dense"):
            ours, theirs = (whole([result for result, *_ in ranks], part) for ranks in (on, through))
            torch.testing.assert_close(ours, theirs, rtol=1e-3, atol=1e-4)


SGD = OPTIMIZERS["sgd"]
EPS_0 = (torch.optim.Adagrad, {"lr": 1.0, "eps": 0.0})


@pytest.mark.parametrize(
    ("optimizer", "replicated", "batch_size", "sharding", "expected"),
    [
        (SGD, None, 121, None, ALL),  # of 120 rows
        (SGD, None, 120, None, []),
        (SGD, None, None, None, []),
        (SGD, 121, 16, None, ALL),
        (SGD, 120, 1000, None, []),
        (SGD, False, 1000, None, []),
        (SGD, ["s1"], None, None, ["s1"]),
        (SGD, None, 1000, "table_wise", []),
        (SGD, None, 1000, {"t0": "table_wise", "t1": "column_wise"}, list(SMALL)),
        (SGD, ["s1"], None, {"s1": "data_parallel"}, ["s1"]),
        (EPS_0, None, 1000, None, []),
    ],
)
def test_a_table_with_fewer_rows_than_a_batch_is_replicated(
    two_ranks: Ranks, optimizer: Any, replicated: Any, batch_size: int | None, sharding: Any, expected: list[str]
) -> None:
    found = two_ranks.run(replicas.replicated_in, optimizer, replicated, batch_size, sharding)
    assert found == [expected, expected]


@pytest.mark.parametrize(("sharding", "expected"), [(None, []), ({"s1": "data_parallel"}, ["s1"])])
def test_one_rank_replicates_nothing_by_itself(get_ranks: Callable[..., Ranks], sharding: Any, expected: Any) -> None:
    assert get_ranks(1).run(replicas.replicated_in, SGD, ["s1"], 1000, sharding) == [expected]


def test_a_fused_optimizer_of_the_strategy_counts(two_ranks: Ranks) -> None:
    found = [
        two_ranks.run(replicas.replicated_in, None, None, 1000, fused_optimizer=optimizer)
        for optimizer in (OPTIMIZERS["rowwise"], EPS_0)
    ]
    assert found == [[ALL, ALL], [[], []]]


@pytest.mark.parametrize(
    ("optimizer", "replicated", "sharding", "words"),
    [
        (SGD, ["s9"], None, ["replicate_tables", "'s9'", "s0"]),
        (SGD, ["s1"], "table_wise", ["'s1'", "replicate_tables", "'table_wise'"]),
        (EPS_0, ["s1"], None, ["ebc.s1", "eps=0"]),
        (SGD, ["s1"], {"s0": "data_parallel"}, ["ebc.s0", "ebc.s1", "replicate all of them"]),
        (None, ["s1"], None, ["ebc.s1", "no fused optimizer"]),
    ],
)
def test_what_cannot_be_replicated_is_refused_by_name(
    two_ranks: Ranks, optimizer: Any, replicated: Any, sharding: Any, words: list[str]
) -> None:
    for said in two_ranks.run(replicas.replicated_in, optimizer, replicated, None, sharding):
        assert all(word in said for word in words), said


@pytest.mark.parametrize(
    ("of_second", "replicated", "expected"),
    [
        (SGD, None, ["ebc.s0", "ebc.s1", "second.s0"]),
        (EPS_0, None, ["ebc.s1"]),
        (EPS_0, ["s0"], "replicate_tables: second.s0 cannot be replicated: Adagrad with eps=0 divides 0 by 0"),
    ],
)
def test_tables_of_one_name_are_replicated_alike(
    two_ranks: Ranks, of_second: Any, replicated: Any, expected: Any
) -> None:
    """A planner cannot tell them apart, so the one that cannot be replicated decides."""
    for found in two_ranks.run(replicas.replicated_of_one_name, of_second, replicated):
        assert found == expected or (isinstance(found, str) and found.startswith(expected))


def test_batch_sizes_that_vary_are_refused(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match="replicate_tables=False"):
        two_ranks.run(replicas.check_unsharded, "variable_batch", "base")


@pytest.mark.parametrize(("given", "error"), [(True, TypeError), ("s0", TypeError), ([1], TypeError), (-1, ValueError)])
def test_arguments(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="replicate_tables"):
        OverlapEmbeddingStrategy(replicate_tables=given)


@pytest.mark.parametrize(
    ("name", "pipeline"), [("bags", "fused_sparse_dist"), ("weighted_bags", "semi_sync"), ("sequences", "base")]
)
def test_computes_what_the_unsharded_module_computes(get_ranks: Callable[..., Ranks], name: str, pipeline: str) -> None:
    assert get_ranks(3).run(replicas.check_unsharded, name, pipeline) == [""] * 3


def test_the_error_of_a_penalty_names_replicated_and_sharded_tables(two_ranks: Ranks) -> None:
    named = set()
    for message in two_ranks.run(replicas.error_of_penalty, case_of("sgd")):
        found = re.search("the loss uses the weight of (.*) directly", message)
        assert found is not None, message
        of_rank = set(found[1].split(", "))
        assert set(SMALL) < of_rank
        named |= of_rank
    assert named == set(ALL)


def test_a_penalty_is_refused_after_a_backward_with_another_error(get_ranks: Callable[..., Ranks]) -> None:
    [other] = get_ranks(1).run(replicas.error_of_penalty, case_of("sgd"), "PenalizesAllAndFails")
    [message] = get_ranks(1).run(replicas.error_of_penalty, case_of("sgd"))
    assert other == "another error"
    assert "the loss uses the weight of" in message
