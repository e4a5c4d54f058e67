"""Law 13: what a replica has applied is what the tables were at that step, bit for bit, in every mode."""

import signal
import time
import warnings
from asyncio import CancelledError
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.demos.boring_classes import BoringModel
from torch.utils.data import DataLoader

from lightning_overlap import MODES, EmbeddingDeltas, ExponentialMovingAverage
from lightning_overlap.deltas import CutFile, Piece, decode, parse_names
from lightning_overlap.deltas.recording import cuts
from lightning_overlap.tables import local_part
from lightning_overlap.tuning import Auto
from lightning_overlap.updated_rows import MarkedRows, UpdateWatch, touched_rows
from lightning_overlap.updated_rows.copies import KeptMemory, copy_on_host

from ..support.cases import Batches, Case, Model, TableSpec, make_batch
from ..support.fits import QUIET
from ..support.pairs import in_turn
from ..support.ranks import RankError, Ranks
from .delta_fits import At, Files, Fit, apply_in_order, differences, fit_expecting, fit_with_deltas, halve, stragglers
from .histories import updated


def _case(sharding: tuple[str, ...], **kwargs: object) -> Case:
    tables = tuple(
        TableSpec(f"t{number}", (f"f{number}", "shared"), sharding=one, dim=16 if one == "column_wise" else 8)
        for number, one in enumerate(sharding)
    )
    return Case("deltas", tables, **kwargs)  # type: ignore[arg-type]


ALL = _case(("table_wise", "column_wise", "row_wise", "data_parallel"))
OTHERS = {
    "sequences": _case(("table_wise", "row_wise"), sequence=True),
    "weighted": _case(("column_wise", "table_wise"), weighted=True),
    "adagrad": _case(("row_wise", "table_wise"), optimizer=(torch.optim.Adagrad, {"lr": 1.0})),
    "empty": _case(("table_wise", "column_wise"), empty_feature="shared"),
}


def files_in(folder: Path) -> list[CutFile]:
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
    for name, tables in (("end", after[last]), ("late", updated(None, folder).state_dict())):
        found[name] = differences(tables, [last for _, last in of_ranks])
    return {cut: differing for cut, differing in found.items() if differing}


def send(ranks: Ranks, folder: Path, *args: Any, fit: Any = fit_with_deltas, **kwargs: Any) -> None:
    """Train, and hold replicas against the tables."""
    assert wrong(folder, ranks.run(fit, *args, folder=str(folder), **kwargs)) == {}


@pytest.mark.parametrize("num_ranks", [1, 2])
@pytest.mark.parametrize("pipeline", MODES)
def test_a_replica_equals_the_tables_after_every_step(
    get_ranks: Callable[..., Ranks], tmp_path: Path, pipeline: str, num_ranks: int
) -> None:
    send(get_ranks(num_ranks), tmp_path, ALL, pipeline)
    assert len(apply_in_order(tmp_path)) > 2  # how many, the machine decides


def test_a_replica_equals_the_tables_while_modes_take_turns(two_ranks: Ranks, tmp_path: Path) -> None:
    send(two_ranks, tmp_path, ALL, Auto(warm_up=1, settle=1, block=2), num_steps=24)


class Validated(Batches):
    def val_dataloader(self) -> DataLoader:
        return DataLoader([make_batch(self.case, 100 + i, 0) for i in range(3)], batch_size=None)


@pytest.mark.parametrize(
    ("name", "pipeline"), in_turn(OTHERS, ["fused_sparse_dist", "semi_sync_deferred", "base", "async_lookup"])
)
def test_other_kinds_of_tables_beside_evaluations(ranks: Ranks, tmp_path: Path, name: str, pipeline: str) -> None:
    send(ranks, tmp_path, OTHERS[name], pipeline, every_n_steps=2, data=Validated, val_check_interval=3)


