"""What ranks of one terminal print that end with an error."""

import sys
from threading import Timer

import pytest
import torch.distributed as dist

from lightning_overlap.distributed import FirstCause, print_last


@pytest.fixture
def causes(monkeypatch: pytest.MonkeyPatch) -> list[FirstCause]:
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print(f"traceback of {error}", file=sys.stderr))
    store = dist.HashStore()
    return [FirstCause(store, rank, run=0) for rank in range(2)]


@pytest.mark.parametrize(
    ("error", "said"),
    [
        (
            RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer"),
            "rank 0: the update of batch 4 is missing in the tables\n",
        ),
        (KeyError("label"), "traceback of 'label'\n"),
    ],
    ids=["lost_another", "of_its_own"],
)
def test_a_rank_says_only_what_nobody_else_knows(
    causes: list[FirstCause], error: Exception, said: str, capfd: pytest.CaptureFixture[str]
) -> None:
    causes[1].note(ValueError("id 7 of table t"), "at dense_forward of batch 5")
    causes[0].note(error, "at backward of batch 5")
    causes[1].mark_printed()
    error.add_note("the update of batch 4 is missing in the tables")
    error.add_note("rank 0 was at backward of batch 5")
    print_last(error, causes[0])
    sys.excepthook(type(error), error, None)
    assert capfd.readouterr().err == said


def test_a_rank_that_lost_another_waits_for_its_cause(causes: list[FirstCause]) -> None:
    """gloo closes the connections of a rank at its timeout: the others may notice before it has said anything."""
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer")
    timeout = RuntimeError("[/gloo/transport/tcp/unbound_buffer.cc] Timed out waiting 3000ms for recv operation")
    later = Timer(0.3, causes[0].note, (timeout, "after batch 4, where it waits in strategy.barrier"))
    later.start()
    causes[1].note(lost, "after batch 4")
    later.join()
    assert causes[0].first == causes[1].first
    assert "rank 0 had failed after batch 4, where it waits in strategy.barrier" in lost.__notes__[-1]
    assert "rank 1 after batch 4" in timeout.__notes__[-1]
