"""The whole suite in several processes at once (pytest-xdist), all forked from one that has imported everything.

`python -m tests.support.side_by_side [ARGUMENTS OF PYTEST]` is `pytest -n 3 --dist worksteal [...]`, but that its
processes need no imports. Many tests wait, for other processes or for a delay, so there are more processes than CPUs.
Each begins with a part of the suite in its order, so that what tests share is made once; who is done takes half of
what another has left.
"""

from __future__ import annotations

import signal
import sys
from collections.abc import Iterable

from . import interpreters

NUM_PROCESSES = 3


def main(arguments: Iterable[str]) -> int:
    """Run the tests, and return pytest's exit code."""
    command = [sys.executable, "-m", "pytest", "--numprocesses", str(NUM_PROCESSES), "--dist", "worksteal"]
    # Of hydra's plugin, which asserts nothing.
    command += ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    with interpreters.Popen([*command, *arguments]) as process:
        before = signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for pytest, which then tells what it has
        try:
            return process.wait()
        finally:
            process.terminate()
            signal.signal(signal.SIGINT, before)


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
