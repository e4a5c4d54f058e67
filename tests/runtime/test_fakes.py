"""The checkers of fake runs can fail: executors and schedules that are broken on purpose."""

import re

import pytest

from lightning_overlap.runtime.executor import Executor
from lightning_overlap.runtime.interfaces import InFlightBatch
from lightning_overlap.schedules.modes import FUSED_SPARSE_DIST, SEMI_SYNC
from lightning_overlap.schedules.schedule import Schedule
from lightning_overlap.schedules.stages import Stage
from lightning_overlap.testing import RaceError

from ..support.fakes import FakeTrainer, check_laws
from .setups import TWO_AHEAD


class ClaimsToBeExact(Schedule):
    staleness = 0  # type: ignore[assignment]


class ForgetsDenseOwners(Schedule):
    dense_owned_lookup = None  # type: ignore[assignment]


class ClaimsDepth1(Schedule):
    depth = 1  # type: ignore[assignment]


class NeverLooksUpDeferred(Executor):
    def _run_deferred_lookup(self) -> None:
        pass


class ForgetsDiscovered(Executor):
    def _after_stage(self, stage: Stage, current: InFlightBatch) -> None:
        if not self._inputs.ready:
            self._stages._waiting.clear()
        super()._after_stage(stage, current)


class DrainsNothing(Executor):
    def drain(self) -> None:
        self.abandon()


@pytest.mark.parametrize(
    ("schedule", "executor_type", "message"),
    [
        (
            ClaimsToBeExact("stale", SEMI_SYNC.steps),
            Executor,
            r"the lookup of batch 1 in tables of fused_backward saw .* \[\], with",
        ),
        (
            ForgetsDenseOwners("early", FUSED_SPARSE_DIST.steps),
            Executor,
            "the update by dense_optimizer of batch 0 .* after embedding_lookup of batch 1",
        ),
        (ClaimsDepth1("deep", FUSED_SPARSE_DIST.steps), Executor, "2 batches in flight, the depth is 1"),
        (FUSED_SPARSE_DIST, NeverLooksUpDeferred, "batch 0 was not served from early lookups alone"),
        (TWO_AHEAD, ForgetsDiscovered, "batch 1 had copy_batch_to_device dense_forward "),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", None)),
)
def test_what_breaks_a_law_is_caught(schedule: Schedule, executor_type: type[Executor], message: str) -> None:
    with pytest.raises((AssertionError, RaceError), match=message) as caught:
        check_laws(schedule, executor_type=executor_type)
    said = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(r"memcpy +\|C0", said), "the drawing of the run"


def test_a_collective_that_is_left_in_flight_is_caught() -> None:
    with pytest.raises(AssertionError, match="still in flight after the drain: embedding_lookup of batch 2"):
        FakeTrainer(FUSED_SPARSE_DIST, executor_type=DrainsNothing).run(9, stop_after=2)
