"""The statistics of a benchmark on numbers made by hand: the slowest rank, ratios by round, the bound."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path

import pytest

from lightning_overlap.apps import bench_report
from lightning_overlap.apps.bench_report import ArmTurns, Turn, bound_ms, evaluate, table
from lightning_overlap.apps.bench_worker import _Bench
from lightning_overlap.apps.step_timers import by_name
from lightning_overlap.profiling.spans import Category, Span
from lightning_overlap.schedules import MODES

MIB = 2**20


def turn(*step_ms: float, losses: bytes = b"ab", memory_mib: int = 100, **more: object) -> Turn:
    return Turn(list(step_ms), losses, 0.5, {"resident": memory_mib * MIB}, **more)  # type: ignore[arg-type]


def base() -> ArmTurns:
    """Two rounds on two ranks: 100 ms of which rank 0 waits for 50, rank 1 for 40."""
    fast = turn(90, 100, 100, busy_ms=[50.0], wire_ms=[60.0], exposed_ms=[50.0], cpu_ms=[7.0, 8.0, 30.0],
                collectives={"embeddings": (60, 50)})  # fmt: skip
    slow = turn(100, 100, 110, busy_ms=[60.0], wire_ms=[52.0], exposed_ms=[40.0], cpu_ms=[9.0, 7.0, 30.0],
                collectives={"embeddings": (52, 40)})  # fmt: skip
    return ArmTurns("base", 0, [[fast, slow], [fast, slow]])


def test_the_bound_is_the_busiest_rank_or_the_wire() -> None:
    assert bound_ms(base()) == 60  # rank 1 is busy for 60; the wire for 52, as the rank that issues last sees it
    wired = [[replace(one, wire_ms=[80.0]) for one in turns] for turns in base().rounds]
    assert bound_ms(ArmTurns("base", 0, wired)) == 80
    assert bound_ms(base(), all_reduce_ms=5) == 60  # ranks wait for it, so it is part of their 60
    assert bound_ms(base(), all_reduce_ms=10) == 62
    unseen = [[replace(one, busy_ms=[]) for one in turns] for turns in base().rounds]
    assert bound_ms(ArmTurns("base", 0, unseen)) is None


def test_each_statistic_is_of_the_slowest_rank() -> None:
    mode = ArmTurns("mode", 0, [[turn(50, 50, 50), turn(70, 80, 90)], [turn(90, 90, 90), turn(70, 80, 90)]])
    _, result = evaluate([base(), mode], batch_size=10)
    assert result["step_ms_median"] == 80  # of rank 1; rank 0's is 70
    assert result["step_ms_p90"] == 90
    assert result["of_base_range"] == (0.8, 0.9)  # 80 and 90 of 100, by rounds
    assert math.isclose(result["of_base"], 0.85)
    assert result["samples_per_s"] == pytest.approx(10 * 12 / 0.480)  # rank 1 took 480 ms for its 6 steps, rank 0 420
    assert result["exposed_ms"] is None  # nothing was recorded
    assert result["same_as_base"]


def test_a_precision_has_a_reference_of_its_own() -> None:
    other = [[turn(80, losses=b"xb")] * 2] * 2
    arms = [base(), ArmTurns("base+fp16", 0, other), ArmTurns("mode+fp16", 0, other), ArmTurns("mode+int8", 0, other)]
    found = evaluate(arms, batch_size=None)
    assert [result["same_as_base"] for result in found] == [True, True, True, False]
    lines = table(found).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[-2:]] == ["yes (base+fp16)", "no (int8)"]


def test_one_other_bit_on_any_rank_in_any_round_is_not_the_same() -> None:
    other = base().rounds
    other[1][1] = replace(other[1][1], losses=b"ac")
    arms = [base(), ArmTurns("x", 0, other), ArmTurns("y", 1, other), ArmTurns("z", 0, other, frozen_window=True)]
    results = evaluate(arms, None)[1:]
    assert not any(result["same_as_base"] for result in results)
    lines = table(results).splitlines()
    assert lines[2].endswith(" NO")
    assert lines[3].endswith("no (staleness 1)")
    assert lines[4].endswith("no (frozen window)")


def test_the_table_and_the_file_have_each_arm(tmp_path: Path) -> None:
    arms = [base(), ArmTurns("peer", 0, failure="RuntimeError: no such stream")]
    results = evaluate(arms, 10)
    head, _, row = table(results).splitlines()
    assert head.startswith("arm ")
    assert " ".join(row.split()) == ("base 100.00 ms 110.00 ms 9.00 ms 1.000 1.000-1.000 194 50.00 ms 100 MiB 0.5 yes")
    assert bench_report.notes(arms, results) == ["peer: does not run here: RuntimeError: no such stream"]
    bench_report.write(tmp_path, arms, results, 60.0, {"ranks": 2})
    content = json.loads((tmp_path / "bench.json").read_text(encoding="utf-8"))
    assert (content["ranks"], content["bound_ms"]) == (2, 60.0)
    assert [arm["failure"] for arm in content["arms"]] == [None, "RuntimeError: no such stream"]
    assert content["arms"][0]["collectives"] == {"embeddings": [60, 50]}


def test_each_collective_is_hidden_or_exposed() -> None:
    seen = {"embeddings": (40.0, 39.5), "sizes": (40.0, 3.0), "all_reduce": (1.0, 0.0)}
    arm = ArmTurns("base", 0, [[turn(100, collectives=seen), turn(100, collectives={"embeddings": (40.0, 41.0)})]])
    told = bench_report.collectives_table(evaluate([arm], None))
    assert told is not None
    head, _, row = told.splitlines()
    assert head.split() == ["waited", "for", "sizes", "embeddings"]  # an all-reduce only where it is exposed
    assert row.split() == ["base", "hidden", "exposed", "41.0", "ms"]  # of the rank that waits longest
    assert bench_report.collectives_table(evaluate([ArmTurns("base", 0, [[turn(100)]])], None)) is None


def test_collectives_count_in_the_step_of_their_issue_and_waits_on_their_lane() -> None:
    spans = [
        Span(5, 25, Category.COMMUNICATION, "collectives", "embeddings"),
        Span(12, 25, Category.WAIT, "host", "embeddings"),
        Span(15, 40, Category.COMMUNICATION, "collectives", "embeddings"),
        Span(30, 40, Category.WAIT, "host", "embeddings"),
        Span(21, 29, Category.WAIT, "side", "ids"),
    ]
    assert by_name(spans, [(0, 10), (10, 20), (20, 45)], "host") == {"embeddings": (20, 10)}


def test_rounds_that_disagree_give_no_verdict() -> None:
    [result] = evaluate([base()], None)
    calm = {**result, "name": "calm", "of_base": 0.8, "of_base_range": (0.75, 0.85)}
    wild = {**result, "name": "wild", "of_base": 0.8, "of_base_range": (0.7, 1.1)}
    [line] = bench_report.notes([], [calm, wild])
    assert line.startswith("wild: the rounds disagree, from 0.70 to 1.10 of base: no verdict.")


def test_without_matplotlib_the_benchmark_ends_without_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bench = object.__new__(_Bench)
    bench.folder, bench.ours = tmp_path, {"base": (MODES["base"], "data_dist")}
    bench.spans = {"base": [Span(0, 1, Category.DENSE, "host", "forward")]}
    bench.draw()
    assert "pip install 'lightning_overlap[plot]'" in capsys.readouterr().out