class PartlyFrozen(Model):
    """Half of the tables are frozen."""

    frozen = ("t0", "t2")

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        for name in self.frozen:
            bag = self.ebc.embedding_bags[name]
            bag.weight = torch.nn.Parameter(bag.weight.detach(), requires_grad=False)


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "semi_sync_deferred"])
def test_no_row_of_a_frozen_table_is_sent_after_the_first_cut(two_ranks: Ranks, tmp_path: Path, pipeline: str) -> None:
    send(two_ranks, tmp_path, _case(("table_wise", "table_wise", "row_wise")), pipeline, model=PartlyFrozen)
    sent = {name: [] for name in ("t0", "t1", "t2")}
    for file in files_in(tmp_path):
        for rows in file.rows:
            sent[rows.table.split(".")[-2]].append(file.header.is_base)
    assert all(map(all, (sent["t0"], sent["t2"])))
    assert not all(sent["t1"])


def test_a_slow_sink_gets_fewer_cuts_each_with_the_last_values(two_ranks: Ranks, tmp_path: Path) -> None:
    kwargs = {"num_steps": 40, "sink": {"delay_s": 0.1}, "deltas": {"dense": False}}
    send(two_ranks, tmp_path, ALL, "semi_sync_deferred", **kwargs)
    assert len({name.step for name in parse_names(path.name for path in tmp_path.iterdir())}) < 30


def fit_copying_slowly_beside_averages(*args: Any, **kwargs: Any) -> Any:
    average = ExponentialMovingAverage(0.5, tables=True)
    return fit_copying_slowly(*args, **kwargs, after=(average,))


def test_averages_that_evaluations_swap_in_are_not_sent(two_ranks: Ranks, tmp_path: Path) -> None:
    """A copy of rows is under way when a validation begins."""
    kwargs = {"fit": fit_copying_slowly_beside_averages, "data": Validated, "val_check_interval": 1}
    send(two_ranks, tmp_path, ALL, "fused_sparse_dist", **kwargs)
    assert not any(file.header.is_void for file in files_in(tmp_path))


def fit_in_pieces(*args: Any, **kwargs: Any) -> Any:
    """Train with a sink that reads the memory of the values after a while; what is given back is overwritten."""
    give_back = KeptMemory.give_back

    def write_pieces(self: Files, name: str, pieces: list[Piece]) -> None:
        time.sleep(0.02)
        self.write(name, b"".join(pieces))

    def written_by_the_next(self: KeptMemory, memory: torch.Tensor) -> None:
        memory.fill_(255)
        give_back(self, memory)

    with (
        mock.patch.object(Files, "write_pieces", write_pieces, create=True),
        mock.patch.object(KeptMemory, "give_back", written_by_the_next),
    ):
        return fit_with_deltas(*args, **kwargs)


def test_a_sink_reads_values_that_nobody_writes(two_ranks: Ranks, tmp_path: Path) -> None:
    send(two_ranks, tmp_path, ALL, "fused_sparse_dist", fit=fit_in_pieces, num_steps=30)
    assert len({name.step for name in parse_names(path.name for path in tmp_path.iterdir())}) > 3


class WithLBFGS(Model):
    """Its optimizer runs the closure several times a step, which updates the tables as often."""

    def configure_optimizers(self) -> torch.optim.Optimizer:
        [group] = super().configure_optimizers().param_groups
        return torch.optim.LBFGS(group["params"], max_iter=3)


COPIED = {"replicate_tables": ["t3"], "fused_optimizer": (torch.optim.SGD, {"lr": 2.0})}
WITH_STATE = {"replicate_tables": ["t3"], "fused_optimizer": (torch.optim.Adagrad, {"lr": 1.0})}
OPTIONS: dict[str, tuple[str, dict[str, Any], dict[str, Any]]] = {
    "quantized_comms": ("fused_sparse_dist", {"quantized_comms": "fp16"}, {}),
    "start_and_end": ("semi_sync", {"start_batch": 3, "end_batch": 8}, {}),
    "replicated_and_accumulated": ("fused_sparse_dist", COPIED, {"accumulate_grad_batches": 2}),
    "replicated_and_late": ("async_lookup", {"staleness": 3, **COPIED}, {}),
    "replicated_with_states": ("semi_sync_deferred", WITH_STATE, {"deltas": {"optimizer_state": True}}),
    "several_backwards_in_a_step": ("fused_sparse_dist", {}, {"model": WithLBFGS}),
}


