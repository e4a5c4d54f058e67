"""Several processes that share the files of tests are, to who started them, one run of pytest."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
import time
from pathlib import Path

import pytest

from . import interpreters
from .side_by_side import main

FIRST = """
import os, sys, time
def test_of_the_first_file(): assert {first}
"""
SECOND = """
import pytest, sys
def test_is_forked(): assert "torchrec" in sys.modules
def test_left_out(): pytest.skip("not here")
"""


def command(folder: Path) -> list[str]:
    return [str(folder), "--rootdir", str(folder), "-c", "/dev/null", "-p", "no:cacheprovider", "-p", "xdist.plugin"]


@pytest.mark.slow
@pytest.mark.parametrize(
    ("first", "code", "closing"),
    [
        ("True", 0, "2 passed, 1 skipped in"),
        ("False", 1, "1 failed, 1 passed, 1 skipped in"),
        ("os._exit(3)", 1, "1 failed, 1 passed, 1 skipped in"),
    ],
    ids=["all pass", "one fails", "one ends its process"],
)
def test_one_closing_line_and_one_exit_code(
    first: str,
    code: int,
    closing: str,
    tmp_path: Path,
    capfd: pytest.CaptureFixture[str],
    monkeypatch: pytest.MonkeyPatch,
) -> None:
    monkeypatch.setenv("PYTEST_DISABLE_PLUGIN_AUTOLOAD", "1")  # they take longer to import than all else here
    (tmp_path / "test_first.py").write_text(FIRST.format(first=first), encoding="utf-8")
    (tmp_path / "test_second.py").write_text(SECOND, encoding="utf-8")
    assert main(command(tmp_path)) == code
    assert capfd.readouterr().out.splitlines()[-1].strip("= ").startswith(closing)


@pytest.mark.slow
def test_ctrl_c_ends_all(tmp_path: Path) -> None:
    began = tmp_path / "began"
    slow = f"import pathlib, time\ndef test_slow(): pathlib.Path({str(began)!r}).touch(); time.sleep(100)"
    (tmp_path / "test_slow.py").write_text(slow, encoding="utf-8")
    program = [sys.executable, "-m", "tests.support.side_by_side", *command(tmp_path)]
    options = {"cwd": interpreters.ROOT, "start_new_session": True, "stdout": subprocess.PIPE, "text": True}
    variables = os.environ | {"PYTEST_DISABLE_PLUGIN_AUTOLOAD": "1"}
    before = signal.signal(signal.SIGINT, signal.default_int_handler)  # who starts tests in the background ignores it
    try:
        process = interpreters.Popen(program, env=variables, **options)
    finally:
        signal.signal(signal.SIGINT, before)
    with process:
        while not began.exists():
            time.sleep(0.02)
        os.killpg(process.pid, signal.SIGINT)
        told, _ = process.communicate(timeout=60)
    assert process.returncode == pytest.ExitCode.INTERRUPTED
    assert told.splitlines()[-1].strip("= ").startswith("no tests ran in")
    with pytest.raises(ProcessLookupError):
        os.killpg(process.pid, 0)
