"""The checkers of fake runs can fail: walkers and schedules that are broken on purpose."""

import re

import pytest

from lightning_overlap.runtime.flight import Flight
from lightning_overlap.runtime.walker import Walker
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


class NeverLooksUpDeferred(Walker):
    def _look_up_dense_tables(self) -> None:
        pass


class ForgetsDiscovered(Walker):
    def _end_stage(self, stage: Stage, current: Flight) -> None:
        if not self._sparse.ready:
            self._postponed.clear()
        super()._end_stage(stage, current)


class DrainsNothing(Walker):
    def drain(self) -> None:
        self.abandon()


@pytest.mark.parametrize(
    ("schedule", "walker_type", "message"),
    [
        (
            ClaimsToBeExact("stale", SEMI_SYNC.steps),
            Walker,
            r"the lookup of batch 1 in tables of fused_backward saw .* \[\], with",
        ),
        (
            ForgetsDenseOwners("early", FUSED_SPARSE_DIST.steps),
            Walker,
            "the update by dense_optimizer of batch 0 .* after embedding_lookup of batch 1",
        ),
        (ClaimsDepth1("deep", FUSED_SPARSE_DIST.steps), Walker, "2 batches in flight, the depth is 1"),
        (FUSED_SPARSE_DIST, NeverLooksUpDeferred, "batch 0 was not served from early lookups alone"),
        (TWO_AHEAD, ForgetsDiscovered, "batch 1 had copy_batch_to_device dense_forward "),
    ],
    ids=lambda value: getattr(value, "name", getattr(value, "__name__", None)),
)
def test_what_breaks_a_law_is_caught(schedule: Schedule, walker_type: type[Walker], message: str) -> None:
    with pytest.raises((AssertionError, RaceError), match=message) as caught:
        check_laws(schedule, walker_type=walker_type)
    said = "".join([str(caught.value), *getattr(caught.value, "__notes__", [])])
    assert re.search(r"memcpy +\|C0", said), "the drawing of the run"


def test_a_collective_that_is_left_in_flight_is_caught() -> None:
    with pytest.raises(AssertionError, match="still in flight after the drain: embedding_lookup of batch 2"):
        FakeTrainer(FUSED_SPARSE_DIST, walker_type=DrainsNothing).run(9, stop_after=2)
