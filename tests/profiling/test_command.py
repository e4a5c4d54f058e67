"""`overlap-timeline` and what it draws: a PNG, the table, and errors."""

import os
import re
import runpy
import struct
import sys
import tomllib
from pathlib import Path

import pytest

from lightning_overlap.callbacks import OverlapTimeline
from lightning_overlap.profiling import draw_png, layout
from lightning_overlap.profiling.command import BAD_INPUT, main
from lightning_overlap.profiling.report import headline, summarize, table
from lightning_overlap.profiling.spans import HOST_LANE, Category, Span
from lightning_overlap.profiling.trace_file import write_trace
from lightning_overlap.schedules.stages import Stage

STEP_MS = 10.0


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
        Span(start + begin, start + end, kind, lane, f"</script> {stage}", stage, batch + ahead, "<b>&")
        for batch, start in enumerate(STEP_MS * number + shift_ms for number in range(num))
        for begin, end, kind, lane, stage, ahead in one
    ]


def png_size(path: Path) -> tuple[int, int]:
    content = path.read_bytes()
    assert content[:8] == b"\x89PNG\r\n\x1a\n"
    width, height = struct.unpack(">II", content[16:24])
    return width, height


def test_png_has_a_panel_per_rank_and_matplotlibs_state_is_left_alone(tmp_path: Path) -> None:
    import matplotlib
    from matplotlib import pyplot

    before = pyplot.get_fignums(), dict(matplotlib.rcParams)
    draw_png.write_png(tmp_path / "one.png", {0: steps()})
    draw_png.write_png(tmp_path / "two.png", {0: steps(), 1: steps()})
    assert (pyplot.get_fignums(), dict(matplotlib.rcParams)) == before
    (one_wide, one_high), (two_wide, two_high) = png_size(tmp_path / "one.png"), png_size(tmp_path / "two.png")
    assert one_wide == two_wide == 1920
    assert one_high < two_high < 2 * one_high


def test_png_shows_waits_in_red(tmp_path: Path) -> None:
    from matplotlib.image import imread

    def red(name: str) -> int:
        image = imread(tmp_path / name)
        return int(((image[..., 0] > 0.75) & (image[..., 1] < 0.3) & (image[..., 2] < 0.3)).sum())

    draw_png.write_png(tmp_path / "all.png", {0: steps()})
    draw_png.write_png(tmp_path / "hidden.png", {0: [span for span in steps() if span.kind is Category.DENSE]})
    assert red("all.png") > 20 * red("hidden.png") > 0  # there, the lane's name and the legend alone


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


def test_one_event_that_lasts_no_time_is_drawn(tmp_path: Path) -> None:
    assert main([write(tmp_path, "t.json", {0: [Span(3, 3, Category.DENSE, HOST_LANE, "x")]})]) == 0


def test_nothing_to_draw_is_said(tmp_path: Path) -> None:
    with pytest.raises(ValueError, match="no rank has spans"):
        draw_png.write_png(tmp_path / "t.png", {0: []})
    with pytest.raises(ValueError, match="at least 1, got 0"):
        draw_png.write_png(tmp_path / "t.png", {0: steps()}, num_steps=0)


def test_columns_of_a_table_stand_beneath_each_other() -> None:
    text = table(("kind", "ms", "where"), (("dense", "1.0", "here"), ("lookup", "10.0", "")), ruled=False)
    assert text == "kind      ms  where\ndense    1.0  here\nlookup  10.0"


def write(folder: Path, name: str, ranks: dict[int, list[Span]]) -> str:
    write_trace(folder / name, ranks)
    return str(folder / name)


def test_command_draws_beside_the_trace_and_prints(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path, "run.json.gz", {0: steps(), 1: steps()})]) == 0
    assert sorted(path.name for path in tmp_path.iterdir()) == ["run.json.gz", "run.png"]
    said = capsys.readouterr()
    assert said.err == ""
    for line in (
        "rank 0: 10.0 ms per step; communication 50.0 % hidden, 2.00 ms exposed; host blocked 20.0 %",
        "communication     4.00       2.00        2.00  50.0 %",
        "Host blocked 10.0 of 50.0 ms (20.0 %).",
    ):
        assert line in said.out
    assert "rank 1: " in said.out


