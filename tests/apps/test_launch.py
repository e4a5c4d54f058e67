"""Which failure of several is told: the first cause, not what followed from it."""

import signal
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest

from lightning_overlap.apps import launch

LOST = RuntimeError("Connection closed by peer")


@pytest.mark.parametrize(
    ("written", "exit_codes", "first"),
    [
        ({1: OSError("the disk is gone")}, (-signal.SIGTERM, 1), "rank 1: OSError: the disk is gone\n"),
        ({0: LOST}, (1, -signal.SIGKILL), "rank 1: killed by SIGKILL"),
        ({0: LOST}, (1, -signal.SIGABRT), "rank 1: killed by SIGABRT"),
        ({0: ValueError("mine")}, (1, -signal.SIGABRT), "rank 0: ValueError: mine\n"),
        ({1: ValueError("mine"), 0: LOST}, (1, 1), "rank 1: ValueError: mine\n"),
        ({}, (-signal.SIGTERM,), "rank 0: killed by SIGTERM"),
    ],
    ids=[
        "error_beats_sigterm",
        "kill_beats_errors",
        "abort_beats_lost_peers",
        "error_beats_abort",
        "earlier_error",
        "only_terminated",
    ],
)
def test_the_first_cause_is_told(
    written: dict[int, Exception], exit_codes: tuple[int, ...], first: str, tmp_path: Path, monkeypatch: Any
) -> None:
    for rank, error in written.items():
        monkeypatch.setenv("RANK", str(rank))
        launch.write_failure(tmp_path, error)
    failures = {
        rank: SimpleNamespace(exitcode=code, signal_name=lambda code=code: signal.Signals(-code).name)
        for rank, code in enumerate(exit_codes)
    }
    told = launch._first_failure(tmp_path, SimpleNamespace(failures=failures))
    assert told.startswith(first) if first.endswith("\n") else told == first
