"""Law 13: what a replica has applied is what the tables were at that step, bit for bit, in every mode."""

from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import torch
from lightning.pytorch import Trainer
from lightning.pytorch.demos.boring_classes import BoringModel

from lightning_overlap import MODES, EmbeddingDeltas
from lightning_overlap.deltas import Part, Replica, decode, parse_names
from lightning_overlap.tuning import Auto

from ..support.cases import Case, TableSpec
from ..support.fits import QUIET
from ..support.pairs import in_turn
from ..support.ranks import RankError, Ranks
from .delta_fits import (
    At,
    Files,
    Validated,
    Windows,
    apply_in_order,
    differences,
    fit_copying_slowly,
    fit_expecting,
    fit_in_small_chunks,
    fit_managed,
    fit_marking_lookups,
    fit_warned,
    fit_with_deltas,
    halve,
    kill,
    stragglers,
)

SHARDINGS = ("table_wise", "column_wise", "row_wise", "data_parallel")


def _case(sharding: tuple[str, ...], **kwargs: object) -> Case:
    tables = tuple(
        TableSpec(f"t{number}", (f"f{number}", "shared"), sharding=one, dim=16 if one == "column_wise" else 8)
        for number, one in enumerate(sharding)
    )
    return Case("deltas", tables, **kwargs)  # type: ignore[arg-type]


ALL = _case(SHARDINGS)
OTHERS = {
    "sequences": _case(("table_wise", "row_wise"), sequence=True),
    "weighted": _case(("column_wise", "table_wise"), weighted=True),
    "adagrad": _case(("row_wise", "table_wise"), optimizer=(torch.optim.Adagrad, {"lr": 1.0})),
    "empty": _case(("table_wise", "column_wise"), empty_feature="shared"),
}


Fit = tuple[dict[int, Windows], Windows]  # a rank's tables after each step of a fit, and in the end


def parts_in(folder: Path) -> list[Part]:
    return [decode(path.read_bytes()) for path in sorted(folder.glob("g*.arrow"))]


def wrong(folder: Path, of_ranks: list[Fit], generation: int = 1) -> dict[object, object]:
    """Every cut of a generation after which a replica is not what the tables were."""
    after = apply_in_order(folder)
    last = max(after)  # deferred updates are made before it, and after the end of the last step
    found: dict[object, object] = {
        cut: differences(tables, [seen[cut[1]] for seen, _ in of_ranks])
        for cut, tables in after.items()
        if cut[0] == generation and cut != last and cut[1] in of_ranks[0][0]
    }
    found["end"] = differences(after[last], [last for _, last in of_ranks])
    replica = Replica(None, folder)
    replica.update()
    found["replica"] = [
        name for name, table in after[last].items() if not torch.equal(replica.state_dict()[name], table)
    ]
    return {cut: differing for cut, differing in found.items() if differing}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("pipeline", MODES)
def test_a_replica_equals_the_tables_after_every_step(
    get_ranks: Callable[..., Ranks], tmp_path: Path, pipeline: str, num_ranks: int
) -> None:
    of_ranks = get_ranks(num_ranks).run(fit_with_deltas, ALL, pipeline, str(tmp_path))
    assert wrong(tmp_path, of_ranks) == {}
    assert len(apply_in_order(tmp_path)) > 2  # how many, the machine decides


def test_a_replica_equals_the_tables_while_modes_take_turns(two_ranks: Ranks, tmp_path: Path) -> None:
    auto = Auto(warm_up=1, settle=1, block=2)
    of_ranks = two_ranks.run(fit_with_deltas, ALL, auto, str(tmp_path), num_steps=24)
    assert wrong(tmp_path, of_ranks) == {}


@pytest.mark.parametrize(
    ("name", "pipeline"), in_turn(OTHERS, ["fused_sparse_dist", "semi_sync_deferred", "base", "async_lookup"])
)
def test_other_kinds_of_tables(ranks: Ranks, tmp_path: Path, name: str, pipeline: str) -> None:
    of_ranks = ranks.run(fit_with_deltas, OTHERS[name], pipeline, str(tmp_path), every_n_steps=2)
    assert wrong(tmp_path, of_ranks) == {}


@pytest.mark.parametrize(("num_ranks", "pipeline"), [(1, "semi_sync_deferred"), (2, "fused_sparse_dist")])
def test_a_slow_sink_gets_fewer_cuts_each_with_the_last_values(
    get_ranks: Callable[..., Ranks], tmp_path: Path, num_ranks: int, pipeline: str
) -> None:
    kwargs = {"num_steps": 40, "sink": {"delay_s": 0.1}, "deltas": {"dense": False}}
    of_ranks = get_ranks(num_ranks).run(fit_with_deltas, ALL, pipeline, str(tmp_path), **kwargs)
    assert wrong(tmp_path, of_ranks) == {}
    assert len({name.step for name in parse_names(path.name for path in tmp_path.iterdir())}) < 30


OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "quantized_comms": ("fused_sparse_dist", {"quantized_comms": "fp16"}, {}),
    "stash_gradients": ("semi_sync", {"stash_gradients": True}, {}),
    "start_and_end": ("semi_sync", {"start_batch": 3, "end_batch": 8}, {}),
    "replicated_and_frozen": (
        "fused_sparse_dist",
        {"frozen_window": True, "replicate_tables": ["t3"], "fused_optimizer": (torch.optim.SGD, {"lr": 2.0})},
        {"accumulate_grad_batches": 2},
    ),
    "replicated_and_late": (
        "async_lookup",
        {"staleness": 3, "replicate_tables": ["t3"], "fused_optimizer": (torch.optim.SGD, {"lr": 2.0})},
        {},
    ),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_change_when_tables_are_written(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    pipeline, options, kwargs = OPTIONS[name]
    of_ranks = two_ranks.run(fit_with_deltas, ALL, pipeline, str(tmp_path), options=options, num_steps=14, **kwargs)
    assert wrong(tmp_path, of_ranks) == {}
    assert len(apply_in_order(tmp_path)) > 2
    senders = {part.header.rank for part in parts_in(tmp_path) for entry in part.rows if ".t3." in entry.table}
    assert senders == {0}  # data-parallel, or replicated: once


def test_a_cut_in_many_chunks(two_ranks: Ranks, tmp_path: Path) -> None:
    args = (fit_in_small_chunks, OTHERS["adagrad"], "semi_sync", str(tmp_path))
    of_ranks = two_ranks.run(*args, deltas={"optimizer_state": True})
    assert wrong(tmp_path, of_ranks) == {}
    names = parse_names(path.name for path in tmp_path.iterdir())
    assert max(name.num_chunks for name in names if name.step) > 5


def test_rows_marked_at_their_lookup_are_missed(two_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = two_ranks.run(fit_marking_lookups, ALL, "semi_sync_deferred", str(tmp_path))
    assert len(wrong(tmp_path, of_ranks)) > 5


@pytest.mark.parametrize("hook", ["on_train_batch_start", "on_train_batch_end"])
def test_tables_that_the_user_writes_are_sent_whole(two_ranks: Ranks, tmp_path: Path, hook: str) -> None:
    """Between two steps a copy may be under way: rows of it may be of before and after the write."""
    kwargs = {"callbacks": (At(hook, range(0, 20, 3), halve),), "num_steps": 20}
    of_ranks = two_ranks.run(fit_with_deltas, ALL, "fused_sparse_dist", str(tmp_path), **kwargs)
    assert wrong(tmp_path, of_ranks) == {}
    assert len(apply_in_order(tmp_path)) >= 4


def test_a_copy_that_a_write_has_torn_is_void(two_ranks: Ranks, tmp_path: Path) -> None:
    writes = At("on_train_batch_start", range(0, 20, 4), halve)
    of_ranks = two_ranks.run(fit_copying_slowly, ALL, "semi_sync", str(tmp_path), callbacks=(writes,), num_steps=20)
    assert wrong(tmp_path, of_ranks) == {}
    assert {part.header.step for part in parts_in(tmp_path) if part.header.is_void} >= {3, 7, 11}


def test_optimizer_states_go_with_their_rows_and_evaluations_send_nothing(ranks: Ranks, tmp_path: Path) -> None:
    kwargs = {"deltas": {"optimizer_state": True}, "data": Validated, "val_check_interval": 3}
    of_ranks = ranks.run(fit_with_deltas, OTHERS["adagrad"], "fused_sparse_dist", str(tmp_path), **kwargs)
    assert wrong(tmp_path, of_ranks) == {}
    rows = {(entry.table, entry.field): entry for part in parts_in(tmp_path) for entry in part.rows}
    assert {field for _, field in rows} == {"weight", "momentum1"}
    for (table, field), entry in rows.items():
        assert torch.equal(entry.rows, rows[table, "weight"].rows), field
        assert field == "weight" or (entry.values > 0).all()


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "semi_sync_deferred"])
def test_replicas_and_their_states_are_sent(two_ranks: Ranks, tmp_path: Path, pipeline: str) -> None:
    """From the first rank, which has not looked up the rows of the others."""
    options = {"replicate_tables": ["t3"], "fused_optimizer": (torch.optim.Adagrad, {"lr": 1.0})}
    kwargs = {"options": options, "deltas": {"optimizer_state": True}}
    of_ranks = two_ranks.run(fit_with_deltas, ALL, pipeline, str(tmp_path), **kwargs)
    assert wrong(tmp_path, of_ranks) == {}
    fields = {entry.field for part in parts_in(tmp_path) for entry in part.rows if ".t3." in entry.table}
    assert fields == {"weight", "momentum1"}