@pytest.mark.parametrize("name", OPTIONS)
def test_options_that_change_when_tables_are_written(two_ranks: Ranks, tmp_path: Path, name: str) -> None:
    pipeline, options, kwargs = OPTIONS[name]
    send(two_ranks, tmp_path, ALL, pipeline, options=options, num_steps=14, **kwargs)
    assert len(apply_in_order(tmp_path)) > 2
    of_t3 = {(file.header.rank, one.field) for file in files_in(tmp_path) for one in file.rows if ".t3." in one.table}
    # data-parallel, or replicated: by the first rank alone, also the rows that the others have looked up
    assert of_t3 == {(0, "weight")} | ({(0, "momentum1")} if "deltas" in kwargs else set())


def fit_in_small_chunks(*args: Any, **kwargs: Any) -> Any:
    with mock.patch.object(cuts, "FILE_BYTES", 300):
        return fit_with_deltas(*args, **kwargs)


def test_a_cut_in_many_chunks(two_ranks: Ranks, tmp_path: Path) -> None:
    kwargs = {"fit": fit_in_small_chunks, "deltas": {"optimizer_state": True}}
    send(two_ranks, tmp_path, OTHERS["adagrad"], "semi_sync", **kwargs)
    names = parse_names(path.name for path in tmp_path.iterdir())
    assert max(name.num_chunks for name in names if name.step) > 5


def fit_marking_lookups(*args: Any, **kwargs: Any) -> Any:
    def watch(self: UpdateWatch, kernel: int) -> Any:
        def looked_up(module: Any, args: Any, kwargs: Any, answer: Any) -> None:
            if answer.requires_grad:
                marked: MarkedRows = self._before_update.__self__  # type: ignore[attr-defined]
                marked.marks[kernel].add(kwargs["indices"].clone(), kwargs["offsets"], None)
                answer.register_hook(lambda _: marked._before_update())

        return looked_up

    with mock.patch.object(UpdateWatch, "_watch", watch):
        return fit_with_deltas(*args, **kwargs)


def test_rows_marked_at_their_lookup_are_missed(two_ranks: Ranks, tmp_path: Path) -> None:
    of_ranks = two_ranks.run(fit_marking_lookups, ALL, "semi_sync_deferred", str(tmp_path))
    assert len(wrong(tmp_path, of_ranks)) > 5


def halve_by_numpy(trainer: Trainer, module: LightningModule) -> None:
    """Write where no tensor counts it: `tables_changed` alone tells."""
    for name, weight in module.named_parameters():
        if "embedding" in name:
            local_part(weight).numpy()[:] *= 0.5
    trainer.strategy.tables_changed()


@pytest.mark.parametrize(("hook", "write"), [("on_train_batch_start", halve_by_numpy), ("on_train_batch_end", halve)])
def test_tables_that_the_user_writes_are_sent_whole(two_ranks: Ranks, tmp_path: Path, hook: str, write: Any) -> None:
    """Between two steps a copy may be under way: rows of it may be of before and after the write."""
    kwargs = {"callbacks": (At(hook, range(0, 20, 3), write),), "num_steps": 20}
    send(two_ranks, tmp_path, ALL, "fused_sparse_dist", **kwargs)
    assert len(apply_in_order(tmp_path)) >= 4


def fit_copying_slowly(*args: Any, **kwargs: Any) -> Any:
    """Train with copies of rows that take until the next forward is over, so that the user's hooks write meanwhile."""

    def late(*args: Any, **kwargs: Any) -> Any:
        time.sleep(0.05)
        return copy_on_host(*args, **kwargs)

    with mock.patch.object(touched_rows, "copy_on_host", late):
        return fit_with_deltas(*args, **kwargs)


