"""When each stage of a batch is issued, as whole timelines beside a drawing."""

from collections.abc import Mapping

import pytest

from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.schedule import Schedule
from lightning_overlap.schedules.stages import WeightOwner

from ..support.fakes import FakeTrainer, Timeline
from .setups import ONE_FUSED, ONE_MIXED

TIMELINES: dict[str, str] = {
    "base": """\
compute |C0 F0 B0 O0 C1 F1 B1 O1 C2 F2 B2 O2""",
    "sparse_dist": """\
compute    |               L0       F0             B0 O0 L1       F1          B1 O1 L2    F2    B2 O2
memcpy     |C0    C1                      C2
data_dist  |   S0    D0          S1          D1                S2       D2
host waits |            S0    D0       L0       S1          D1       L1    S2          D2    L2""",
    "fused_sparse_dist": """\
compute    |                           F0             B0       O0 F1          B1       O1 F2    B2 O2
memcpy     |C0    C1                C2
data_dist  |   S0    S1 D0                   S2 D1                      D2
lookup     |                  L0                         L1                      L2
host waits |               S0    D0       L0       S1       D1       L1    S2       D2       L2""",
    "fused_sparse_dist_after_optimizer": """\
compute    |                           F0             B0 O0       F1          B1 O1       F2    B2 O2
memcpy     |C0    C1                C2
data_dist  |   S0    S1 D0                   S2 D1                      D2
lookup     |                  L0                            L1                      L2
host waits |               S0    D0       L0       S1          D1    L1    S2          D2    L2""",
    "prefetch": """\
compute    |                                 F0             B0       O0       F1          B1    O1 F2    B2 O2
memcpy     |C0          C1                         C2
data_dist  |   S0 D0             S1    D1                      S2       D2
prefetch   |               P0                         P1                            P2
lookup     |                        L0                            L1                         L2
host waits |         S0       D0          S1    L0       D1                S2    L1    D2             L2""",
    "semi_sync": """\
compute    |                                    F0          B0       O0 F1          B1 O1 F2    B2 O2
memcpy     |C0    C1          C2
data_dist  |   S0    S1 D0             S2 D1                   D2
lookup     |                     L0                   L1                      L2
host waits |               S0       D0       S1    L0    D1       S2       L1    D2          L2""",
}

# Tables of the dense optimizer are looked up in a second part, after its step.
MIXED_TIMELINE = """\
compute    |                              F0             B0       O0    F1          B1       O1    F2    B2 O2
memcpy     |C0    C1                   C2
data_dist  |   S0    S1 D0                      S2 D1                         D2
lookup     |                  L0    L0                      L1       L1                L2       L2
host waits |               S0    D0          L0       S1       D1          L1    S2       D2          L2"""


def timeline_of(schedule: Schedule, num_batches: int, modules: Mapping[str, frozenset[WeightOwner]]) -> Timeline:
    """Return the timeline of a run, without the fetches that only found the end of the data."""
    timeline = FakeTrainer(schedule, modules=modules).run(num_batches).timeline
    timeline.events = [event for event in timeline.events if event[2] < num_batches]
    return timeline


@pytest.mark.parametrize("name", TIMELINES)
def test_timeline_from_the_fill_to_the_drain(name: str) -> None:
    timeline = timeline_of(MODES[name], 3, ONE_FUSED)
    assert timeline.draw() == TIMELINES[name], f"got\n{timeline.draw()}"


def test_timeline_with_tables_of_the_dense_optimizer() -> None:
    timeline = timeline_of(MODES["fused_sparse_dist"], 3, ONE_MIXED)
    assert timeline.draw() == MIXED_TIMELINE, f"got\n{timeline.draw()}"
