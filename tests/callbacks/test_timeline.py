"""`OverlapTimeline` on real runs."""

from pathlib import Path

import pytest

from lightning_overlap import OverlapMonitor, OverlapTimeline, Schedule, Stage
from lightning_overlap.profiling.overlap import mean
from lightning_overlap.profiling.report import summarize
from lightning_overlap.profiling.spans import Category
from lightning_overlap.profiling.steps import window_of
from lightning_overlap.profiling.torch_trace import read_trace

from ..support.cases import TABLE_WISE
from ..support.ranks import Ranks
from . import monitors


def test_the_steps_of_all_ranks_are_drawn(two_ranks: Ranks, mode: Schedule, tmp_path: Path) -> None:
    timeline = OverlapTimeline(tmp_path, first_step=6, num_steps=2)
    first, second = two_ranks.run(monitors.run, TABLE_WISE, mode.name, timeline)
    without = two_ranks.run_once(monitors.run, TABLE_WISE, mode.name)
    assert [first["losses"], second["losses"]] == [rank["losses"] for rank in without]
    assert [first["is_clean"], second["is_clean"], first["warned"]] == [True, True, []]
    assert [first["files"], second["files"]] == [["timeline.png", "timeline.json.gz"], []]
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
    callbacks = [OverlapMonitor(every_n_steps=4), OverlapTimeline(tmp_path, first_step=6, num_steps=3)]
    callbacks = callbacks[:: 1 if monitor_first else -1]
    ranks = two_ranks.run(monitors.run, TABLE_WISE, pipeline, *callbacks, monitors.SaysSteps())
    written = read_trace(tmp_path / "timeline.json.gz")
    for number, rank in enumerate(ranks):
        assert rank["is_clean"]
        accounts = dict(zip(rank["logged"], rank["accounts"], strict=True))
        assert {6, 7, 8} < set(accounts), "the monitor measures what the timeline draws, and more"
        measured, drawn = mean([accounts[step] for step in (6, 7, 8)]), summarize(written[number])
        for name in ("step_ms", "blocked_ms", "merge_wait_ms"):
            assert getattr(measured, name) == pytest.approx(getattr(drawn, name)), name
        assert set(measured.categories) == set(drawn.categories)
        for what, times in measured.categories.items():
            assert times.exposed_ms == pytest.approx(drawn.categories[what].exposed_ms), what
    said = ranks[0]["printed"]
    # One page for each rank, in one piece, after the last step and the monitor's table.
    in_order = [
        said.index(text) for text in (f"trained {monitors.NUM_STEPS - 1}", "Advice: ", "\nrank 0: ", "\nrank 1: ")
    ]
    assert in_order == sorted(in_order)
    assert [said.count(text) for text in ("\nrank 0: ", "\nrank 1: ", "Timeline: ")] == [1, 1, 1]
    assert ("hidden" in said) == (pipeline != "base")
    for words in ("embedding_lookup", "all communication", "host working", "host blocked", "-bound", "exposed"):
        assert said.count(words) >= 2, f"both say {words}"


def test_the_pages_of_a_fit_that_fails_afterwards(two_ranks: Ranks, tmp_path: Path) -> None:
    first, second = two_ranks.run(monitors.printed_by_a_failing_fit, str(tmp_path))
    assert first.index("trained 10") < first.index("rank 0: ")
    assert (first.count("rank 0: "), first.count("Timeline: "), second.count("rank ")) == (1, 1, 0)


def test_too_short_a_fit_is_told(two_ranks: Ranks, tmp_path: Path) -> None:
    timeline = OverlapTimeline(tmp_path / "new", first_step=6, num_steps=2)
    for rank in two_ranks.run(monitors.run, TABLE_WISE, "base", timeline, num_steps=7):
        assert rank["warned"] == [
            "OverlapTimeline drew nothing: it needs 8 steps, training had 7. Lower first_step or num_steps."
        ]
        assert rank["is_clean"]
    assert not (tmp_path / "new").exists()


def test_a_folder_that_cannot_be_written_ends_no_training(two_ranks: Ranks, tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    timeline = OverlapTimeline(tmp_path / "file", first_step=6, num_steps=2)
    first, second = two_ranks.run(monitors.run, TABLE_WISE, "base", timeline)
    [warning] = first["warned"]
    assert f"could not write into {tmp_path / 'file'}: " in warning
    without = two_ranks.run_once(monitors.run, TABLE_WISE, "base")
    assert [first["losses"], second["losses"]] == [rank["losses"] for rank in without]


@pytest.mark.parametrize("numbers", [(0, 3), (1, 3), (5, 0)])
def test_numbers_that_leave_nothing_to_draw(numbers: tuple[int, int]) -> None:
    with pytest.raises(ValueError, match=f"got {numbers[0]} and {numbers[1]}"):
        OverlapTimeline(None, *numbers)
