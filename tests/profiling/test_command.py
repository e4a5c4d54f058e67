"""`overlap-timeline` and what it draws: a PNG, the table, and errors."""

import re
import sys
from pathlib import Path
from typing import Any

import pytest

from lightning_overlap.callbacks import OverlapTimeline
from lightning_overlap.profiling import draw_png, layout
from lightning_overlap.profiling.command import BAD_INPUT, main
from lightning_overlap.profiling.spans import HOST_LANE, Category, Span
from lightning_overlap.profiling.trace_file import write_trace
from lightning_overlap.schedules.stages import Stage


def steps(num: int = 6, shift_ms: float = 0.0) -> list[Span]:
    """Steps of 10 ms on two lanes.

    host  forward==== wait~~ backward===            the embeddings of the next batch are on their way for 4 ms,
    gloo              embed.------                  2 of them beside the backward
    """
    one = (
        (0, 4, Category.DENSE, HOST_LANE, Stage.DENSE_FORWARD, 0),
        (4, 6, Category.WAIT, HOST_LANE, Stage.EMBEDDING_LOOKUP, 0),
        (6, 9, Category.DENSE, HOST_LANE, Stage.BACKWARD, 0),
        (4, 8, Category.COMMUNICATION, "gloo", Stage.EMBEDDING_LOOKUP, 1),
    )
    return [
        Span(start + begin, start + end, kind, lane, str(stage), stage, batch + ahead)
        for batch, start in enumerate(10.0 * number + shift_ms for number in range(num))
        for begin, end, kind, lane, stage, ahead in one
    ]


def write(folder: Path, name: str, ranks: dict[int, list[Span]]) -> str:
    write_trace(folder / name, ranks)
    return str(folder / name)


def test_png_has_a_panel_per_rank_and_red_waits_and_matplotlibs_state_is_left_alone(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib import pyplot
    from matplotlib.image import imread

    def image(*ranks: list[Span]) -> Any:
        draw_png.write_png(tmp_path / "t.png", dict(enumerate(ranks)))
        return imread(tmp_path / "t.png")

    def red(image: Any) -> int:
        return int(((image[..., 0] > 0.75) & (image[..., 1] < 0.3) & (image[..., 2] < 0.3)).sum())

    before = pyplot.get_fignums(), dict(matplotlib.rcParams)
    one, two, hidden = image(steps()), image(steps(), steps()), image([s for s in steps() if s.kind is Category.DENSE])
    assert (pyplot.get_fignums(), dict(matplotlib.rcParams)) == before
    assert one.shape[1] == two.shape[1] == 1920
    assert one.shape[0] < two.shape[0] < 2 * one.shape[0]
    assert red(one) > 20 * red(hidden) > 0  # there, the lane's name and the legend alone


def test_matplotlib_that_is_not_installed_is_told(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    assert main([write(tmp_path, "t.json", {0: steps()})]) == BAD_INPUT
    said = r"needs matplotlib, which .*: pip install 'lightning_overlap\[plot\]'"
    assert re.search(rf"^overlap-timeline: .* {said}$", capsys.readouterr().err)
    with pytest.raises(ImportError, match=said):  # before the steps that it would draw
        OverlapTimeline()


def test_ranks_with_one_clock_show_the_same_moments() -> None:
    near, far = (
        layout.Picture({0: steps(), 1: steps(shift_ms=by)}, num_steps=2, resolution=0).panels for by in (1.5, 1e6)
    )
    assert near[0].window == near[1].window
    assert far[1].window[0] == pytest.approx(far[0].window[0] + 1e6)


def test_many_short_spans_become_few_bars() -> None:
    kernels = [Span(n, n + 0.9, Category.DENSE, "stream 7", f"k{n % 3}", Stage.BACKWARD, 1) for n in range(10_000)]
    (panel,) = layout.Picture({0: kernels}, num_steps=3, resolution=1e-4).panels
    (((bar,),),) = panel.lanes.values()
    assert (bar.start_ms, bar.end_ms) == (0, 9999.9)


def test_one_event_that_lasts_no_time_is_drawn_and_no_event_is_said(tmp_path: Path) -> None:
    assert main([write(tmp_path, "t.json", {0: [Span(3, 3, Category.DENSE, HOST_LANE, "x")]})]) == 0
    with pytest.raises(ValueError, match="no rank has spans"):
        draw_png.write_png(tmp_path / "t.png", {0: []})


def test_command_draws_beside_the_trace_or_where_it_is_told_and_prints(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "a.png").mkdir()  # a folder called like a picture
    trace = write(tmp_path, "a.png/run.json.gz", {0: steps(), 1: steps()})
    assert main([trace]) == 0
    said = capsys.readouterr()
    assert said.err == ""
    for line in (
        "rank 0: 10.0 ms per step; communication 50.0 % hidden, 2.00 ms exposed; host blocked 20.0 %",
        "communication     4.00       2.00        2.00  50.0 %",
        "Host blocked 10.0 of 50.0 ms (20.0 %).",
        "rank 1: ",
    ):
        assert line in said.out
    assert main([trace, "--out", str(tmp_path / "new" / "folder")]) == 0
    assert main([trace, "--out", str(tmp_path / "pictures" / "mine.png"), "--steps", "1", "--title", "Mine"]) == 0
    drawn = sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("?*.png"))
    assert drawn == ["a.png", "a.png/run.png", "new/folder/run.png", "pictures/mine.png"]


def test_command_takes_one_file_per_rank_and_tells_files_of_one_rank_apart(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    second, first, other = (write(tmp_path, f"{name}.json", {name % 2: steps()}) for name in (1, 0, 2))
    assert main([second, first]) == 0
    assert re.findall(r"^(rank \d):", capsys.readouterr().out, re.MULTILINE) == ["rank 0", "rank 1"]
    assert main([first, other]) == 0
    said = capsys.readouterr().out
    assert all(f"{file} rank 0: 10.0 ms" in said for file in (first, other))


def test_bad_files_and_arguments_are_said_without_a_traceback(
    tmp_path: Path, capsys: pytest.CaptureFixture[str]
) -> None:
    (tmp_path / "b.json").write_bytes(b"not JSON")  # what else may be wrong: test_torch_trace.py
    assert main([str(tmp_path / "b.json")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"overlap-timeline: {tmp_path / 'b.json'} ")
    assert "its JSON is broken" in said.err
    assert said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["b.json"]
    trace = write(tmp_path, "t.json", {0: steps()})
    assert main([trace, "--out", str(tmp_path / "b.json")]) == 2
    assert f"cannot write {tmp_path / 'b.json'}" in capsys.readouterr().err
    for arguments in ([], [trace, "--steps", "0"], [trace, "--steps", "many"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2
