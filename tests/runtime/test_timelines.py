"""When each stage of a batch is issued, as whole timelines beside a drawing."""

from typing import Any

import pytest

from lightning_overlap.schedules.modes import MODES

from ..support.fakes import FakeTrainer
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


@pytest.mark.parametrize(
    ("name", "modules", "drawing"),
    [*((mode, ONE_FUSED, one) for mode, one in TIMELINES.items()), ("fused_sparse_dist", ONE_MIXED, MIXED_TIMELINE)],
    ids=[*TIMELINES, "tables_of_the_dense_optimizer"],
)
def test_timeline_from_the_fill_to_the_drain(name: str, modules: Any, drawing: str) -> None:
    timeline = FakeTrainer(MODES[name], modules=modules).run(3).timeline
    timeline.events = [event for event in timeline.events if event[2] < 3]  # others only found the end of the data
    assert timeline.draw() == drawing, f"got\n{timeline.draw()}"
