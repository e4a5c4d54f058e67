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
        line.startswith("host-bound: busy for 80.00 of a step's 100.00 ms, 75% of that with dense") for line in lines
    )
    assert lines[-2] == "host syncs in a step: 0"
    assert "The ranks wait about equally long for each other." in closing([one(), one(blocked=19.5)], FUSED, {FUSED: 4})
    lines = closing([one()], BASE, {FUSED: 1, BASE: 1, MODES["split_backward"]: 2})
    assert lines[1] == "Not in this table: fused_sparse_dist (1 step), split_backward (2 steps)"
    assert not any("wait for rank" in line for line in lines)
    assert lines[-1].startswith("No advice: only one step was measured.")  # it may have been any step


def test_the_last_line_is_the_advice_that_gains_most() -> None:
    def last(mode: str = "fused_sparse_dist", sent_ms: float = 4, data_ms: float = 0, **times: float) -> str:
        found = one(step_ms=55, communication=BusyTime(sent_ms, 3), blocked=1)
        found = replace(found, categories={**found.categories, Category.DATA: BusyTime(data_ms)}, **times)
        return closing([found], MODES[mode], {MODES[mode]: 4})[-1]

    assert last(data_ms=54) == (
        "Advice: waiting for data takes 54 of 55 ms: raise num_workers of the DataLoader, while the ranks and "
        "their workers leave a CPU core free. This gains at most 54 ms per step (98%)."
    )
    assert last(loop_ms=20, data_ms=1).startswith("Advice: Lightning's loop, callbacks and loggers take")
    assert last(log_ms=9, loop_ms=5).startswith("Advice: self.log takes 9 of 55 ms: log fewer values")
    assert last().startswith("Advice: nothing to change; ")
    for mode, change in (
        ("base", "exposed communication takes 30 of 55 ms: use pipeline='fused_sparse_dist', which gives the same"),
        ("fused_sparse_dist", "use pipeline='split_backward', which gives the same losses, or 'semi_sync'"),
        ("semi_sync", "use pipeline='semi_sync_deferred'"),
        ("semi_sync_deferred", "choose a sharding that sends less"),
    ):
        assert change in last(mode, sent_ms=33)


def test_the_advice_gives_the_number_of_the_table_too() -> None:
    """The advice is about the rank that waits least, the table about the mean of all ranks."""
    ranks = [one(step_ms=55, communication=BusyTime(ms, 3), blocked=ms) for ms in (34, 24)]
    advice = closing(ranks, MODES["base"], {MODES["base"]: 4})[-1]
    exposed = [rank.categories[Category.COMMUNICATION].exposed_ms for rank in ranks]
    assert f"{min(exposed):.3g} of 55 ms on rank 1" in advice
    assert f"{sum(exposed) / 2:.3g} in the mean" in advice


def sync(operator: str, where: str, line: int, stage: str = "dense_forward", blocked_ms: float = 0.0) -> HostSync:
    frame = traceback.FrameSummary(where, line, "training_step", lookup_line=False)
    return HostSync(operator, (frame,), stage, blocked_ms)


def test_the_worst_three_syncs_are_named() -> None:
    found = [
        *[sync("item", "/a/model.py", 42)] * 3,
        sync("tolist", "/a/model.py", 50, blocked_ms=9.0),
        *[sync("nonzero", "/a/loss.py", 7, "backward", 1.0)] * 2,
        sync("item", "/a/other.py", 1, ""),
    ]
    on_host, on_cuda = (sync_lines(found, on_cuda=on_cuda) for on_cuda in (False, True))
    assert on_host[0] == "reads that would be host syncs on CUDA in a step: 7"
    assert on_host[1] == "  3 x training_step, model.py:42: .item() in dense_forward"
    assert len(on_host) == len(on_cuda) == 4
    assert on_cuda[1:3] == [
        "  1 x training_step, model.py:50: .tolist() in dense_forward, blocked 9.00 ms",
        "  2 x training_step, loss.py:7: .nonzero() in backward, blocked 2.00 ms",
    ]
