"""Real fits on one rank whose streams follow every operator's memory: no race, and each wait left out is one."""

import copy
import warnings
from collections.abc import Callable, Mapping
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from lightning_overlap import MODES, STREAMS, Mode
from lightning_overlap.runtime import deferred_updates, table_writes, walker
from lightning_overlap.schedules.stages import Stage, StreamName
from lightning_overlap.sparse import module_flight
from lightning_overlap.tables import tbes
from lightning_overlap.testing import CheckedStreams, RaceError, checked_streams
from lightning_overlap.testing.watched_fit import Setting, Watched, _WatchedStrategy, fit, process_group

from ..sparse.update_rates import Scheduled
from ..support import cases, mutants
from ..support.cases import MIXED, TABLE_WISE, Model
from ..support.pairs import pairwise
from .test_check_module import check

OVERLAPPING = sorted(
    (name for name, mode in MODES.items() if mode.has_sparse_stages), key=lambda name: name not in mutants.NEED_MOST
)


def train(
    case: cases.Case,
    pipeline: str,
    stream: str = "dedicated",
    module: Callable[[cases.Case], Model] = Model,
    strategy_options: Mapping[str, Any] | None = None,
    **trainer_options: Any,
) -> None:
    batches = [cases.make_batch(case, index, 0) for index in range(7)]
    # On a device the kernels alone check ids.
    options = {"sharding": cases.make_plan(case, Model(case), 1), "stream": stream, "out_of_range_ids": "fbgemm"}
    options |= strategy_options or {}
    with process_group("cpu"), warnings.catch_warnings(action="ignore"):
        setting = Setting(lambda: module(case), batches, trainer_options=trainer_options, strategy_options=options)
        # A digest after each step would make pending updates at once.
        watched = Watched(every_state=False)
        fit(setting, Mode(pipeline), watched, races=True)  # type: ignore[arg-type]


CASES = {
    case.name: case for case in (MIXED, cases.SEQUENCE, cases.TWO_COLLECTIONS, cases.WEIGHTED, cases.ROWWISE_ADAGRAD)
}


@pytest.mark.parametrize(("name", "pipeline", "policy"), pairwise(CASES, MODES, STREAMS))
def test_no_race_in_any_mode(name: str, pipeline: str, policy: str) -> None:
    train(CASES[name], pipeline, policy)


FILES = (walker, deferred_updates, table_writes)
NOT_HERE = [
    *mutants.statements(walker, "_order_prefetch"),  # a CPU has no tables in a cache,
    *mutants.statements(deferred_updates, "start"),  # one rank sends no gradients,
    *mutants.statements(table_writes, "_drop_lookups"),  # and the next lookup is a module's own, which waits by itself
]
STATEMENTS = [(file, *found) for file in FILES for found in mutants.statements(file) if found not in NOT_HERE]
STATEMENTS += [(module_flight, *found) for found in mutants.statements(module_flight, "_receive")]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "line"), [entry[:2] for entry in STATEMENTS], ids=[entry[2] for entry in STATEMENTS])
def test_a_wait_or_hand_over_that_is_left_out_is_a_race(file: ModuleType, line: int) -> None:
    runs = [partial(train, MIXED, pipeline) for pipeline in OVERLAPPING]
    runs += [
        partial(train, MIXED, "split_backward", module=ReadsTablesAfterBackward),
        partial(train, MIXED, "semi_sync_deferred", module=ReadsTablesBeforeBackward),
        partial(train, MIXED, "fused_sparse_dist", module=WritesTablesBetweenEpochs, max_epochs=2),
        partial(train, cases.ROWWISE_ADAGRAD, "fused_sparse_dist"),  # SGD's kernels count no iterations
    ]
    with mutants.without(file, line):  # the first run that has a race is enough
        assert any(mutants.races(run) for run in runs)


def test_the_files_without_anything_left_out_have_no_race() -> None:
    with mutants.unchanged([*FILES, module_flight]):
        train(MIXED, "semi_sync")
    assert len(STATEMENTS) >= 15


class ReadsTables(Model):
    def read(self) -> None:
        for value in self.ebc.state_dict().values():
            shards = value.local_shards() if hasattr(value, "local_shards") else [value]
            self.norm = sum(getattr(shard, "tensor", shard).square().sum() for shard in shards)

    def on_train_batch_end(self, *args: Any) -> None:
        self.read()


class ReadsTablesAfterBackward(ReadsTables):
    def on_after_backward(self) -> None:
        self.read()

    def on_before_optimizer_step(self, optimizer: Any) -> None:
        self.read()