def test_command_writes_where_it_is_told_or_beside_the_trace(tmp_path: Path) -> None:
    (tmp_path / "a.png").mkdir()  # a folder called like a picture
    trace = write(tmp_path, "a.png/run.json", {0: steps()})
    assert main([trace]) == 0
    assert main([trace, "--out", str(tmp_path / "new" / "folder")]) == 0
    assert main([trace, "--out", str(tmp_path / "pictures" / "mine.png"), "--steps", "1", "--title", "Mine"]) == 0
    assert sorted(path.relative_to(tmp_path).as_posix() for path in tmp_path.rglob("*.*")) == [
        "a.png",
        "a.png/run.json",
        "a.png/run.png",
        "new/folder/run.png",
        "pictures/mine.png",
    ]


def test_command_takes_one_file_per_rank(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    assert main([write(tmp_path, f"r{rank}.json", {rank: steps()}) for rank in (1, 0)]) == 0
    assert re.findall(r"^(rank \d):", capsys.readouterr().out, re.MULTILINE) == ["rank 0", "rank 1"]


def test_command_tells_files_of_one_rank_apart(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    files = [write(tmp_path, name, {0: steps()}) for name in ("before.json", "after.json")]
    assert main(files) == 0
    said = capsys.readouterr().out
    assert all(f"{file} rank 0: 10.0 ms" in said for file in files)


def test_bad_files_are_said_without_a_traceback(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    (tmp_path / "t.json").write_bytes(b"not JSON")  # what else may be wrong: test_torch_trace.py
    assert main([str(tmp_path / "t.json")]) == 2
    said = capsys.readouterr()
    assert said.err.startswith(f"overlap-timeline: {tmp_path / 't.json'} ")
    assert "its JSON is broken" in said.err
    assert said.out == ""
    assert [path.name for path in tmp_path.iterdir()] == ["t.json"]


def test_other_bad_arguments(tmp_path: Path, capsys: pytest.CaptureFixture[str]) -> None:
    trace = write(tmp_path, "t.json", {0: steps()})
    (tmp_path / "taken").touch()
    assert main([trace, "--out", str(tmp_path / "taken")]) == 2
    assert f"cannot write {tmp_path / 'taken'}" in capsys.readouterr().err
    for arguments in ([], [trace, "--steps", "0"], [trace, "--steps", "many"]):
        with pytest.raises(SystemExit) as left:
            main(arguments)
        assert left.value.code == 2


def test_command_runs_as_a_module_and_writes_into_a_closed_pipe(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr(sys, "argv", ["", write(tmp_path, "t.json", {0: steps()})])
    monkeypatch.delitem(sys.modules, main.__module__)
    reader, writer = os.pipe()
    os.close(reader)
    with os.fdopen(writer, "w") as closed:  # its end flushes what is left, as Python does at exit
        monkeypatch.setattr(sys, "stdout", closed)
        with pytest.raises(SystemExit) as left:
            runpy.run_module("lightning_overlap.profiling.command", run_name="__main__")
    assert left.value.code == 0
    assert capsys.readouterr().err == ""
    assert (tmp_path / "t.png").stat().st_size > 10_000


def test_each_stage_has_a_colour_of_its_own() -> None:
    spans = [Span(0, 1, Category.DENSE, HOST_LANE, str(stage), stage) for stage in Stage]
    picture = layout.Picture({0: spans}, num_steps=1, resolution=0)
    assert len({picture.color(span) for span in spans}) == len(Stage)


def test_the_command_is_installed_by_its_name() -> None:
    project = tomllib.loads((Path(__file__).parents[2] / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"]["overlap-timeline"] == f"{main.__module__}:{main.__name__}"


def test_legends_have_greys_that_differ() -> None:
    def rgb(color: str) -> tuple[int, ...]:
        return tuple(int(color[place : place + 2], 16) for place in (1, 3, 5))

    greys = list(dict.fromkeys(look.color for look in layout.LOOKS.values()))
    for place, one in enumerate(greys):
        for other in greys[place + 1 :]:
            assert max(abs(mine - theirs) for mine, theirs in zip(rgb(one), rgb(other), strict=True)) >= 40


def test_what_hides_nothing_is_not_said_to_be_hidden_by_zero_percent() -> None:
    looked_up = [
        Span(span.end_ms, span.end_ms + 1, Category.LOOKUP, HOST_LANE, "lookup", Stage.EMBEDDING_LOOKUP, span.batch)
        for span in steps()
        if span.stage is Stage.BACKWARD
    ]
    told = headline(summarize([*steps(), *looked_up]))
    assert "communication 50.0 % hidden" in told
    assert "lookup" not in told
