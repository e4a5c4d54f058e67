"""Law 6: whatever fails, in whatever stage, batch and rank, all ranks end, the first cause is read, nothing is left."""

from __future__ import annotations

import pytest

from lightning_overlap import MODES

from . import faults, reference
from .cases import MIXED
from .faults import NUM_BATCHES, Fault
from .ranks import Ranks

BATCHES = {"first": 0, "second": 1, "middle": NUM_BATCHES // 2, "last": NUM_BATCHES - 1}


def _check(two_ranks: Ranks, pipeline: str, injected: list[Fault]) -> None:
    """All ranks meet the faults: each reads its own, nothing is left, and a later fit is as if nothing had been."""
    plain = reference.train if MODES[pipeline].staleness == 0 else reference.train_delayed
    expected = two_ranks.run(plain, MIXED, num_steps=NUM_BATCHES)
    for (reports, actual), unharmed in zip(
        two_ranks.run(faults.fail_and_fit, pipeline, injected), expected, strict=True
    ):
        for fault, (said, left) in zip(injected, reports, strict=True):
            if fault.place == "worker":
                assert said.startswith("RuntimeError: DataLoader worker"), fault
                assert "exited unexpectedly" in said
            else:
                assert f"InjectedError: {fault}" in said, fault
                assert " hid " not in said, fault
            assert left == [], fault
        assert actual.differences(unharmed) == []


@pytest.mark.parametrize("which", BATCHES)
@pytest.mark.parametrize("pipeline", MODES)
def test_a_fault_in_a_stage_of_all_ranks(two_ranks: Ranks, pipeline: str, which: str) -> None:
    """Wherever a mode comes by in a batch; what it does not do for the first one yet, it does for a later one."""
    seen, _ = two_ranks.run(faults.places, pipeline)
    batch_of = {place: BATCHES[which] for place, batch in seen if batch == BATCHES[which]}
    if which == "first":
        batch_of |= {place: batch for place, batch in reversed(seen) if place not in batch_of}
    assert set(batch_of) == {place for place, _ in seen}
    assert set(batch_of) >= {f"issue {step.stage}" for step in MODES[pipeline]}
    _check(two_ranks, pipeline, [Fault(place, batch) for place, batch in batch_of.items()])


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist", "semi_sync"])
@pytest.mark.parametrize("whose", ["DATA", "HOOKS"])
def test_a_fault_of_the_user_on_all_ranks(two_ranks: Ranks, pipeline: str, whose: str) -> None:
    _check(two_ranks, pipeline, list(getattr(faults, whose)))
