"""The whole suite as two pytest runs at once: most tests in rank processes, which wait a lot, and all others.

Both are forked from one process that has imported everything, as all that they fork in turn.

`python -m tests.support.side_by_side [ARGUMENTS OF PYTEST]` shows the first as it goes, then the second, then one
closing line for both. It fails if either does.
"""

from __future__ import annotations

import re
import subprocess
import sys
import tempfile
import time
from collections import Counter

from . import interpreters

WIDTH = 80
IN_SECOND_RUN = ("callbacks", "checkpoint", "testing")
"""Folders of `tests/` whose tests in rank processes are in the second run, so that both end at about the same time."""


def is_in_first_run(folder: str, *, ranks: bool) -> bool:
    """Whether a test is in the run with most tests in rank processes.

    Args:
        folder: Name of the folder that its file is in.
        ranks: Whether it has rank processes.
    """
    return ranks and folder not in IN_SECOND_RUN


def counts(closing_line: str) -> Counter[str]:
    """What pytest says that it has counted: `{"passed": 3, ...}`."""
    found = re.findall(r"(\d+) (passed|failed|skipped|errors?|deselected|xfailed|xpassed|warnings?)", closing_line)
    return Counter({word.removesuffix("s") if word in ("errors", "warnings") else word: int(n) for n, word in found})


def closing(lines: list[str], seconds: float) -> str:
    """The closing line of several runs that were one."""
    total: Counter[str] = sum((counts(line) for line in lines), Counter())
    del total["deselected"]  # each run leaves the other's tests out
    order = ["failed", "passed", "skipped", "xfailed", "xpassed", "warning", "error"]
    told = ", ".join(f"{total[word]} {word}" for word in order if total[word])
    clock = f"{int(seconds) // 3600}:{int(seconds) // 60 % 60:02}:{int(seconds) % 60:02}"
    return f" {told or 'no tests ran'} in {seconds:.2f}s ({clock}) ".center(WIDTH, "=")


def main(arguments: list[str]) -> int:
    """Run both, and return 0 if both passed."""
    began = time.monotonic()
    # Of hydra's plugin, which asserts nothing.
    own = ["-W", "ignore:Module already imported:pytest.PytestAssertRewriteWarning"]
    pytest = [sys.executable, "-m", "pytest", *own, *arguments]
    with tempfile.TemporaryFile("w+") as written:
        others = interpreters.Popen([*pytest, "-m", "not first_run"], stdout=written, stderr=subprocess.STDOUT)
        last = ""
        try:
            with interpreters.Popen([*pytest, "-m", "first_run"], stdout=subprocess.PIPE, text=True) as ranks:
                assert ranks.stdout is not None
                while part := ranks.stdout.read(1):  # the dots as they come
                    sys.stdout.write(part)
                    sys.stdout.flush()
                    last = "" if last.endswith("\n") else last
                    last += part
            code = others.wait()
        finally:
            others.terminate()  # Ctrl-C ends both
            others.wait()
        written.seek(0)
        text = written.read()
    print(text, end="")
    print(closing([last, text.rstrip().rpartition("\n")[2]], time.monotonic() - began))
    return ranks.returncode or code


if __name__ == "__main__":
    sys.exit(main(sys.argv[1:]))
