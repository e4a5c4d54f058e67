"""Prices of modes: against steps of the executor under a virtual clock, against timelines by hand, and properties."""

from __future__ import annotations

from dataclasses import replace

import pytest
from hypothesis import given
from hypothesis import strategies as st

from lightning_overlap import MODES, Stage
from lightning_overlap.profiling import HOST_LANE, BusyTime, Category, Span
from lightning_overlap.tuning import Bags, Costs, costs_of, over_ranks, prices, shrunk, with_replicas
from lightning_overlap.tuning import costs as parts
from lightning_overlap.tuning.prices import OFF, PRICED, TOLD, Walk

from ..callbacks import monitors
from ..support.cases import TABLE_WISE
from ..support.ranks import Ranks

STEPS_MS = {
    "base": 310,
    "sparse_dist": 230,
    "fused_sparse_dist": 190,
    "fused_sparse_dist_after_optimizer": 230,
    "semi_sync": 190,
    "semi_sync_deferred": 150,
    "async_lookup": 190,
}
"""What the executor takes where each all-to-all is on its way for 40 ms, whatever else is, and the dense forward,
backward and step take 50 ms each; the timelines are drawn in `tests/profiling/test_virtual_clock.py`."""


def costs(
    forward: float = 50,
    backward: float = 50,
    step: float = 50,
    *,
    lookup: float = 0,
    update: float = 0,
    all_to_all: float = 40,
    gradients: float | None = None,
    sizes: float | None = None,
    on_device: bool = False,
) -> Costs:
    work = {parts.AFTER_MERGE: forward, parts.BEFORE_SENDING: backward, "optimizer_step": step}
    work |= {parts.EMBEDDINGS: lookup, parts.AFTER_SENDING: update}
    link = {name: float(all_to_all) for name in (parts.SIZES, parts.IDS, parts.EMBEDDINGS, parts.GRADIENTS)}
    link |= {} if gradients is None else {parts.GRADIENTS: gradients}
    link |= {} if sizes is None else {parts.SIZES: sizes}
    return Costs(work, link, link, on_device)


@pytest.mark.parametrize("mode", STEPS_MS)
def test_a_walk_takes_as_long_as_the_executor(mode: str) -> None:
    assert Walk(MODES[mode], costs(), shared=False).step_ms() == STEPS_MS[mode]


@pytest.mark.parametrize("measured", STEPS_MS)
def test_one_measured_step_prices_all_modes(two_ranks: Ranks, measured: str) -> None:
    """Of real runs under the virtual clock: to the millisecond for who knows the link, else within the error given."""
    ranks = two_ranks.run(monitors.costs_of_a_steady_step, TABLE_WISE, measured)
    assert [took for _, took in ranks] == [pytest.approx(STEPS_MS[measured])] * 2
    for found_costs, _ in ranks:
        work = {part: ms for part, ms in found_costs.work.items() if ms}
        assert work == {parts.AFTER_MERGE: 50, parts.BEFORE_SENDING: 50, "optimizer_step": 50}
    of_ranks = over_ranks([one for one, _ in ranks], 0)
    walked = {name: Walk(MODES[name], of_ranks, shared=False).step_ms() for name in STEPS_MS}
    assert walked == pytest.approx(STEPS_MS)
    found = prices(MODES[measured], of_ranks, [ranks[0][1]])
    assert found[0].name == measured
    off = {price.name: abs(price.ms - STEPS_MS[price.name]) - price.error_ms for price in found}
    assert max(off.values()) < 0.5
    assert {price.name for price in found if price.staleness} == {"semi_sync", "semi_sync_deferred", "async_lookup"}


def test_all_to_alls_take_turns_on_a_shared_link() -> None:
    """fused_sparse_dist: ids from 50 to 130 ms; gradients, from 100 on, wait for them and arrive at 210. The step ends
    at 260, and the embeddings, sent at 210, arrive at 290: the next forward waits 30 ms for them. Did they not take
    turns, gradients would arrive at 180, and embeddings at 260."""
    given_costs = costs(all_to_all=80, sizes=0)
    assert Walk(MODES["fused_sparse_dist"], given_costs, shared=False).step_ms() == 260
    assert Walk(MODES["fused_sparse_dist"], given_costs, shared=True).step_ms() == 290
    assert Walk(MODES["base"], given_costs, shared=True).step_ms() == 150 + 3 * 80


def test_streams_of_a_device_work_side_by_side() -> None:
    """Lookup and update on CUDA: a lookup of 30 ms after the backward of 50 + 40 ms, beside the step of 50 ms."""
    on_host, on_device = (costs(lookup=30, all_to_all=10, on_device=on_device) for on_device in (False, True))
    fused = MODES["fused_sparse_dist"]
    assert Walk(fused, on_host, shared=False).step_ms() == 150 + 30 + 10
    assert Walk(fused, on_device, shared=False).step_ms() == 150 + 10


