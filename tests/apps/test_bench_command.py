"""`overlap-bench` as a user meets it: two ranks, a few steps of a few arms, and what it leaves behind."""

import json
from functools import partial
from pathlib import Path
from typing import Any

import pytest

from .test_train_command import train

pytestmark = pytest.mark.slow

SMALL = (  # a large rate on few rows: a lookup that is stale by a step has another loss
    *("rounds=2", "steps=3", "warm_up=1", "measured_steps=2"),
    *("data.num_tables=3", "data.rows_per_table=100", "data.batch_size=16"),
)
bench = partial(train, module="lightning_overlap.benchmark")


def results(folder: Path) -> tuple[dict[str, Any], dict[str, Any]]:
    [path] = folder.glob("outputs/*/*/bench.json")
    assert (path.parent / "timeline.png").exists()
    content = json.loads(path.read_text(encoding="utf-8"))
    return content, {arm["name"]: arm for arm in content["arms"]}


def test_ours_beside_plain_lightning_and_torchrec(tmp_path: Path) -> None:
    names = ["base", "fused_sparse_dist", "semi_sync", "lightning_dmp", "loop_dmp", "torchrec/sparse_dist"]
    arms = f"arms=[{','.join([*names, 'torchrec/prefetch'])}]"
    done = bench(tmp_path, *SMALL, arms, "model.table_learning_rate=1.0", "sharding.tables.cat_1=column_wise")
    content, arms_by_name = results(tmp_path)
    assert list(arms_by_name) == [*names, "torchrec/prefetch"]
    assert content["ranks"] == 2
    assert content["versions"]["torchrec"]
    assert content["bound_ms"] > 0
    for name in names:
        arm = arms_by_name[name]
        assert arm["same_as_base"] == (name != "semi_sync"), name
        assert (arm["final_loss"] == arms_by_name["base"]["final_loss"]) == (name != "semi_sync")
        assert 0 < arm["step_ms_median"] <= arm["step_ms_p90"]
        assert arm["of_base_range"][0] <= arm["of_base"] <= arm["of_base_range"][1]
        assert min(arm["cpu_ms"], arm["samples_per_s"], arm["peak_memory"]["resident"]) > 0
        with_ids = name in ("fused_sparse_dist", "semi_sync")  # the sizes of the next batch travel with them
        assert {"ids", "embeddings", "gradients"} <= arm["collectives"].keys()
        assert ("sizes" not in arm["collectives"]) == with_ids
    prefetch = arms_by_name["torchrec/prefetch"]["failure"]  # needs CUDA streams
    assert "PrefetchPipelinedForward" in prefetch
    assert f"torchrec/prefetch: does not run here: {prefetch}" in done.stdout
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["same", "as", "base"] in [line[-3:] for line in lines]
    assert next(line[-1] for line in lines if line[:1] == ["torchrec/sparse_dist"]) == "yes"
    assert "14/14" in done.stderr  # the progress bar: seven arms, two rounds


def test_latencies_are_put_on_top(tmp_path: Path) -> None:
    shorter = [f"latency.{part}_ms=5" for part in ("forward", "backward", "step")]
    bench(tmp_path, "bench=virtual_latency", *SMALL, *shorter, "rounds=1", "deterministic=true", "arms=[torchrec/base]")
    _, arms = results(tmp_path)
    for arm in arms.values():
        # A sleep is never shorter: sizes, lengths with ids, embeddings, gradients one after the other, and 3 x 5 ms.
        assert arm["step_ms_median"] >= 4 * 40 + 15
        for name in ("sizes", "ids", "embeddings", "gradients"):
            assert arm["collectives"][name][1] >= 30, name
        assert arm["same_as_base"]