@pytest.mark.parametrize(
    ("pipeline", "killed_at", "resumed_at", "then"),
    [("fused_sparse_dist", 7, 4, 2), ("semi_sync_deferred", 11, 8, 3), ("async_lookup", 9, 4, 1)],
)
def test_a_live_replica_ends_equal_after_a_crash(
    get_ranks: Callable[..., Ranks], tmp_path: Path, pipeline: str, killed_at: int, resumed_at: int, then: int
) -> None:
    sent, saved = tmp_path / "sent", tmp_path / "saved"
    kwargs = {"saves_in": str(saved), "num_steps": 14, "every_n_steps": 2, "options": {"checkpoint_format": "sharded"}}
    kills = At("on_train_batch_end", killed_at, kill)
    with pytest.raises(RankError):
        get_ranks(2).run(fit_with_deltas, ALL, pipeline, str(sent), callbacks=(kills,), **kwargs)
    assert max(apply_in_order(sent))[1] >= killed_at - 3
    kwargs["ckpt_path"] = str(saved / f"step={resumed_at}.ckpt")
    of_ranks = get_ranks(then).run(fit_with_deltas, ALL, pipeline, str(sent), **kwargs)
    assert wrong(sent, of_ranks, generation=2) == {}
    assert stragglers(sent, [last for _, last in of_ranks], tmp_path / "replicas") == {}
    assert (2, resumed_at) in apply_in_order(sent)
    first = [part.header for part in parts_in(sent) if part.header.name.cut == (2, resumed_at)]
    assert not any(header.is_base for header in first), "what the sink holds tells which rows to send again"


@pytest.mark.parametrize(
    ("step", "error"), [(0, OSError), (5, OSError), (5, CancelledError)], ids=["at_once", "later", "cancelled"]
)
def test_a_sink_that_fails_raises_on_all_ranks(two_ranks: Ranks, tmp_path: Path, step: int, error: Any) -> None:
    """At once: before the first step. A cancelled task of asyncio raises what is no `Exception`."""
    sink = {"fails_at": step, "error": error}
    said = two_ranks.run(fit_expecting, RuntimeError, ALL, "fused_sparse_dist", str(tmp_path), sink=sink)
    assert all(f"{error.__name__}: no space left" in one for one in said)
    assert step or all("steps: 0" in one for one in said)


def test_the_parts_of_another_training_are_not_mixed_with_this_ones(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(fit_with_deltas, ALL, "base", str(tmp_path), num_steps=2)
    said = two_ranks.run(fit_expecting, ValueError, ALL, "base", str(tmp_path), num_steps=2)
    assert all("this fit begins a new run" in one and "steps: 0" in one for one in said)


def test_a_dense_part_that_replicas_would_keep_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    args, saved = (ALL, "base", str(tmp_path / "sent")), tmp_path / "saved"
    two_ranks.run(fit_with_deltas, *args, saves_in=str(saved), num_steps=6, deltas={"dense": False})
    kwargs = {"ckpt_path": str(saved / "step=4.ckpt"), "num_steps": 10}
    two_ranks.run(fit_with_deltas, *args, saves_in=str(saved), **kwargs)
    kwargs = {"ckpt_path": str(saved / "step=8.ckpt"), "num_steps": 12, "deltas": {"dense": False}}
    said = two_ranks.run(fit_expecting, ValueError, *args, **kwargs)
    assert all("dense=False would leave an old dense part in replicas" in one and "steps: 0" in one for one in said)


@pytest.mark.parametrize(("on_lag", "goes_on"), [("warn", "Training continues."), ("stop", "Training stops (on_lag=")])
def test_past_the_allowed_lag_training_warns_or_stops_as_told(
    two_ranks: Ranks, tmp_path: Path, on_lag: str, goes_on: str
) -> None:
    kwargs = {"num_steps": 30, "sink": {"delay_s": 0.4}, "deltas": {"max_lag_steps": 3, "on_lag": on_lag}}
    found = two_ranks.run(fit_warned, ALL, "fused_sparse_dist", str(tmp_path), **kwargs)
    of_ranks, warned = [fit for fit, _ in found], [[one for one in said if "behind the" in one] for _, said in found]
    [num_steps] = {len(seen) for seen, _ in of_ranks}
    assert (num_steps < 30) == (on_lag == "stop")
    assert wrong(tmp_path, of_ranks) == {}
    assert all("batches behind the training, more than max_lag_steps=3" in one and goes_on in one for one in warned[0])
    assert warned[0]
    assert not warned[1]


@pytest.mark.parametrize(
    ("kwargs", "match"),
    [
        ({"sink": None}, r"needs a folder or sink, got None \(overlap-train: deltas.path=FOLDER\)"),
        ({"every_n_steps": 0}, "every_n_steps must be at least 1, got 0"),
        ({"every_n_steps": 10, "max_lag_steps": 5}, "max_lag_steps must be at least every_n_steps=10, got 5"),
        ({"on_lag": "wait"}, "on_lag must be 'warn' or 'stop', got 'wait'"),
    ],
)
def test_arguments_are_checked(tmp_path: Path, kwargs: dict[str, Any], match: str) -> None:
    with pytest.raises(ValueError, match=match):
        EmbeddingDeltas(**{"sink": Files(str(tmp_path)), **kwargs})


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", callbacks=[EmbeddingDeltas(Files(str(tmp_path)))], max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match="needs OverlapEmbeddingStrategy, got SingleDevice"):
        trainer.fit(BoringModel())


def test_rows_that_are_assigned_as_they_come_are_refused(get_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    [said] = get_ranks(1).run(fit_managed, str(tmp_path))
    assert "assigns its rows to ids during training" in said
    assert not list(tmp_path.iterdir())
