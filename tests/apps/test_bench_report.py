"""The statistics of a benchmark on numbers made by hand: the slowest rank, ratios by round, the bound."""

import json
import math
import sys
from dataclasses import replace
from pathlib import Path
from typing import Any

import pytest
import torch

from lightning_overlap import MODES
from lightning_overlap.apps import bench_report
from lightning_overlap.apps.bench_report import ArmTurns, Turn, bound_ms, evaluate, table
from lightning_overlap.apps.bench_worker import _Bench
from lightning_overlap.apps.step_timers import by_name, to_keep
from lightning_overlap.profiling.spans import Category, Span

MIB = 2**20


def turn(*step_ms: float, losses: bytes = b"ab", memory_mib: int = 100, **more: Any) -> Turn:
    return Turn(list(step_ms), losses, 0.5, {"resident": memory_mib * MIB}, **more)


def base() -> ArmTurns:
    """Two rounds on two ranks: 100 ms of which rank 0 waits for 50, rank 1 for 40."""
    seen: dict[str, tuple[float, float]] = {"embeddings": (60, 50)}
    fast = turn(90, 100, 100, busy_ms=[50.0], wire_ms=[60.0], exposed_ms=[50.0], cpu_ms=[7.0, 8.0], collectives=seen)
    slow = turn(100, 100, 110, busy_ms=[60.0], wire_ms=[52.0], exposed_ms=[40.0], cpu_ms=[9.0, 9.0], collectives=seen)
    return ArmTurns("base", 0, [[fast, slow], [fast, slow]])


@pytest.mark.parametrize("dtype", [torch.float32, torch.bfloat16])
def test_a_loss_on_a_cpu_is_kept_exactly_and_not_as_a_tensor(dtype: torch.dtype) -> None:
    losses = torch.rand(100, requires_grad=True).to(dtype)
    kept = [to_keep(loss) for loss in losses]
    assert torch.equal(torch.tensor([*map(float, kept)]), losses.detach().float())
    assert {type(one) for one in kept} == {float}


def test_the_bound_is_the_busiest_rank_or_the_wire() -> None:
    assert bound_ms(base()) == 60  # rank 1 is busy for 60; the wire for 52, as the rank that issues last sees it
    wired, unseen = (
        ArmTurns("base", 0, [[replace(one, **times) for one in turns] for turns in base().rounds])
        for times in ({"wire_ms": [80.0]}, {"busy_ms": []})
    )
    assert bound_ms(wired) == 80
    assert bound_ms(unseen) is None
    assert bound_ms(base(), all_reduce_ms=5) == 60  # ranks wait for it, so it is part of their 60
    assert bound_ms(base(), all_reduce_ms=10) == 62


def test_losses_are_of_all_rounds() -> None:
    """One round's loss would hide a race that shows in another round."""
    rounds = [[turn(1), turn(1)], [replace(turn(1), final_loss=0.7), replace(turn(1), final_loss=0.9)]]
    [result] = evaluate([ArmTurns("base", 0, rounds)], batch_size=10)
    assert result["final_loss"] == pytest.approx(0.65)
    assert result["final_loss_range"] == pytest.approx((0.5, 0.8))


def test_a_reference_that_does_not_equal_itself_gives_no_verdict() -> None:
    arms = [ArmTurns("base", 0, [[turn(1)], [replace(turn(1), losses=b"cd")]]), ArmTurns("mode", 0, [[turn(1)]] * 2)]
    results = evaluate(arms, batch_size=10)
    assert [result["same_as_base"] for result in results] == [False, True]
    assert bench_report.notes(arms, results)[0] == (
        "base does not equal itself in all rounds, so 'same as base' says nothing: its sums are not reproducible. Run "
        "with deterministic=true."
    )


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


def test_one_other_bit_on_any_rank_in_any_round_is_not_the_same() -> None:
    other = base().rounds
    other[1][1] = replace(other[1][1], losses=b"ac")
    arms = [base(), ArmTurns("x", 0, other), ArmTurns("y", 1, other)]
    results = evaluate(arms, None)[1:]
    assert not any(result["same_as_base"] for result in results)
    lines = table(results).splitlines()
    assert lines[2].endswith(" NO")
    assert lines[3].endswith("no (staleness 1)")


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


def test_a_precision_has_a_reference_of_its_own() -> None:
    other = [[turn(80, losses=b"xb")] * 2] * 2
    arms = [base(), *(ArmTurns(name, 0, other) for name in ("base+fp16", "mode+fp16", "mode+int8"))]
    found = evaluate(arms, batch_size=None)
    assert [result["same_as_base"] for result in found] == [True, True, True, False]
    lines = table(found).splitlines()
    assert [line.split("  ")[-1].strip() for line in lines[-2:]] == ["yes (base+fp16)", "no (int8)"]


def test_memory_is_the_90th_percentile_over_rounds_of_the_largest_rank() -> None:
    rounds = [[turn(100, memory_mib=mib), turn(100, memory_mib=50)] for mib in range(100, 111)]
    assert evaluate([ArmTurns("base", 0, rounds)], batch_size=None)[0]["peak_memory"] == {"resident": 109 * MIB}


def test_rounds_that_disagree_give_no_verdict() -> None:
    [result] = evaluate([base()], None)
    calm = {**result, "name": "calm", "of_base": 0.8, "of_base_range": (0.75, 0.85)}
    wild = {**result, "name": "wild", "of_base": 0.8, "of_base_range": (0.7, 1.1)}
    [line] = bench_report.notes([], [calm, wild])
    assert line.startswith("wild: the rounds disagree, from 0.70 to 1.10 of base: no verdict.")


def test_each_collective_is_hidden_or_exposed_in_the_step_that_issued_it() -> None:
    spans = [
        Span(5, 25, Category.COMMUNICATION, "collectives", "embeddings"),
        Span(12, 25, Category.WAIT, "host", "embeddings"),
        Span(15, 40, Category.COMMUNICATION, "collectives", "embeddings"),
        Span(30, 40, Category.WAIT, "host", "embeddings"),
        Span(21, 29, Category.WAIT, "side", "ids"),  # of another lane
    ]
    assert by_name(spans, [(0, 10), (10, 20), (20, 45)], "host") == {"embeddings": (20, 10)}
    seen = {"embeddings": (40.0, 39.5), "sizes": (40.0, 3.0), "all_reduce": (1.0, 0.0)}
    arm = ArmTurns("base", 0, [[turn(100, collectives=seen), turn(100, collectives={"embeddings": (40.0, 41.0)})]])
    said = bench_report.collectives_table(evaluate([arm], None))
    assert said is not None
    head, _, row = said.splitlines()
    assert head.split() == ["waited", "for", "sizes", "embeddings"]  # an all-reduce only where it is exposed
    assert row.split() == ["base", "hidden", "exposed", "41.0", "ms"]  # of the rank that waits longest
    assert bench_report.collectives_table(evaluate([ArmTurns("base", 0, [[turn(100)]])], None)) is None


def test_without_matplotlib_a_benchmark_ends_without_a_picture(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setitem(sys.modules, "matplotlib", None)
    bench = object.__new__(_Bench)
    bench.folder, bench.ours = tmp_path, {"base": (MODES["base"], "data_dist")}
    bench.spans = {"base": [Span(0, 1, Category.DENSE, "host", "forward")]}
    bench.draw()
    assert "pip install 'lightning_overlap[plot]'" in capsys.readouterr().out