class SkipsSteps(ReadsTables):
    def optimizer_step(self, epoch: int, batch_idx: int, optimizer: Any, closure: Any) -> None:
        if batch_idx % 2:
            optimizer.step(closure=closure)
        else:
            closure()


class StepsByHand(cases.ByHand, ReadsTables):
    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        loss = super().training_step(batch, batch_idx)
        optimizer.zero_grad()
        self.manual_backward(loss)
        self.read()
        optimizer.step()
        self.read()


class MovesItsRates(ReadsTables, Scheduled):
    """Has each early lookup repeated within its backward."""


class LooksUpTwice(ReadsTables):
    """Looks up its tables a second time from batch 3 on: the gradients of both lookups are ready at the same time."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx < 3:
            return super().training_step(batch, batch_idx)
        both = [{name: self.embeddings(name, batch) for name in sorted(self.case.collections)} for _ in range(2)]
        keys = batch.inputs["sparse"][0].keys()
        summed = {name: {key: both[0][name][key] + both[1][name][key] for key in keys} for name in both[0]}
        return self.dense(batch, summed)


class LooksUpOnAStreamOfItsOwn(ReadsTables):
    """Calls its collection with a copy of the batch's input, which makes the lookup its own forward's."""

    def embeddings(self, collection: str, batch: Any) -> Any:
        streams: Any = self.trainer.strategy.streams
        with streams.on(StreamName.PREFETCH):  # nothing orders it after the updates, which the strategy makes
            kjt = batch.inputs["sparse"][0]
            keys = kjt.keys()
            streams.wait(StreamName.PREFETCH, streams.record(StreamName.COMPUTE))
            streams.record_stream(kjt, StreamName.PREFETCH)
            found = getattr(self, collection)(copy.copy(kjt))
            found = {key: found[key] for key in keys}
        streams.give_to_caller(streams.made(found, on=StreamName.PREFETCH))
        return found


class ReadsKernels(Model):
    """Reads the tables where they are; a `state_dict` would make pending updates first."""

    def read(self) -> None:
        for kernel in tbes(self.ebc):
            self.norm = sum(weights.square().sum() for weights in kernel.split_embedding_weights())


class TrainsBetweenSteps(ReadsKernels):
    """Runs a forward and a backward of its own after each other step, and reads the tables that it has updated."""

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 2:
            strategy: Any = self.trainer.strategy
            strategy.update_tables()  # as before every write
            with torch.enable_grad():
                self(batch).backward()
            self.read()


class ReadsTablesInItsStep(ReadsKernels):
    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.read()
        return super().training_step(batch, batch_idx)


class ReadsTablesBeforeBackward(ReadsKernels):
    def on_before_backward(self, loss: Tensor) -> None:
        self.read()


class WritesTables(ReadsTables):
    """Writes its tables after the step of batch 3; batch 4 looks up nothing, so an early lookup reads them next."""

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        if batch_idx != 4:
            return super().training_step(batch, batch_idx)
        return torch.square(self.bottom(batch.dense)).mean()

    def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = self.trainer.strategy
        if batch_idx == 3:
            with strategy.saving():  # makes pending updates, and waits for early lookups, which read the tables
                pass
            for kernel in tbes(self.ebc):
                for weights in kernel.split_embedding_weights():
                    weights.mul_(0.5)
            strategy.tables_changed()
        super().on_train_batch_end(outputs, batch, batch_idx)


class WritesTablesBetweenEpochs(Model):
    def on_train_epoch_end(self) -> None:
        for kernel in tbes(self.ebc):
            for weights in kernel.split_embedding_weights():
                weights.mul_(0.5)


class RecomputesItsLookup(ReadsTables):
    def embeddings(self, collection: str, batch: Any) -> Any:
        kjt = batch.inputs["sparse"][0]
        keys = kjt.keys()

        def look_up(anchor: Tensor) -> tuple[Tensor, ...]:
            found = getattr(self, collection)(kjt).to_dict()
            return tuple(found[key] + 0 * anchor for key in keys)

        rows = torch.utils.checkpoint.checkpoint(look_up, torch.zeros((), requires_grad=True), use_reentrant=True)
        return dict(zip(keys, rows, strict=True))


USERS: dict[str, tuple[type[Model], dict[str, Any]]] = {
    "reads": (ReadsTables, {}),
    "reads_accumulating": (ReadsTables, {"accumulate_grad_batches": 2}),
    "reads_after_backward": (ReadsTablesAfterBackward, {}),
    "skips_steps": (SkipsSteps, {}),
    "steps_by_hand": (StepsByHand, {}),
    "moves_its_rates": (MovesItsRates, {}),
    "recomputes_its_lookup": (RecomputesItsLookup, {}),
    "looks_up_twice": (LooksUpTwice, {}),
    "looks_up_on_a_stream_of_its_own": (LooksUpOnAStreamOfItsOwn, {}),
    "writes_tables": (WritesTables, {}),
    "trains_between_steps": (TrainsBetweenSteps, {}),
    "reads_in_its_step": (ReadsTablesInItsStep, {}),
    "reads_before_backward": (ReadsTablesBeforeBackward, {}),
}


@pytest.mark.parametrize(("name", "pipeline", "policy"), pairwise(USERS, MODES, ["dedicated", "data_dist"]))
def test_the_users_code_is_ordered_with_lookups_and_updates(name: str, pipeline: str, policy: str) -> None:
    module, options = USERS[name]
    train(TABLE_WISE, pipeline, policy, module, **options)


class ScalesInItsHook(Model):
    def __init__(self, case: cases.Case) -> None:
        super().__init__(case)
        self.register_buffer("scale", torch.ones(6))

    def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        return cases.Batch(batch.dense * self.scale, batch.inputs, batch.labels)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.scale.mul_(0.5)
        return super().training_step(batch, batch_idx)


def test_a_transfer_hook_comes_after_what_the_step_wrote() -> None:
    train(TABLE_WISE, "fused_sparse_dist", module=ScalesInItsHook)
    with mock.patch.object(CheckedStreams, "wait", _waits_but_for_hooks), pytest.raises(RaceError, match="on memcpy"):
        train(TABLE_WISE, "fused_sparse_dist", module=ScalesInItsHook)


def _waits_but_for_hooks(self: CheckedStreams, name: StreamName, event: Any, own: Any = CheckedStreams.wait) -> None:
    if name is not StreamName.MEMCPY:
        own(self, name, event)


class WritesInBackward(torch.autograd.Function):
    """Writes its weight as a fused table is written, which gets no gradient; and reads it on a stream, if told so."""

    reads_on: Any = None

    @staticmethod
    def forward(ctx: Any, x: Tensor, weight: Tensor) -> Tensor:
        ctx.weight = weight
        return x * weight

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        if WritesInBackward.reads_on is not None:
            with WritesInBackward.reads_on.on(StreamName.PREFETCH):
                ctx.weight + 1
        ctx.weight.sub_(grads[0])
        return None, None


def test_a_result_is_read_on_another_stream_after_a_wait() -> None:
    streams = CheckedStreams()
    with streams.watching({}, {}, []):
        with streams.on(StreamName.LOOKUP):
            made = torch.ones(4) * 2
        part = made[:2].view(1, 2)  # a view reads nothing, and shares the memory
        for read in (made, part):
            with pytest.raises(
                RaceError, match=r"no event orders aten\.add\.Tensor.*a race for aten.mul.Tensor \(4,\)"
            ):
                read + 1
        streams.wait(StreamName.COMPUTE, streams.record(StreamName.LOOKUP))
        made + part.sum()


def test_backward_runs_where_the_forward_ran_and_nobody_waits_for_its_end(monkeypatch: pytest.MonkeyPatch) -> None:
    streams, weight, x = CheckedStreams(), torch.ones(4), torch.ones(4, requires_grad=True)
    with streams.watching({"table": weight, "x": x.detach()}, {}, []):
        streams.wait(StreamName.LOOKUP, streams.record(StreamName.COMPUTE))
        with streams.on(StreamName.LOOKUP):
            rows = WritesInBackward.apply(x, weight)
        streams.wait(StreamName.COMPUTE, streams.record(StreamName.LOOKUP))
        streams.record_stream(rows, StreamName.COMPUTE)
        (rows * 2).sum().backward()
        with pytest.raises(RaceError, match=r"after aten.sub_.Tensor .*writes on lookup\): a race for table"):
            weight + 1
        streams.wait(StreamName.COMPUTE, streams.record(StreamName.LOOKUP))
        weight + 1
        monkeypatch.setattr(WritesInBackward, "reads_on", streams)  # a stream that a node takes waits for nothing
        with pytest.raises(RaceError, match=r"aten.add.Tensor .*\(reads on prefetch\)"):
            WritesInBackward.apply(x, weight).sum().backward()


class UsesAStreamOfItsOwn(Model):
    def dense(self, batch: Any, embeddings: Any) -> Tensor:
        streams: Any = self.trainer.strategy.streams
        streams.wait(StreamName.PREFETCH, streams.record(StreamName.COMPUTE))
        if batch.inputs["sparse"][1] == 0:  # looked up on the compute stream, where it was called
            streams.record_stream([found.values() for found in embeddings.values()], StreamName.PREFETCH)
        with streams.on(StreamName.PREFETCH):
            scaled = {
                name: {key: 2 * value for key, value in found.to_dict().items()} for name, found in embeddings.items()
            }
        streams.wait(StreamName.COMPUTE, streams.record(StreamName.PREFETCH))
        streams.record_stream(scaled, StreamName.COMPUTE)
        return super().dense(batch, scaled)


def test_embeddings_are_there_on_whatever_stream_asks_for_them() -> None:
    train(TABLE_WISE, "fused_sparse_dist", module=UsesAStreamOfItsOwn)


class ReadsOnAStreamOfItsOwn(ReadsTables):
    """Reads its tables on another stream, which waits for nothing: the last backward may be writing them."""

    def read(self) -> None:
        streams: Any = self.trainer.strategy.streams
        with streams.on(StreamName.PREFETCH):
            super().read()
        streams.wait(StreamName.COMPUTE, streams.record(StreamName.PREFETCH))


def test_a_race_of_the_users_own_hook_is_named() -> None:
    message = (
        "BROKEN  law 2: no row is read while it is written.*no event orders aten.* after fbgemm.split_embedding_back"
    )
    with pytest.raises(AssertionError, match=f"(?s){message}"):
        check(TABLE_WISE, "fused_sparse_dist", ReadsOnAStreamOfItsOwn, stream="dedicated")


def _known(monkeypatch: pytest.MonkeyPatch, pipeline: str) -> tuple[list[int], list[int]]:
    """Train; return what the streams know of each other's work, in pieces of work that are still to come for them.

    Of the compute stream, the lookup stream, as it comes to a lookup; of the lookup stream, the compute stream, as it
    comes from a backward.
    """
    lookup_behind, compute_behind = [], []
    observed, compute, lookup = _WatchedStrategy._observed, StreamName.COMPUTE, StreamName.LOOKUP

    def note(self: Any, kind: str, stage: Stage, batch: int) -> None:
        observed(self, kind, stage, batch)
        clocks = {name: self.checked.record(name) for name in (compute, lookup)}
        if (kind, stage) == ("issue", Stage.EMBEDDING_LOOKUP) and batch > 1:
            lookup_behind.append(clocks[compute][compute] - clocks[lookup][compute])
        if (kind, stage) == ("issue", Stage.BACKWARD):
            compute_behind.append(clocks[lookup][lookup] - clocks[compute][lookup])

    monkeypatch.setattr(_WatchedStrategy, "_observed", note)
    train(TABLE_WISE, pipeline)
    return lookup_behind, compute_behind


def test_a_lookup_does_not_wait_for_the_weight_gradients(monkeypatch: pytest.MonkeyPatch) -> None:
    behind, _ = _known(monkeypatch, "split_backward")
    assert len(behind) >= 4
    assert all(behind), "a backward on the lookup stream has waited for the compute stream"


def test_the_dense_optimizer_does_not_wait_for_the_tables(monkeypatch: pytest.MonkeyPatch) -> None:
    _, behind = _known(monkeypatch, "fused_sparse_dist")
    assert len(behind) >= 4
    assert all(behind), "the backward has ended by waiting for the lookup stream"


@pytest.mark.parametrize("leaves", [StreamName.COMPUTE, StreamName.LOOKUP])
def test_where_the_graphs_of_tables_end_decides_who_waits(monkeypatch: pytest.MonkeyPatch, leaves: StreamName) -> None:
    """Guards the two tests above: autograd makes the nodes of the tables on one stream or the other."""
    hold = CheckedStreams.hold_leaves

    def hold_on(self: CheckedStreams, tables: Any, name: StreamName) -> list[Any]:
        nodes = hold(self, tables, name)
        for node in nodes:
            node.metadata[checked_streams._STREAM_OF_LEAF] = leaves if name is StreamName.IDLE else name
        return nodes

    monkeypatch.setattr(CheckedStreams, "hold_leaves", hold_on)
    lookup_behind, _ = _known(monkeypatch, "split_backward")
    _, compute_behind = _known(monkeypatch, "fused_sparse_dist")
    waits = compute_behind if leaves is StreamName.LOOKUP else lookup_behind
    assert not all(waits), waits
