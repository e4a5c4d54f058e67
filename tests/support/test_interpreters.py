"""A forked interpreter is, to its program and to who started it, as one that is started anew."""

import contextlib
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest

from . import interpreters

WAYS: list[Callable[..., Any]] = [subprocess.run, interpreters.run]
PROGRAM = """
import atexit, json, os, sys
atexit.register(lambda: print("left", flush=True))
said = sys.stdin.read()
print(json.dumps({
    "arguments": sys.argv,
    "first": sys.path[0],
    "paths": sys.path[1:3],
    "main": [__name__, sys.modules["__main__"].__dict__ is globals(), __spec__ and __spec__.name],
    "folder": os.getcwd(),
    "variables": [os.environ.get("GIVEN"), os.environ.get("NOT_GIVEN")],
    "parent": os.getppid(),
    "leads": os.getsid(0) == os.getpid(),
    "warnings": sys.warnoptions,
    "writes_no_bytecode": sys.dont_write_bytecode,
    "modules": "torch" in globals(),
    "said": said,
    "files": len(os.listdir("/proc/self/fd")),
}))
raise SystemExit(3)
"""


@pytest.mark.slow
@pytest.mark.parametrize("new_session", [True, False], ids=["session", "group"])
@pytest.mark.parametrize("kind", ["-c", "-m", "script"])
def test_a_program_finds_the_same(
    kind: str, new_session: bool, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    (tmp_path / "some").mkdir()
    (tmp_path / "some" / "program.py").write_text(PROGRAM, encoding="utf-8")
    arguments = {"-c": ["-c", PROGRAM], "-m": ["-m", "some.program"], "script": ["some/program.py"]}[kind]
    command = [sys.executable, "-u", "-B", "-W", "ignore", *arguments, "an", "--argument"]
    monkeypatch.setenv("NOT_GIVEN", "of this process")
    variables = {"GIVEN": "1", "PYTHONPATH": "/a/folder:/another", "PATH": os.environ["PATH"]}
    (tmp_path / "words").write_text("words", encoding="utf-8")
    done = []
    for run in WAYS:
        with (tmp_path / "words").open() as words:
            options = {"cwd": tmp_path, "env": variables, "start_new_session": new_session, "stdin": words}
            launches = {} if run is subprocess.run else {"launches": False}
            done.append(run(command, capture_output=True, text=True, timeout=60, **options, **launches))
    anew, forked = done
    first, last = forked.stdout.splitlines()
    assert json.loads(first) == json.loads(anew.stdout.splitlines()[0])
    assert json.loads(first)["parent"] == os.getpid()
    assert last == "left"
    assert (forked.returncode, forked.stderr) == (anew.returncode, anew.stderr) == (3, "")


THREAD = "import threading, time; threading.Thread(target=lambda: (time.sleep(0.1), print('thread'))).start()"
ENDS = [
    *("1 / 0", "import os, signal; os.kill(os.getpid(), signal.SIGINT)", "import os; os.abort()", "pass"),
    *("raise SystemExit(300)", "raise SystemExit(-1)", "raise SystemExit('some words')", "raise SystemExit"),
    f"{THREAD}; import atexit; atexit.register(print, 'end'); print('main'); 1 / 0",
    "import os; kept = os.fdopen(os.dup(1), 'w'); kept.write('words')",
    "import os\nclass Last:\n  def __del__(self): os.write(1, b'last')\nlast = Last()\ndef use(): print(last)",
    "import weakref\nclass Last: pass\nlast = Last()\nweakref.finalize(last, print, 'last')",
    "import sys; sys.stdout.close()",
]


@pytest.mark.slow
@pytest.mark.parametrize("end", ENDS)
def test_it_ends_the_same(end: str) -> None:
    anew, forked = (run([sys.executable, "-c", end], capture_output=True, timeout=60, text=True) for run in WAYS)
    assert (forked.returncode, forked.stdout) == (anew.returncode, anew.stdout)
    assert forked.stderr.splitlines()[-1:] == anew.stderr.splitlines()[-1:]


STARTS = """
import json, os, subprocess, sys, time
told = "import os, sys, time; print(os.getppid(), 'torch' in sys.modules, flush=True); time.sleep(60)"
again = [sys.executable, "-c", told]
with subprocess.Popen(again, stdout=subprocess.PIPE, text=True, start_new_session=True) as process:
    parent, forked = process.stdout.readline().split()
    print(json.dumps([int(parent) == os.getpid(), forked, process.pid]), flush=True)
    process.terminate()
    print(process.wait(), flush=True)
    time.sleep(60)
"""


@pytest.mark.slow
def test_what_it_starts_is_forked_and_is_its_child() -> None:
    with interpreters.Popen([sys.executable, "-c", STARTS], stdout=subprocess.PIPE, text=True) as process:
        try:
            assert process.stdout is not None
            is_child, has_torch, child = json.loads(process.stdout.readline())
            assert (is_child, has_torch) == (True, "True")
            assert process.stdout.readline() == f"{-signal.SIGTERM}\n"
            assert not Path(f"/proc/{child}").exists()
            helpers = _children(process.pid)
            assert len(helpers) == 1  # the server of what it starts
        finally:
            process.kill()
        assert process.wait(timeout=30) == -signal.SIGKILL
        deadline = time.monotonic() + 30
        while any(_runs(helper) for helper in helpers):
            assert time.monotonic() < deadline
            time.sleep(0.02)
        assert process.stdout.read() == ""


def _children(process: int) -> list[int]:
    return [int(child) for child in Path(f"/proc/{process}/task/{process}/children").read_text().split()]


def _runs(process: int) -> bool:
    with contextlib.suppress(FileNotFoundError):
        return ") Z " not in Path(f"/proc/{process}/stat").read_text()
    return False
