"""A forked interpreter is, to its program and to who started it, as one that is started anew."""

import os
import signal
import subprocess
import sys
from pathlib import Path
from typing import Any

import pytest

from . import interpreters

PROGRAM = """
import atexit, os, sys, threading, time
atexit.register(lambda: print("left", flush=True))
print(sys.argv, sys.path[:3], os.getcwd(), os.environ.get("GIVEN"), os.environ.get("NOT_GIVEN"), sep="\\n")
print(__name__, sys.modules["__main__"].__dict__ is globals(), __spec__ and __spec__.name, "torch" in globals())
print(os.getppid(), os.getpgrp() == os.getpid())
class Last:
    def __del__(self):
        os.write(1, b"last")
last = Last()
def use():
    print(last)
threading.Thread(target=lambda: (time.sleep(0.1), print("thread"))).start()
exec(sys.argv[1])
"""


@pytest.mark.slow
@pytest.mark.parametrize(
    ("program", "new_session", "end"),
    [
        (["-m", "some.program"], True, "raise SystemExit(3)"),
        (["-m", "some.program"], False, "raise SystemExit('some words')"),
        (["some/program.py"], True, "1 / 0"),
        (["some/program.py"], False, "os.abort()"),
    ],
)
def test_a_program_finds_the_same_and_ends_the_same(
    program: list[str], new_session: bool, end: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "program.py").write_text(PROGRAM, encoding="utf-8")
    monkeypatch.setenv("NOT_GIVEN", "of this process")
    variables = {"GIVEN": "1", "PYTHONPATH": "/a/folder:/another", "PATH": os.environ["PATH"]}
    options: dict[str, Any] = {"cwd": tmp_path, "env": variables, "start_new_session": new_session, "timeout": 60}
    command = [sys.executable, "-u", *program, end]
    ways = subprocess.run, interpreters.run
    anew, forked = (run(command, capture_output=True, text=True, **options) for run in ways)
    assert (forked.returncode, forked.stdout) == (anew.returncode, anew.stdout)
    assert f"\n{os.getpid()} {new_session}\n" in forked.stdout
    assert forked.stderr.splitlines()[-1:] == anew.stderr.splitlines()[-1:]


STARTS = """
import json, os, subprocess, sys, time
if len(sys.argv) > 1:
    print(json.dumps([os.getppid(), os.getpgrp(), "torch" in sys.modules]), flush=True)
    time.sleep(60)
with subprocess.Popen([sys.executable, *sys.argv, "again"], stdout=subprocess.PIPE, text=True) as process:
    group, *told = os.getpid(), *json.loads(process.stdout.readline())
    print(told == [group, group, True], process.poll(), flush=True)
    process.terminate()
    print(process.wait(), flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_what_it_starts_is_forked_and_is_in_its_group(tmp_path: Path) -> None:
    script = tmp_path / "starts.py"
    script.write_text(STARTS, encoding="utf-8")
    command = [sys.executable, str(script)]
    with interpreters.Popen(command, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
        try:
            assert process.stdout is not None
            assert process.stdout.readline() == "True None\n"
            assert process.stdout.readline() == f"{-signal.SIGTERM}\n"
            with pytest.raises(subprocess.TimeoutExpired):
                process.wait(timeout=0.1)
        finally:
            os.killpg(process.pid, signal.SIGKILL)
        assert process.wait(timeout=30) == -signal.SIGKILL
        assert process.stdout.read() == ""
