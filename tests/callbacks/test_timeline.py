"""`OverlapTimeline` on real runs."""

from pathlib import Path

import pytest

from lightning_overlap import OverlapTimeline, Schedule, Stage
from lightning_overlap.profiling.overlap import break_down, mean
from lightning_overlap.profiling.report import headline, summarize
from lightning_overlap.profiling.spans import Category
from lightning_overlap.profiling.steps import window_of
from lightning_overlap.profiling.torch_trace import read_trace

from ..support.cases import TABLE_WISE
from ..support.ranks import Ranks
from . import monitors


def test_the_steps_of_all_ranks_are_drawn(two_ranks: Ranks, mode: Schedule, tmp_path: Path) -> None:
    first, second = two_ranks.run(monitors.drawn, TABLE_WISE, mode.name, str(tmp_path))
    assert [first["losses"], second["losses"]] == two_ranks.run_once(monitors.losses_without, TABLE_WISE, mode.name)
    assert not first["patched"]
    assert not second["patched"]
    assert first["warned"] == []
    assert [Path(file).name for file in first["files"]] == ["timeline.png", "timeline.json.gz"]
    assert second["files"] == []
    assert (tmp_path / "timeline.png").read_bytes().startswith(b"\x89PNG")
    assert "rank 0: " in first["printed"]
    assert second["printed"] == ""

    ranks = read_trace(tmp_path / "timeline.json.gz")
    assert set(ranks) == {0, 1}
    for spans in ranks.values():
        # The two steps that are drawn, counted as OverlapMonitor counts them: from batch end to batch end.
        marks = [span for span in spans if span.name.startswith("ProfilerStep#")]
        assert [mark.name for mark in marks] == ["ProfilerStep#6", "ProfilerStep#7"]
        assert window_of(spans) == ((marks[0].start_ms, marks[1].end_ms), 2)
        step_ms = summarize(spans).step_ms
        assert step_ms == pytest.approx(mean([break_down(spans, (m.start_ms, m.end_ms)) for m in marks]).step_ms)
        batches = {span.batch for span in spans if span.stage is Stage.BACKWARD and span.kind is Category.DENSE}
        assert batches == {5, 6, 7}, "the step before the two drawn, and these"
        carried = {span.name for span in spans if span.kind is Category.COMMUNICATION}
        sizes = {"sizes"} if mode.name in ("base", "sparse_dist", "prefetch", "semi_sync_deferred") else set()
        dense = {"all_reduce"} if mode.splits_backward else set()  # of the package's own hook, not of C++
        assert carried == {"ids", "embeddings", "gradients"} | sizes | dense  # elsewhere sizes travel with ids
        ahead = {span.batch for span in spans if span.stage is Stage.EMBEDDING_LOOKUP}
        lookup = mode.step_of(Stage.EMBEDDING_LOOKUP)
        assert max(ahead) - 7 == (0 if lookup is None else lookup.offset)


@pytest.mark.parametrize(
    ("pipeline", "monitor_first"), [("base", False), ("fused_sparse_dist", True), ("semi_sync_deferred", False)]
)
def test_timeline_and_monitor_agree_on_the_steps_drawn(
    pipeline: str, monitor_first: bool, two_ranks: Ranks, tmp_path: Path
) -> None:
    ranks = two_ranks.run(monitors.measured_and_drawn, TABLE_WISE, pipeline, str(tmp_path), monitor_first)
    for measured, drawn, steps, said in ranks:
        assert {6, 7, 8} <= set(steps), "the monitor measures what the timeline draws"
        assert len(steps) > 3, "and more, as it was asked to"
        for name in ("step_ms", "blocked_ms", "merge_wait_ms", "log_ms"):
            assert getattr(measured, name) == pytest.approx(getattr(drawn, name)), name
        for one, other in ((measured.categories, drawn.categories), (measured.stages, drawn.stages)):
            assert set(one) == set(other)
            for what, times in one.items():
                for name in ("busy_ms", "hidden_ms", "exposed_ms"):
                    assert getattr(times, name) == pytest.approx(getattr(other[what], name)), (what, name)
        if pipeline == "base":
            assert "hidden" not in said
            written = read_trace(tmp_path / "timeline.json.gz")
            assert all("hidden" not in headline(summarize(spans)) for spans in written.values())
    said = ranks[0][-1]
    for words in ("embedding_lookup", "all communication", "host working", "host blocked", "-bound", "exposed"):
        assert said.count(words) >= 2, f"both say {words}"


def test_too_short_a_fit_is_told(two_ranks: Ranks, tmp_path: Path) -> None:
    for rank in two_ranks.run(monitors.drawn, TABLE_WISE, "base", str(tmp_path / "new"), 7):
        assert rank["warned"] == [
            "OverlapTimeline drew nothing: it needs 8 steps, training had 7. Lower first_step or num_steps."
        ]
        assert not rank["patched"]
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_ends_no_training(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    first, second = two_ranks.run(monitors.drawn, TABLE_WISE, "base", str(tmp_path / "file"))
    assert len(first["warned"]) == 1
    assert f"could not write into {tmp_path / 'file'}: " in first["warned"][0]
    assert [first["losses"], second["losses"]] == two_ranks.run_once(monitors.losses_without, TABLE_WISE, "base")


@pytest.mark.parametrize("numbers", [(0, 3), (1, 3), (5, 0)])
def test_numbers_that_leave_nothing_to_draw(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {numbers[0]} and {numbers[1]}"):
        OverlapTimeline(None, *numbers)
