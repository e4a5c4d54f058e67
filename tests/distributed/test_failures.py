"""What ranks of one terminal print that end with an error."""

import itertools
import sys

import pytest
import torch.distributed as dist

from lightning_overlap.distributed import FirstCause, failures, tell_last


@pytest.fixture
def causes(monkeypatch: pytest.MonkeyPatch) -> list[FirstCause]:
    monkeypatch.setattr(failures, "_num_runs", itertools.repeat(0))
    monkeypatch.setattr(dist, "is_initialized", lambda: True)
    monkeypatch.setattr(dist, "get_world_size", lambda: 2)
    monkeypatch.setattr(sys, "excepthook", lambda kind, error, trace: print(f"traceback of {error}", file=sys.stderr))
    store = dist.HashStore()
    return [FirstCause(store, 0), FirstCause(store, 1)]


def _end(error: BaseException, cause: FirstCause) -> None:
    tell_last(error, cause)
    sys.excepthook(type(error), error, None)


def test_a_rank_that_lost_another_says_only_what_nobody_else_knows(
    causes: list[FirstCause], capfd: pytest.CaptureFixture[str]
) -> None:
    causes[1].note(ValueError("id 7 of table t"), "at dense_forward of batch 5")
    lost = RuntimeError("[/gloo/transport/tcp/pair.cc] Connection closed by peer")
    causes[0].note(lost, "at backward of batch 5")
    causes[1].told()
    lost.add_note("the update of batch 4 is missing in the tables")
    lost.add_note("rank 0 was at backward of batch 5")
    _end(lost, causes[0])
    assert capfd.readouterr().err == "rank 0: the update of batch 4 is missing in the tables\n"


def test_a_rank_with_an_error_of_its_own_says_it(causes: list[FirstCause], capfd: pytest.CaptureFixture[str]) -> None:
    causes[1].note(ValueError("id 7 of table t"), "at dense_forward of batch 5")
    own = KeyError("label")
    causes[0].note(own, "at dense_forward of batch 5")
    causes[1].told()
    _end(own, causes[0])
    assert capfd.readouterr().err == "traceback of 'label'\n"