def test_fewer_bytes() -> None:
    """Base waits for all four all-to-alls; FP16 halves two of them."""
    found = prices(MODES["base"], costs(), [310, 310, 314, 302], {"FP16 between ranks": shrunk(costs(), 0.5)})
    by_name = {price.name: price for price in found}
    assert by_name["FP16 between ranks"].ms == pytest.approx(310 - 40)
    assert str(by_name["FP16 between ranks"]).startswith("270 +- ")


def test_the_error_has_the_spread_and_what_the_walk_is_off() -> None:
    [first, *_] = prices(MODES["base"], costs(), [320.0] * 8)
    assert (first.ms, first.error_ms) == (320, 10)
    [first, *_] = prices(MODES["base"], costs(), [300.0] * 4 + [320.0] * 4)
    assert (first.ms, first.error_ms) == (310, 10)
    fused = next(one for one in prices(MODES["base"], costs(sizes=0), [270.0]) if one.name == "fused_sparse_dist")
    assert (fused.ms, fused.error_ms) == (190, OFF * 80)


ANY_COSTS: dict[str, st.SearchStrategy[float]] = dict.fromkeys(
    ("forward", "backward", "step", "lookup", "update", "all_to_all"), st.floats(0, 100)
)


@given(st.fixed_dictionaries(ANY_COSTS), st.booleans(), st.sampled_from(PRICED), st.booleans())
def test_more_overlap_is_never_priced_above_none(
    given_costs: dict[str, float], shared: bool, mode: str, on_device: bool
) -> None:
    of_parts = costs(**given_costs, on_device=on_device)
    base = Walk(MODES["base"], of_parts, shared=shared).step_ms()
    assert Walk(MODES[mode], of_parts, shared=shared).step_ms() <= base + 1e-6


@given(st.fixed_dictionaries(ANY_COSTS), st.sampled_from(PRICED))
def test_the_measured_mode_is_priced_as_measured(given_costs: dict[str, float], mode: str) -> None:
    of_parts = costs(**given_costs)
    took = Walk(MODES[mode], of_parts, shared=True).step_ms()
    [first, *_] = prices(MODES[mode], of_parts, [took])
    assert (first.name, first.ms) == (mode, pytest.approx(took))
    assert first.error_ms <= TOLD * took + 1e-6


#   ms     0       10       20       30       40
#   host   |forward |backward|backward|step    |
#   link        |ids 10 .............|grads 25 ...|    both end late, as if each had the link for long
def test_the_link_is_shared_by_bytes() -> None:
    host = [(Stage.DENSE_FORWARD, 0, 10), (Stage.BACKWARD, 10, 30), (Stage.OPTIMIZER_STEP, 30, 40)]
    spans = [Span(start, end, Category.DENSE, HOST_LANE, str(stage), stage, 3) for stage, start, end in host]
    flown = [
        (parts.IDS, Stage.INPUT_DATA_DIST, 5, 30, 1000),
        (parts.GRADIENTS, Stage.BACKWARD, 20, 35, 2000),
        ("all_reduce", Stage.BACKWARD, 20, 20, 7),
        (parts.IDS, Stage.INPUT_DATA_DIST, 40, 50, 9000),  # of the next step
    ]
    spans += [
        Span(start, end, Category.COMMUNICATION, "group", name, stage, 3, sent_bytes=sent)
        for name, stage, start, end, sent in flown
    ]
    found = costs_of(spans, (0, 40))
    assert {name: ms for name, ms in found.wire.items() if ms} == {parts.IDS: 10, parts.GRADIENTS: 20}
    assert (found.flight[parts.IDS], found.flight[parts.GRADIENTS]) == (25, 15)
    worked = (parts.AFTER_MERGE, parts.BEFORE_SENDING, parts.AFTER_SENDING, "optimizer_step")
    assert {part: ms for part, ms in found.work.items() if ms} == dict.fromkeys(worked, 10)
    uncounted = [replace(span, sent_bytes=0) for span in spans]
    assert costs_of(uncounted, (0, 40)).wire[parts.IDS] == 25


def test_tables_that_send_more_than_an_all_reduce_would_are_replicated() -> None:
    """Two ranks with a table of 10 columns each, 1000 samples: a rank sends 40 kB of embeddings and 40 kB of gradients.
    An all-reduce of 100 rows sends 4 kB, one of 100,000 rows 4 MB."""
    traffic = {Stage.EMBEDDING_LOOKUP: BusyTime(sent=40_000), Stage.BACKWARD: BusyTime(sent=40_000)}
    tables = [Bags("small", 100, 10, 1), Bags("large", 100_000, 10, 1)]
    found = with_replicas(tables, costs(all_to_all=40), traffic, 2)
    assert found is not None
    names, changed = found
    assert names == ["small"]
    assert (changed.wire[parts.EMBEDDINGS], changed.wire[parts.IDS]) == (20, 40)
    assert changed.work[parts.AFTER_SENDING] == pytest.approx(80 * 4 / 80)
    assert with_replicas(tables[1:], costs(), traffic, 2) is None
    halves = [replace(tables[0], num_columns=tables[0].num_columns // 2)] * 2  # column-wise, one on each rank
    assert with_replicas([*halves, *tables[1:]], costs(all_to_all=40), traffic, 2) == found
