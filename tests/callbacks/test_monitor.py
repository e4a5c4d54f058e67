"""`OverlapMonitor` on a real run, and the clocks under a virtual time in which every number is known."""

from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_overlap import MODES, OverlapEmbeddingStrategy, Schedule, Stage
from lightning_overlap.profiling import Category

from ..support.cases import TABLE_WISE
from . import monitors

# Forward, backward and step take 50 ms each, an all-to-all takes 40: drawn in profiling/test_virtual_clock.py.
BUSY_AND_HIDDEN_MS = {
    "base": (160, 0),
    "sparse_dist": (120, 40),
    "fused_sparse_dist": (120, 80),
    "fused_sparse_dist_after_optimizer": (120, 40),
    "split_backward": (105, 90),  # gradients travel while half of the backward is computed, and while ids do
    "semi_sync": (80, 40),  # embeddings travel while gradients do
    "semi_sync_deferred": (80, 80),
    "async_lookup": (80, 40),
    "prefetch": (120, 80),
}


def test_hidden_and_exposed_time_under_a_virtual_clock(mode: Schedule, two_ranks: Any) -> None:
    for result in two_ranks.run(monitors.account_of_a_steady_step, TABLE_WISE, mode.name):
        busy, hidden = BUSY_AND_HIDDEN_MS[mode.name]
        assert result["communication"] == (busy, hidden)
        assert result["dense"] == (150, 0)
        assert result["blocked"] == busy - hidden
        assert result["step"] == 150 + busy - hidden
        assert result["host"] == (150, 0)
        assert result["bound"] == (("communication", 160) if busy == 160 else ("dense", 150))
        waits_for_embeddings = mode.name in ("base", "sparse_dist", "fused_sparse_dist_after_optimizer")
        assert result["merge"] == (40 if waits_for_embeddings else 0)


@pytest.mark.parametrize(
    ("pipeline", "num_ranks"),
    [*((name, 2) for name in MODES), *((name, 1) for name in ("base", "split_backward", "semi_sync_deferred"))],
)
def test_a_run_tells_what_was_hidden(pipeline: str, num_ranks: int, get_ranks: Any) -> None:
    ranks, mode = get_ranks(num_ranks), MODES[pipeline]
    told = ranks.run(monitors.told_by_a_run, TABLE_WISE, pipeline)
    assert [rank["losses"] for rank in told] == ranks.run_once(monitors.losses_without, TABLE_WISE, pipeline)
    for rank in told:
        assert rank["nothing_patched"]
        assert rank["num_accounts"] >= 2
        seen = {stage for stage in Stage if mode.step_of(stage) is not None} | {Stage.EMBEDDING_LOOKUP}  # its own
        nothing_to_wait_for = {Stage.EMBEDDING_UPDATE, Stage.WEIGHT_GRADIENTS} if num_ranks == 1 else set()
        assert set(rank["stages"]) == seen - nothing_to_wait_for
        for values in rank["logged"]:
            assert values["overlap/loop_ms"] > 0
            if mode.depth == 1:
                assert not any("hidden" in name for name in values)
            for name in ("communication", "lookup", "copy") if mode.depth > 1 else ():
                busy = values[f"overlap/{name}/hidden_ms"] + values[f"overlap/{name}/exposed_ms"]
                assert 0 <= busy <= values["overlap/step_ms"] + 1e-6
                assert 0 <= values[f"overlap/{name}/hidden_fraction"] <= 1
            assert values["overlap/bound_ms"] <= values["overlap/step_ms"] + 1e-6
            assert values["overlap/to_gain_ms"] == pytest.approx(values["overlap/step_ms"] - values["overlap/bound_ms"])
            assert values["overlap/batches_in_flight"] <= mode.depth
        # Read at the end of a step, when the batch before has had its update.
        update = mode.step_of(Stage.EMBEDDING_UPDATE)
        updates_later = update is not None and update.offset < 0
        assert rank["logged"][0]["overlap/batches_in_flight"] == mode.depth - updates_later
        assert ("hidden" in rank["progress_bar"]) == (mode.depth > 1)
        assert rank["logged"][0]["overlap/data_ms"] > 0  # a stage of its own; later ones may have fetched all
    table = told[0]["printed"]
    assert f"Overlap: {mode.name}" in table
    assert f"{num_ranks} ranks" in table
    assert "-bound" in table
    assert "more overlap gains at most" in table
    assert table.splitlines()[-1].startswith("Advice: ")
    assert ("wait for rank" in table or "equally long" in table) == (num_ranks > 1)
    assert all(rank["printed"] == "" for rank in told[1:])


def test_a_slow_loader_is_waited_for_and_no_copy_and_self_log_is_timed(two_ranks: Any) -> None:
    for found, log_ms, printed, left_behind in two_ranks.run(monitors.slow_loader_and_log, TABLE_WISE, 50.0, 5.0):
        assert 50 <= found.categories[Category.DATA].busy_ms <= found.step_ms
        assert found.categories[Category.COPY].busy_ms < 15
        assert log_ms >= 5
        assert not left_behind
        if printed:
            assert "waited for data" in printed
            advice = printed.splitlines()[-1]
            assert advice.startswith("Advice: waiting for data ")
            assert "raise num_workers of the DataLoader" in advice


def test_the_wait_for_the_dense_all_reduce_is_no_work_of_the_host(two_ranks: Any) -> None:
    (waits, left), (works, _) = two_ranks.run(monitors.late_with_dense_gradients, TABLE_WISE, 150.0)
    assert not left
    assert waits.blocked_ms > 100
    assert waits.categories[Category.DENSE].busy_ms < waits.step_ms - 100
    assert waits.categories[Category.HOST].busy_ms < waits.step_ms - 100
    assert works.categories[Category.DENSE].busy_ms > 150
    assert works.blocked_ms < 100


def test_the_audit_names_the_users_own_line(two_ranks: Any) -> None:
    for rank in two_ranks.run(monitors.audited, TABLE_WISE, "fused_sparse_dist"):
        mine = [place for place in rank["places"] if "training_step" in place[1]]
        assert mine == [("dense_forward", f"training_step, cases.py:{rank['line']}", "_local_scalar_dense")]
        others = [place for place in rank["places"] if place not in mine]
        assert [stage for stage, *_ in others] == ["input_data_dist"], "the read of the sizes, and nothing else"
        assert "host_syncs" in " ".join(rank["logged"])


@pytest.mark.parametrize("strategy", [OverlapEmbeddingStrategy, DDPStrategy])
def test_why_there_is_nothing_to_watch(get_ranks: Any, strategy: type[DDPStrategy]) -> None:
    """A module without tables, or another strategy; the number of steps is not the reason."""
    [messages] = get_ranks(1).run(monitors.without_pipeline, strategy)
    assert [message.split(":")[0] for message in messages] == [
        f"{callback} has nothing to watch" for callback in ("OverlapMonitor", "OverlapTimeline")
    ]
    assert all(f": {strategy.__name__} runs no sparse pipeline here" in message for message in messages)


def test_a_validation_inside_a_measured_step_is_not_measured(two_ranks: Any) -> None:
    for num_validations, num_accounts, still_watched in two_ranks.run(monitors.validates_every_other_step, TABLE_WISE):
        assert num_validations > 2
        assert num_accounts == 0
        assert not still_watched


@pytest.mark.parametrize("every", [0, 2])
def test_a_measurement_needs_steps_of_its_own(every: int) -> None:
    with pytest.raises(ValueError, match=f"more than 2, .* got {every}"):
        monitors.OverlapMonitor(every_n_steps=every)
