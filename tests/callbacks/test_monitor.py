"""`OverlapMonitor` on a real run, and the clocks under a virtual time in which every number is known."""

import inspect
import re
from typing import Any

import pytest
from lightning.pytorch.strategies import DDPStrategy

from lightning_overlap import MODES, Balance, OverlapEmbeddingStrategy, OverlapMonitor, Schedule, Stage
from lightning_overlap.profiling import Category, mean

from ..balance.balanced import num_ids
from ..support.cases import TABLE_WISE, ReadsItsLoss
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
MONITOR = OverlapMonitor(every_n_steps=4)


def test_hidden_and_exposed_time_under_a_virtual_clock(mode: Schedule, two_ranks: Any) -> None:
    busy, hidden = BUSY_AND_HIDDEN_MS[mode.name]
    waits_for_embeddings = mode.name in ("base", "sparse_dist", "fused_sparse_dist_after_optimizer")
    for result in two_ranks.run(monitors.account_of_a_steady_step, TABLE_WISE, mode.name):
        times = {kind: (one.busy_ms, one.hidden_ms) for kind, one in result.categories.items()}
        assert times[Category.COMMUNICATION] == pytest.approx((busy, hidden))
        assert [times[kind] for kind in (Category.DENSE, Category.HOST)] == [pytest.approx((150, 0))] * 2
        assert result.blocked_ms == pytest.approx(busy - hidden)
        assert result.step_ms == pytest.approx(150 + busy - hidden)
        assert result.bound == (("communication", pytest.approx(160)) if busy == 160 else ("dense", pytest.approx(150)))
        assert result.merge_wait_ms == pytest.approx(40 if waits_for_embeddings else 0)


@pytest.mark.parametrize(
    ("pipeline", "num_ranks"),
    [*((name, 2) for name in MODES), *((name, 1) for name in ("base", "split_backward", "semi_sync_deferred"))],
)
def test_a_run_tells_what_was_hidden(pipeline: str, num_ranks: int, get_ranks: Any) -> None:
    ranks, mode = get_ranks(num_ranks), MODES[pipeline]
    told = ranks.run(monitors.run, TABLE_WISE, pipeline, MONITOR)
    without = ranks.run_once(monitors.run, TABLE_WISE, pipeline)
    assert [rank["losses"] for rank in told] == [rank["losses"] for rank in without]
    for rank in told:
        assert rank["is_clean"]
        first, *others = rank["logged"].values()
        assert len(others) >= 1
        seen = {stage for stage in Stage if mode.step_of(stage) is not None} | {Stage.EMBEDDING_LOOKUP}  # its own
        nothing_to_wait_for = {Stage.EMBEDDING_UPDATE, Stage.WEIGHT_GRADIENTS} if num_ranks == 1 else set()
        assert set(rank["accounts"][0].stages) == seen - nothing_to_wait_for
        for values in (first, *others):
            busy = {name: value for name, value in values.items() if name.endswith(("/hidden_ms", "/exposed_ms"))}
            assert all(0 <= value <= values["overlap/step_ms"] + 1e-6 for value in busy.values())
            assert any("hidden" in name for name in values) == (mode.depth > 1)
            assert values["overlap/to_gain_ms"] == pytest.approx(values["overlap/step_ms"] - values["overlap/bound_ms"])
            assert values["overlap/batches_in_flight"] <= mode.depth
        # Read at the end of a step, when the batch before has had its update.
        update = mode.step_of(Stage.EMBEDDING_UPDATE)
        updates_later = update is not None and update.offset < 0
        assert first["overlap/batches_in_flight"] == mode.depth - updates_later
        assert ("hidden" in rank["progress_bar"]) == (mode.depth > 1)
        assert first["overlap/data_ms"] > 0  # a stage of its own; later ones may have fetched all
    table = told[0]["printed"]
    words = (f"Overlap: {mode.name}", f"{num_ranks} ranks", "-bound", "more overlap gains at most")
    assert [word for word in words if word not in table] == []
    assert table.splitlines()[-1].startswith("Advice: ")
    assert ("wait for rank" in table or "equally long" in table) == (num_ranks > 1)
    assert all(rank["printed"] == "" for rank in told[1:])


