"""Real fits on one rank whose streams follow every operator's memory: no race, and each wait left out is one."""

from __future__ import annotations

import warnings
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor

from lightning_overlap import MODES, STREAMS, Schedule, executor, sparse
from lightning_overlap.stages import StreamName
from lightning_overlap.testing import CheckedStreams, RaceError
from lightning_overlap.testing.module_runs import Setting, fit
from lightning_overlap.testing.one_process import process_group

from .. import mutants
from . import checked
from .cases import MIXED, ROWWISE_ADAGRAD, SEQUENCE, TABLE_WISE, TWO_COLLECTIONS, WEIGHTED, Case, Model, make_batch
from .cases import make_plan as plan_of

OVERLAPPING = [name for name, mode in MODES.items() if mode.has_sparse_stages]


def train(case: Case, pipeline: str, stream: str = "dedicated") -> None:
    batches = [make_batch(case, index, 0) for index in range(7)]
    options = {"sharding": plan_of(case, Model(case), 1), "stream": stream}
    with process_group("cpu"), warnings.catch_warnings():
        fit(Setting(lambda: Model(case), batches, None, "cpu", 0, {}, options), pipeline, races=True)


@pytest.mark.parametrize("policy", STREAMS)
@pytest.mark.parametrize(
    "case", [MIXED, SEQUENCE, TWO_COLLECTIONS, WEIGHTED, ROWWISE_ADAGRAD], ids=lambda case: case.name
)
def test_no_race_in_any_mode(case: Case, mode: Schedule, policy: str) -> None:
    train(case, mode.name, policy)


OF_A_CACHE = list(mutants.statements(executor, "_order_prefetch"))
"""What matters to tables in a cache alone, which a CPU does not have."""

OF_GRADIENTS_SENT = [
    found for found in mutants.statements(executor, "_pass_backward") if "self._lookup_stream, self._str" in found[1]
]
"""What matters where gradients are sent behind the backward, which one rank does not do."""

STATEMENTS = [
    *(
        (executor, "Executor", *found)
        for found in mutants.statements(executor)
        if found not in OF_A_CACHE + OF_GRADIENTS_SENT
    ),
    *((sparse, "SparsePipeline", *found) for found in mutants.statements(sparse, "_receive_rows")),
]


@pytest.mark.parametrize(
    ("module", "name", "line"), [entry[:3] for entry in STATEMENTS], ids=[entry[3] for entry in STATEMENTS]
)
def test_a_wait_or_hand_over_that_is_left_out_is_a_race(module: Any, name: str, line: int) -> None:
    caught = []
    with mock.patch(f"lightning_overlap.strategy.{name}", mutants.without(module, line, name)):
        for pipeline in OVERLAPPING:
            try:
                train(MIXED, pipeline)
            except RaceError:
                caught.append(pipeline)
    assert caught


def test_the_file_without_anything_left_out_has_no_race() -> None:
    """Guards the test above."""
    for module, name in ((executor, "Executor"), (sparse, "SparsePipeline")):
        with mock.patch(f"lightning_overlap.strategy.{name}", mutants.without(module, 0, name)):
            train(MIXED, "semi_sync")
    assert len(STATEMENTS) >= 13


class ReadsTablesTooEarly(Model):
    """Reads its tables behind the backward, which on a device may still be writing them on another stream."""

    def on_after_backward(self) -> None:
        for value in self.ebc.state_dict().values():
            self.norm = sum(shard.tensor.square().sum() for shard in value.local_shards())


def test_a_race_of_the_users_own_hook_is_named() -> None:
    message = (
        r"law 2: no row is read while it is written: no event orders aten\..* behind fbgemm\.split_embedding_backward"
    )
    with pytest.raises(AssertionError, match=message) as caught:
        checked.check(TABLE_WISE, "fused_sparse_dist", ReadsTablesTooEarly, stream="dedicated")
    assert "BROKEN  law 2: no row is read while it is written" in str(caught.value)
    assert checked.check(TABLE_WISE, "fused_sparse_dist", ReadsTablesTooEarly, stream="current").holds


# -- the streams by themselves ----------------------------------------------------------------------------------


@pytest.fixture
def streams() -> CheckedStreams:
    return CheckedStreams()


def test_a_result_is_read_on_another_stream_after_a_wait_and_a_hand_over(streams: CheckedStreams) -> None:
    with streams.watching({}):
        with streams.on(StreamName.LOOKUP):
            made = torch.ones(4) * 2
        with pytest.raises(RaceError, match=r"memory of aten.mul.Tensor \(4,\) .* not handed to compute"):
            made + 1
        streams.hand_over({"rows": [made]}, StreamName.COMPUTE)
        with pytest.raises(RaceError, match=r"no event orders aten\.add\.Tensor"):
            made + 1
        streams.wait(StreamName.COMPUTE, streams.record(StreamName.LOOKUP))
        made + 1


def test_a_view_reads_nothing_and_shares_its_memory(streams: CheckedStreams) -> None:
    with streams.watching({}):
        with streams.on(StreamName.LOOKUP):
            made = torch.ones(4) * 2
        part = made[:2].view(1, 2)
        with pytest.raises(RaceError, match=r"memory of aten.mul.Tensor \(4,\)"):
            part + 1


def test_backward_runs_where_the_forward_ran_and_nobody_waits_for_its_end(streams: CheckedStreams) -> None:
    weight = torch.ones(4)

    class WritesInBackward(torch.autograd.Function):
        @staticmethod
        def forward(ctx: Any, x: Tensor) -> Tensor:
            return x * weight

        @staticmethod
        def backward(ctx: Any, *grads: Tensor) -> Tensor:
            weight.sub_(grads[0])
            return grads[0]

    x = torch.ones(4, requires_grad=True)
    with streams.watching({"table": weight, "x": x.detach()}):
        streams.wait(StreamName.LOOKUP, streams.record(StreamName.COMPUTE))
        with streams.on(StreamName.LOOKUP):
            rows = WritesInBackward.apply(x)
        streams.wait(StreamName.COMPUTE, streams.record(StreamName.LOOKUP))
        streams.hand_over(rows, StreamName.COMPUTE)
        (rows * 2).sum().backward()
        with pytest.raises(RaceError, match=r"behind aten.sub_.Tensor .*writes on lookup\): a race for table"):
            weight + 1
        streams.wait(StreamName.COMPUTE, streams.record(StreamName.LOOKUP))
        weight + 1
