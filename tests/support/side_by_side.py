"""The whole suite as three pytest runs at once, which wait at different times: rank processes, programs, all others.

All are forked from one process that has imported everything, as all that they fork in turn.

`python -m tests.support.side_by_side [--quick] [ARGUMENTS OF PYTEST]` shows the first as it goes, then the others, then
one closing line for all. It fails if any does. `--quick`, two runs: the tests without rank processes that are not slow.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter
from contextlib import ExitStack
from pathlib import Path

from . import interpreters

TESTS = Path(__file__).resolve().parents[1]
WIDTH = 80
RUNS = ("first_run", "second_run", "third_run")
"""Their markers: most tests in rank processes; most that start programs; all others."""
RANKS_IN_OTHERS = {"sparse": RUNS[1]} | dict.fromkeys(
    ("callbacks", "checkpoint", "deltas", "profiling", "tables", "testing", "tuning"), RUNS[2]
)
"""Folders of `tests/` whose tests in rank processes are in another run, so that all end at about the same time."""
PROGRAMS = ("apps", "benchmarks", "house", "laws", "plugin", "support")
"""Folders of `tests/` whose tests, where they have no rank processes, mostly start programs."""
QUICK = "not ranks and not slow and not gpu"
LONGEST_OF_QUICK = ("tests/callbacks", "tests/deltas", "tests/testing")
"""Half of the time of the quick tests."""


def run_of(folder: str, *, ranks: bool) -> str:
    """Return the marker of the run that a test is in.

    Args:
        folder: Name of the folder that its file is in.
        ranks: Whether it has rank processes.
    """
    if ranks:
        return RANKS_IN_OTHERS.get(folder, RUNS[0])
    return RUNS[1] if folder in PROGRAMS else RUNS[2]


def counts(closing_line: str) -> Counter[str]:
    """What pytest says that it has counted: `{"passed": 3, ...}`."""
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed|xpassed|warnings?)", closing_line)
    return Counter({word.removesuffix("s") if word in ("errors", "warnings") else word: int(n) for n, word in found})


def closing(lines: list[str], seconds: float) -> str:
    """The closing line of several runs that were one."""
    total: Counter[str] = sum((counts(line) for line in lines), Counter())
    del total["deselected"]  # each run leaves the others' tests out
    order = ["failed", "passed", "skipped", "xfailed", "xpassed", "warning", "error"]
    told = ", ".join(f"{total[word]} {word}" for word in order if total[word])
    clock = f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
    return f" {told or 'no tests ran'} in {seconds:.2f}s ({clock}) ".center(WIDTH, "=")


def main(arguments: list[str]) -> int:
    """Run all, or the quick ones, and return 0 if all passed."""
    if "--quick" in arguments:
        quick = ["-m", QUICK, *(argument for argument in arguments if argument != "--quick")]
        return run_at_once([*quick, *LONGEST_OF_QUICK], [*quick, *(f"--ignore={path}" for path in LONGEST_OF_QUICK)])
    return run_at_once(*([*arguments, "-m", run, *_ignored(run)] for run in RUNS))


def _ignored(run: str) -> list[str]:
    """Arguments that leave out the folders without tests of a run, which pytest would read to deselect them all."""
    folders = sorted(path.parent.name for path in TESTS.glob("*/__init__.py"))
    mine = {folder for folder in folders for ranks in (False, True) if run_of(folder, ranks=ranks) == run}
    return [f"--ignore=tests/{folder}" for folder in folders if folder not in mine]


def run_at_once(*runs: list[str]) -> int:
    """Run pytest with each of these arguments, and return 0 if all passed."""
    began = time.monotonic()
    # Of hydra's plugin, which asserts nothing.
    own = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    pytest = [sys.executable, "-m", "pytest", *own]
    with ExitStack() as stack:
        others = []
        for run in runs[1:]:
            written = stack.enter_context(tempfile.TemporaryFile("w+"))
            process = interpreters.Popen([*pytest, *run], stdout=written, stderr=subprocess.STDOUT)
            stack.callback(process.wait)
            stack.callback(process.terminate)  # Ctrl-C ends all
            others.append((process, written))
        last = ""
        with interpreters.Popen([*pytest, *runs[0]], stdout=subprocess.PIPE, text=True) as first:
            assert first.stdout is not None
            while part := first.stdout.read(1):  # the dots as they come
                sys.stdout.write(part)
                sys.stdout.flush()
                last = "" if last.endswith("\n") else last
                last += part
        codes, lines = [first.returncode], [last]
        for process, written in others:
            codes.append(process.wait())
            written.seek(0)
            text = written.read()
            print(text, end="")
            lines.append(text.rstrip().rpartition("\n")[2])
    print(closing(lines, time.monotonic() - began))
    return max(map(abs, codes))


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
