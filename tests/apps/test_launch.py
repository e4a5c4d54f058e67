"""Which failure of several is told: the first cause, not what followed from it."""

from __future__ import annotations

import signal
from pathlib import Path
from types import SimpleNamespace

import pytest

from lightning_overlap.apps import launch


def _failures(**exit_codes: int) -> SimpleNamespace:
    return SimpleNamespace(
        failures={
            int(rank.removeprefix("rank")): SimpleNamespace(
                exitcode=code, signal_name=lambda code=code: signal.Signals(-code).name
            )
            for rank, code in exit_codes.items()
        }
    )


def _write(folder: Path, monkeypatch: pytest.MonkeyPatch, rank: int, error: BaseException) -> None:
    monkeypatch.setenv("RANK", str(rank))
    launch.write_failure(folder, error)


def test_an_error_beats_the_sigterm_that_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, monkeypatch, 1, OSError("the disk is gone"))
    told = launch._first_failure(tmp_path, _failures(rank0=-signal.SIGTERM, rank1=1))
    assert told.startswith("rank 1: OSError: the disk is gone\n")


def test_a_kill_beats_the_errors_that_followed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, monkeypatch, 0, RuntimeError("connection closed by peer"))
    told = launch._first_failure(tmp_path, _failures(rank0=1, rank1=-signal.SIGKILL))
    assert told == "rank 1: killed by SIGKILL"


def test_the_earlier_error_is_told(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    _write(tmp_path, monkeypatch, 1, ValueError("mine"))
    _write(tmp_path, monkeypatch, 0, RuntimeError("connection closed by peer"))
    assert launch._first_failure(tmp_path, _failures(rank0=1, rank1=1)).startswith("rank 1: ValueError: mine")


def test_a_run_that_was_only_terminated_says_so(tmp_path: Path) -> None:
    assert launch._first_failure(tmp_path, _failures(rank0=-signal.SIGTERM)) == "rank 0: killed by SIGTERM"