def test_a_slow_loader_is_waited_for_and_no_copy_and_self_log_is_timed(two_ranks: Any) -> None:
    classes = {"model": monitors.Logs, "data": monitors.Slow}
    for rank in two_ranks.run(monitors.run, TABLE_WISE, "fused_sparse_dist", MONITOR, **classes):
        first = rank["accounts"][0]  # the last ones may have fetched all data
        assert 50 <= first.categories[Category.DATA].busy_ms <= first.step_ms
        assert first.categories[Category.COPY].busy_ms < 15
        assert mean(rank["accounts"]).log_ms >= 5
        assert rank["is_clean"]
        if rank["printed"]:
            assert re.search("waited for data(.|\n)*Advice: .*raise num_workers of the DataLoader", rank["printed"])


def test_the_wait_for_the_dense_all_reduce_is_no_work_of_the_host(two_ranks: Any) -> None:
    ranks = two_ranks.run(monitors.run, TABLE_WISE, "base", MONITOR, model=monitors.Late)
    assert all(rank["is_clean"] for rank in ranks)
    waits, works = (mean(rank["accounts"]) for rank in ranks)
    assert waits.blocked_ms > 100
    assert waits.categories[Category.DENSE].busy_ms < waits.step_ms - 100
    assert waits.categories[Category.HOST].busy_ms < waits.step_ms - 100
    assert works.categories[Category.DENSE].busy_ms > 150
    assert works.blocked_ms < 100


def test_the_audit_names_the_users_own_line(two_ranks: Any) -> None:
    source, first = inspect.getsourcelines(ReadsItsLoss)
    place = next(place for place, line in enumerate(source, first) if ".item()" in line)
    for rank in two_ranks.run(monitors.run, TABLE_WISE, "fused_sparse_dist", MONITOR, model=ReadsItsLoss):
        mine = ("dense_forward", f"training_step, cases.py:{place}", "_local_scalar_dense")
        others = [stage for stage, *where in rank["syncs"] if (stage, *where) != mine]
        assert (len(rank["syncs"]), others) == (2, ["input_data_dist"]), "the read of the sizes, and nothing else"
        assert "overlap/host_syncs" in list(rank["logged"].values())[-1]


@pytest.mark.parametrize("strategy", [OverlapEmbeddingStrategy, DDPStrategy])
def test_why_there_is_nothing_to_watch(get_ranks: Any, strategy: type[DDPStrategy]) -> None:
    """A module without tables, or another strategy; the number of steps is not the reason."""
    [messages] = get_ranks(1).run(monitors.without_pipeline, strategy)
    assert [message.split(":")[0] for message in messages] == [
        f"{callback} has nothing to watch" for callback in ("OverlapMonitor", "OverlapTimeline")
    ]
    assert all(f": {strategy.__name__} runs no sparse pipeline here" in message for message in messages)


def test_a_validation_inside_a_measured_step_is_not_measured(two_ranks: Any) -> None:
    options = {"val_check_interval": 2, "limit_val_batches": 1, "num_sanity_val_steps": 0}
    ranks = two_ranks.run(
        monitors.run, TABLE_WISE, "fused_sparse_dist", OverlapMonitor(3), data=monitors.Validates, **options
    )
    assert [(rank["accounts"], rank["is_clean"]) for rank in ranks] == [([], True)] * 2


@pytest.mark.parametrize("every", [0, 2])
def test_a_measurement_needs_steps_of_its_own(every: int) -> None:
    with pytest.raises(ValueError, match=f"more than 2, .* got {every}"):
        OverlapMonitor(every_n_steps=every)


def test_the_costs_of_the_ranks_before_and_after_balancing(two_ranks: Any) -> None:
    first, second = two_ranks.run(monitors.run, TABLE_WISE, "fused_sparse_dist", MONITOR, balance=Balance(num_ids))
    for values, others in zip(first["logged"].values(), second["logged"].values(), strict=True):
        before, after = (
            [values[f"overlap/cost_{when}/rank_{rank}"] for rank in (0, 1)] for when in ("before", "after")
        )
        assert sum(before) == sum(after) > 0
        assert values["overlap/heaviest_before"] == pytest.approx(2 * max(before) / sum(before))
        assert values["overlap/heaviest_after"] == pytest.approx(2 * max(after) / sum(after))
        assert 1 <= values["overlap/heaviest_after"] < values["overlap/heaviest_before"]
        assert values["overlap/balance_bytes"] > 16 * 4
        assert {name: value for name, value in others.items() if "cost" in name} == {
            name: value for name, value in values.items() if "cost" in name
        }