def test_a_copy_that_a_write_has_torn_is_void(two_ranks: Ranks, tmp_path: Path) -> None:
    writes = At("on_train_batch_start", range(0, 20, 4), halve)
    send(two_ranks, tmp_path, ALL, "semi_sync", fit=fit_copying_slowly, callbacks=(writes,), num_steps=20)
    assert {file.header.step for file in files_in(tmp_path) if file.header.is_void} >= {3, 7, 11}


def kill(*_: object) -> None:
    signal.raise_signal(signal.SIGKILL)


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
    assert stragglers(sent, [last for _, last in of_ranks]) == {}
    assert (2, resumed_at) in apply_in_order(sent)
    first = [file.header for file in files_in(sent) if file.header.name.cut == (2, resumed_at)]
    assert not any(header.is_base for header in first), "what the sink holds tells which rows to send again"


@pytest.mark.parametrize(
    ("step", "error"), [(0, OSError), (5, OSError), (5, CancelledError)], ids=["at_once", "later", "cancelled"]
)
def test_a_sink_that_fails_raises_on_all_ranks(two_ranks: Ranks, tmp_path: Path, step: int, error: Any) -> None:
    """At once: before the first step. A cancelled task of asyncio raises what is no `Exception`."""
    sink = {"fails_at": step, "error": error}
    said = two_ranks.run(fit_expecting, RuntimeError, ALL, "fused_sparse_dist", str(tmp_path), sink=sink)
    assert all(f"{error.__name__}: no space left" in one and (step or not tables) for one, tables in said)


def test_the_parts_of_another_training_are_not_mixed_with_this_ones(two_ranks: Ranks, tmp_path: Path) -> None:
    two_ranks.run(fit_with_deltas, ALL, "base", str(tmp_path), num_steps=2)
    said = two_ranks.run(fit_expecting, ValueError, ALL, "base", str(tmp_path), num_steps=2)
    assert all("this fit begins a new run" in one and not tables for one, tables in said)


def test_a_dense_part_that_replicas_would_keep_is_refused(two_ranks: Ranks, tmp_path: Path) -> None:
    args, saved = (ALL, "base", str(tmp_path / "sent")), tmp_path / "saved"
    two_ranks.run(fit_with_deltas, *args, saves_in=str(saved), num_steps=6, deltas={"dense": False})
    kwargs = {"ckpt_path": str(saved / "step=4.ckpt"), "num_steps": 10}
    two_ranks.run(fit_with_deltas, *args, saves_in=str(saved), **kwargs)
    kwargs = {"ckpt_path": str(saved / "step=8.ckpt"), "num_steps": 12, "deltas": {"dense": False}}
    said = two_ranks.run(fit_expecting, ValueError, *args, **kwargs)
    assert all("dense=False would leave an old dense part in replicas" in one and not tables for one, tables in said)


def fit_warned(*args: Any, **kwargs: Any) -> tuple[Any, list[str]]:
    """Train as above; return its result, and what was warned of."""
    with warnings.catch_warnings(record=True, action="always") as caught:
        found = fit_with_deltas(*args, **kwargs)
    return found, [str(one.message) for one in caught]


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


def test_two_sinks_need_names(tmp_path: Path) -> None:
    senders = [EmbeddingDeltas(Files(str(tmp_path))), EmbeddingDeltas(Files(str(tmp_path)), name="b")]
    Trainer(accelerator="cpu", callbacks=senders, **QUIET)
    senders[1] = EmbeddingDeltas(Files(str(tmp_path)))
    with pytest.raises(RuntimeError, match=r"(?s)more than one stateful callback of type `EmbeddingDeltas`.*state_key"):
        Trainer(accelerator="cpu", callbacks=senders, **QUIET)


def test_another_strategy_is_refused(tmp_path: Path) -> None:
    trainer = Trainer(accelerator="cpu", callbacks=[EmbeddingDeltas(Files(str(tmp_path)))], max_epochs=1, **QUIET)
    with pytest.raises(ValueError, match="needs OverlapEmbeddingStrategy, got SingleDevice"):
        trainer.fit(BoringModel())
