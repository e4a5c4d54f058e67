"""What a picture of timelines shows of each rank."""

from lightning_overlap.profiling.layout import Picture
from lightning_overlap.profiling.spans import HOST_LANE, Category, Span
from lightning_overlap.schedules import Stage


def _steps(step_ms: float, num: int, start_ms: float = 0.0) -> list[Span]:
    """Steps of a forward and a backward, one after the other."""
    half, stages, begin = step_ms / 2, (Stage.DENSE_FORWARD, Stage.BACKWARD), start_ms
    spans = []
    for batch in range(num):
        for stage in stages:
            spans.append(Span(begin, begin + half, Category.DENSE, HOST_LANE, stage.name, stage, batch))
            begin += half
    return spans


def test_runs_of_separate_clocks_are_drawn_over_equally_long_times() -> None:
    """So the picture shows which one is faster, whichever comes first."""
    slow, fast = _steps(300, 4), _steps(200, 10, start_ms=50_000)
    for ranks in ({"base": slow, "fused": fast}, {"fused": fast, "base": slow}):
        picture = Picture(ranks, num_steps=2, resolution=0.001)
        assert [panel.length_ms for panel in picture.panels] == [600, 600]


def test_a_run_with_less_to_draw_is_drawn_to_its_end() -> None:
    picture = Picture({"base": _steps(300, 4), "fused": _steps(200, 2, start_ms=50_000)}, num_steps=2, resolution=0.001)
    assert [panel.length_ms for panel in picture.panels] == [600, 400]
