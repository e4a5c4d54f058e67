"""`check_laws`: holds for schedules that keep the laws, and names the law that one breaks."""

from typing import NoReturn

import pytest

from lightning_overlap import Schedule
from lightning_overlap.schedules.modes import FUSED_SPARSE_DIST, SEMI_SYNC
from lightning_overlap.testing import check_laws

from ..runtime.test_fakes import TWO_AHEAD, ClaimsDepth1, ClaimsToBeExact, ForgetsDenseOwners


def test_a_schedule_that_keeps_the_laws() -> None:
    check_laws(TWO_AHEAD)


class ClaimsMore(Schedule):
    staleness = 2  # type: ignore[assignment]


STALE = (
    r"law 1: equal to base, bit for bit: at step \d: the loss is.*law 2: lookups see updates 0 batches late: the lookup"
)


@pytest.mark.parametrize(
    ("schedule", "message"),
    [
        (ClaimsToBeExact("mine", SEMI_SYNC.steps), f"{STALE} of batch 1 "),
        (
            ClaimsMore("mine", SEMI_SYNC.steps),
            r"law 1: equal to .* delayed by 2.*with a staleness of 2 it must see \[\]",
        ),
        (ForgetsDenseOwners("mine", FUSED_SPARSE_DIST.steps), "'ebc' ran in its own forward: its tables are written"),
        (ClaimsDepth1("mine", FUSED_SPARSE_DIST.steps), "law 6: .*: 3 batches in flight, the depth is 1"),
    ],
    ids=["stale", "fresher_than_it_says", "ahead_of_the_step", "holds_more"],
)
def test_a_schedule_that_breaks_a_law(schedule: Schedule, message: str) -> None:
    with pytest.raises(AssertionError, match=f"(?s){message}.*  BROKEN  "):
        check_laws(schedule)


class BreaksEvaluation(Schedule):
    @property
    def evaluation(self) -> NoReturn:
        raise RuntimeError("this schedule evaluates nothing")


def test_the_schedule_of_an_evaluation_is_checked() -> None:
    with pytest.raises(RuntimeError, match="evaluates nothing"):
        check_laws(BreaksEvaluation("mine", FUSED_SPARSE_DIST.steps))
