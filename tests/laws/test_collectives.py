"""Law 5: one thread issues the collectives of training, in the same order on all ranks."""

import threading
from typing import Any

import pytest
import torch.distributed as dist

from lightning_overlap import MODES
from lightning_overlap.distributed import Issue, wrap_collectives

from ..support.cases import MIXED, Batches, Case, Model
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks


def issued(case: Case, pipeline: str) -> list[tuple[str, str, bool]]:
    """Return (function, group, whether the thread that trains has called it) of a fit's collectives, in order."""
    calls, trains = [], threading.get_ident()

    def note(name: str, call: dict[str, Any], issue: Issue) -> dist.Work | None:
        group = call.get("group") or dist.group.WORLD
        calls.append((name, group.group_desc, threading.get_ident() == trains))
        return issue()

    model = Model(case)
    with wrap_collectives(note):
        make_trainer(make_strategy(model, pipeline)).fit(model, datamodule=Batches(case, 6))
    return calls


@pytest.mark.parametrize("pipeline", MODES)
def test_the_thread_that_trains_issues_every_collective(two_ranks: Ranks, pipeline: str) -> None:
    first, second = two_ranks.run(issued, MIXED, pipeline)
    assert first == second
    assert {own for _, _, own in first} == {True}
    ahead = [name for name, group, _ in first if group == "lookahead"]
    assert set(ahead) == ({"all_to_all_single"} if pipeline != "base" else set())
    assert len(ahead) >= 6 or pipeline == "base"
