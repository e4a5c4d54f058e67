"""What accounts say, in words, from numbers made up."""

import traceback
from collections.abc import Sequence
from dataclasses import replace

from lightning_overlap.profiling import report
from lightning_overlap.profiling.host_syncs import HostSync, sync_lines
from lightning_overlap.profiling.overlap import Breakdown, BusyTime
from lightning_overlap.profiling.spans import Category
from lightning_overlap.schedules import Schedule
from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.stages import Stage

BASE, FUSED = MODES["base"], MODES["fused_sparse_dist"]


def one(step_ms: float = 100, communication: BusyTime = BusyTime(40, 30), blocked: float = 20) -> Breakdown:  # noqa: B008
    kinds = {
        Category.DENSE: BusyTime(60),
        Category.COMMUNICATION: communication,
        Category.LOOKUP: BusyTime(10, 5),
        Category.COPY: BusyTime(2, 2),
        Category.DATA: BusyTime(),
        Category.HOST: BusyTime(80),
    }
    return Breakdown(step_ms, kinds, {Stage.EMBEDDING_LOOKUP: BusyTime(50, 35)}, merge_wait_ms=7, blocked_ms=blocked)


def test_metrics_are_by_stage_and_kind() -> None:
    values = report.metrics(one())
    assert (
        values.items()
        >= {
            **{"step_ms": 100, "merge_wait_ms": 7, "bound_ms": 80, "to_gain_ms": 20, "dense/busy_ms": 60},
            **{"communication/hidden_ms": 30, "communication/exposed_ms": 10, "communication/hidden_fraction": 0.75},
            **{"embedding_lookup/exposed_ms": 15, "hidden_fraction": (30 + 5 + 2) / (40 + 10 + 2)},
        }.items()
    )
    assert "dense/hidden_ms" not in values


def closing(
    ranks: list[Breakdown], mode: Schedule, num_steps: dict[Schedule, int], syncs: Sequence[str] = ()
) -> list[str]:
    return report.closing_table(ranks, num_steps, mode, "data_dist", syncs).splitlines()


def test_closing_table() -> None:
    lines = closing([one(), one(blocked=0)], FUSED, {FUSED: 4}, ["host syncs in a step: 0"])
    assert lines[0] == "Overlap: fused_sparse_dist, stream data_dist; 4 steps measured, 2 ranks, ms per step"
    assert [line.split() for line in lines if line.startswith("embedding_lookup")] == [
        ["embedding_lookup", "50.00", "35.00", "15.00", "70%"]
    ]
    assert any(line.startswith("all communication") and line.endswith("75%") for line in lines)
    assert any(line.startswith("The ranks wait for rank 1") for line in lines)
    assert any(
        line.startswith("host-bound (dense is 75% of it): busy for 80.00 of a step's 100.00 ms") for line in lines
    )
    assert lines[-2] == "host syncs in a step: 0"
    assert "The ranks wait about equally long for each other." in closing([one(), one(blocked=19.5)], FUSED, {FUSED: 4})
    lines = closing([one()], BASE, {FUSED: 1, BASE: 1, MODES["split_backward"]: 2})
    assert lines[1] == "Not in this table: fused_sparse_dist (1 step), split_backward (2 steps)"
    assert not any("wait for rank" in line for line in lines)
    assert lines[-1].startswith("No advice: only one step was measured.")  # it may have been any step


def with_host(data: float = 0.0, loop: float = 0.0, log: float = 0.0) -> Breakdown:
    found = one(step_ms=55, communication=BusyTime(4, 3))
    return replace(
        found, categories={**found.categories, Category.DATA: BusyTime(data)}, loop_ms=loop, log_ms=log, blocked_ms=1
    )


def test_the_last_line_is_the_advice_that_gains_most() -> None:
    def last(found: Breakdown, mode: str = "fused_sparse_dist") -> str:
        return closing([found], MODES[mode], {MODES[mode]: 4})[-1]

    assert last(with_host(data=54)) == (
        "Advice: waiting for data takes 54 of 55 ms: raise num_workers of the DataLoader, while the ranks and "
        "their workers leave a CPU core free. This gains at most 54 ms per step (98%)."
    )
    assert last(with_host(loop=20, data=1)).startswith("Advice: Lightning's loop, callbacks and loggers take")
    assert last(with_host(log=9, loop=5)).startswith("Advice: self.log takes 9 of 55 ms: log fewer values")
    assert last(with_host()).startswith("Advice: nothing to change; ")
    waits = replace(with_host(), categories={**with_host().categories, Category.COMMUNICATION: BusyTime(40, 10)})
    assert "exposed communication takes 30 of 55 ms: use pipeline='fused_sparse_dist', which gives the" in last(
        waits, "base"
    )
    assert "use pipeline='split_backward', which gives the same losses, or 'semi_sync'" in last(waits)
    assert "use pipeline='semi_sync_deferred'" in last(waits, "semi_sync")
    assert "choose a sharding that sends less" in last(waits, "semi_sync_deferred")


def sync(operator: str, where: str, line: int, stage: str = "dense_forward", blocked_ms: float = 0.0) -> HostSync:
    frame = traceback.FrameSummary(where, line, "training_step", lookup_line=False)
    return HostSync(operator, (frame,), stage, blocked_ms)


def test_the_worst_three_syncs_are_named() -> None:
    own = HostSync("item", (traceback.FrameSummary(report.__file__, 3, "metrics", lookup_line=False),))
    assert own.is_the_librarys
    assert not sync("item", "/a/model.py", 42).is_the_librarys
    found = [
        *[sync("item", "/a/model.py", 42)] * 3,
        sync("tolist", "/a/model.py", 50, blocked_ms=9.0),
        *[sync("nonzero", "/a/loss.py", 7, "backward", 1.0)] * 2,
        sync("item", "/a/other.py", 1, ""),
    ]
    on_host = sync_lines(found, on_cuda=False)
    assert on_host[0] == "reads that would be host syncs on CUDA in a step: 7"
    assert on_host[1] == "  3 x training_step, model.py:42: .item() in dense_forward"
    assert len(on_host) == 4
    on_cuda = sync_lines(found, on_cuda=True)
    assert on_cuda[:3] == [
        "host syncs in a step: 7",
        "  1 x training_step, model.py:50: .tolist() in dense_forward, blocked 9.00 ms",
        "  2 x training_step, loss.py:7: .nonzero() in backward, blocked 2.00 ms",
    ]
    assert sync_lines([], on_cuda=False) == ["reads that would be host syncs on CUDA in a step: 0"]


def test_stale_rows_name_the_tables_with_the_largest_share() -> None:
    lines = report.stale_table({f"t{number}": (number, 20) for number in range(12)}).splitlines()
    assert [line.split()[0] for line in lines[2:-1]] == [f"t{number}" for number in range(11, 3, -1)]
    assert lines[2].split() == ["t11", "20", "11", "55.0%"]
    assert lines[-1].split() == ["all", "12", "sharded", "tables", "240", "66", "27.5%"]
