"""Real fits on one rank whose streams follow every operator's memory: no race, and each wait left out is one."""

import warnings
from functools import partial
from types import ModuleType
from typing import Any
from unittest import mock

import pytest
import torch
import torch.utils.checkpoint
from torch import Tensor

from lightning_overlap import MODES, STREAMS, Mode
from lightning_overlap.runtime import deferred_updates, executor, lookup_order, stage_issue
from lightning_overlap.schedules.stages import StreamName
from lightning_overlap.sparse import answers
from lightning_overlap.testing import CheckedStreams, RaceError
from lightning_overlap.testing.watched_fit import Setting, Watched, fit, process_group

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
    module: type[Model] = Model,
    *,
    frozen_window: bool = False,
    **trainer_options: Any,
) -> None:
    batches = [cases.make_batch(case, index, 0) for index in range(7)]
    options = {"sharding": cases.make_plan(case, Model(case), 1), "stream": stream}
    with process_group("cpu"), warnings.catch_warnings(action="ignore"):
        setting = Setting(lambda: module(case), batches, trainer_options=trainer_options, strategy_options=options)
        fit(setting, Mode(pipeline, frozen_window=frozen_window), Watched(), races=True)  # type: ignore[arg-type]


CASES = {
    case.name: case for case in (MIXED, cases.SEQUENCE, cases.TWO_COLLECTIONS, cases.WEIGHTED, cases.ROWWISE_ADAGRAD)
}


@pytest.mark.parametrize(("name", "pipeline", "policy"), pairwise(CASES, MODES, STREAMS))
def test_no_race_in_any_mode(name: str, pipeline: str, policy: str) -> None:
    train(CASES[name], pipeline, policy)


FILES = (executor, stage_issue, deferred_updates, lookup_order)
NOT_HERE = [
    *mutants.statements(stage_issue, "_order_prefetch"),  # a CPU has no tables in a cache,
    *mutants.statements(stage_issue, "begin_iteration"),
    *[found for found in mutants.statements(executor, "next_batch") if "begin_iteration" in found[1]],
    *mutants.statements(deferred_updates, "start"),  # one rank sends no gradients,
    *mutants.statements(lookup_order, "lookup_waits"),
    *mutants.statements(lookup_order, "hand_to_lookup"),
    *mutants.statements(lookup_order, "hand_to_compute"),  # and every lookup is early
]
STATEMENTS = [(file, *found) for file in FILES for found in mutants.statements(file) if found not in NOT_HERE]
STATEMENTS += [(answers, *found) for found in mutants.statements(answers, "_receive_embeddings")]


@pytest.mark.slow
@pytest.mark.parametrize(("file", "line"), [entry[:2] for entry in STATEMENTS], ids=[entry[2] for entry in STATEMENTS])
def test_a_wait_or_hand_over_that_is_left_out_is_a_race(file: ModuleType, line: int) -> None:
    runs = [partial(train, MIXED, pipeline) for pipeline in OVERLAPPING]
    runs.append(partial(train, MIXED, "split_backward", module=ReadsTablesAfterBackward))
    with mutants.without(file, line):  # the first run that has a race is enough
        assert any(mutants.races(run) for run in runs)


def test_the_files_without_anything_left_out_have_no_race() -> None:
    with mutants.unchanged([*FILES, answers]):
        train(MIXED, "semi_sync")
    assert len(STATEMENTS) >= 18


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
}


@pytest.mark.parametrize(("name", "pipeline", "policy"), pairwise(USERS, MODES, ["dedicated", "data_dist"]))
def test_the_users_code_finds_the_tables_written(name: str, pipeline: str, policy: str) -> None:
    module, options = USERS[name]
    train(TABLE_WISE, pipeline, policy, module, **options)


@pytest.mark.parametrize(
    ("name", "pipeline", "policy"),
    pairwise([name for name in USERS if name != "steps_by_hand"], ["sparse_dist", "fused_sparse_dist"], STREAMS),
)
def test_no_race_in_a_frozen_window(name: str, pipeline: str, policy: str) -> None:
    module, options = USERS[name]
    train(MIXED, pipeline, policy, module, frozen_window=True, **{"accumulate_grad_batches": 3, **options})


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
