"""Break the package in the ways of `breaks.py`: the test of each has to fail. `make mutants`."""

import argparse
import os
import subprocess
import sys
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path

from ..support import BROKEN
from .breaks import BREAKS, Break

ROOT = Path(__file__).resolve().parents[2]
TIMEOUT_S = 300
FAILED, PASSED = 1, 0  # exit codes of pytest


def outcome(mutant: Break) -> str:
    """Run the test of a break under it; return "caught" if it fails, else what has come of it."""
    command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider", f"tests/{mutant.test}"]
    environment = os.environ | {"PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1", BROKEN: mutant.what}
    try:
        done = subprocess.run(command, cwd=ROOT, env=environment, capture_output=True, text=True, timeout=TIMEOUT_S)
    except subprocess.TimeoutExpired:
        return f"NO RESULT within {TIMEOUT_S} s"
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    if done.returncode == PASSED:
        return "NOT CAUGHT"
    # Python's own exit code after an error is 1, too: pytest may not have come to the test.
    return "caught" if done.returncode == FAILED and "1 failed" in str(last) else f"NOT RUN: {last}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Break the package in all of these ways, or those whose text contains a word, and return 0 if all are caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a word of those to try")
    args = parser.parse_args(arguments)
    missed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = {pool.submit(outcome, mutant): mutant for mutant in BREAKS.values() if args.only in mutant.what}
        for number, future in enumerate(as_completed(found), 1):
            mutant, result = found[future], future.result()
            line = f"law {mutant.law}: {mutant.what}: {result} ({mutant.test})"
            print(f"[{number}/{len(found)}] {line}", flush=True)
            if result != "caught":
                missed.append(line)
    print(*missed, f"{len(found) - len(missed)} of {len(found)} caught", sep="\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
