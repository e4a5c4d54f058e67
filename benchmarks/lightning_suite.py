"""Run Lightning's own tests with DDPStrategy and with OverlapEmbeddingStrategy, and compare test by test.

Given a checkout of Lightning's repository, of the installed version, each test file runs once per arm, in a process of
its own, in the same order and with the same seeds:

- `ddp`: `DDPStrategy` wherever the Trainer itself would choose the single CPU device;
- `overlap`: `OverlapEmbeddingStrategy` there, and under all names of `DDPStrategy` (`ddp`, `ddp_spawn`, ...);
- `lookahead` (with `--lookahead`): as `overlap`, and every module is trained by the lookahead loops, tables or not.

Strategy objects that a test makes itself stay as they are. With `--devices 2` these Trainers get two CPU devices, and
each test runs in processes of its own, which the strategy starts; it passes when it does on every rank.

    python benchmarks/lightning_suite.py --lightning ../lightning tests_pytorch/loops tests_pytorch/models/test_hooks.py
    python benchmarks/lightning_suite.py --lightning ../lightning --devices 2 tests_pytorch/loops/test_loops.py
"""

from __future__ import annotations

import argparse
import contextlib
import functools
import json
import os
import random
import signal
import subprocess
import sys
import tempfile
import time
from collections.abc import Iterable, Mapping
from concurrent.futures import ThreadPoolExecutor, as_completed
from dataclasses import asdict, dataclass
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch.plugins.environments import LightningEnvironment

ARM, DEVICES, REPORT = (f"LIGHTNING_SUITE_{name}" for name in ("ARM", "DEVICES", "REPORT"))
ARMS = ("ddp", "overlap", "lookahead")
REFERENCE = ARMS[0]

TRANSFERS = "the transfer hooks of coming batches run earlier; the other hooks are in the same order"
RESTORES = "weights and callbacks are restored after set-up, as with FSDPStrategy: only sharded tables can take shards"
REFUSED = "every module counts as one with tables in this arm, and tables cannot have it; the error says what can"
PLACES = "the fit loop's state says where a fit was, and batches of a validation that is repeated are counted once"

EXPECTED: Mapping[str, Mapping[str, str]] = {
    "overlap": {},
    "lookahead": {
        "test_hooks.py::test_trainer_model_hook_system_fit[": TRANSFERS,
        "test_hooks.py::test_trainer_model_hook_system_eval[": TRANSFERS,
        "test_hooks.py::test_trainer_model_hook_system_predict": TRANSFERS,
        "test_hooks.py::test_trainer_model_hook_system_fit_no_val_and_resume_max": RESTORES,
        "test_dataloaders.py::test_correct_dataloader_idx_in_hooks": TRANSFERS,
        "test_weight_averaging.py::": REFUSED,
        "test_trainer.py::test_predict_return_predictions_cpu[64-true": REFUSED,
        "test_loops.py::test_loop_state_on_exception": PLACES,
        "test_loops.py::test_fit_can_fail_during_validation": PLACES,
        "test_timer.py::test_timer_resume_training": RESTORES,
        "test_stochastic_weight_avg.py::test_swa_resume_training_from_checkpoint_custom_scheduler[3]": RESTORES,
    },
}
"""Tests that an arm changes by definition: a part of the test's id -> why."""

IGNORED = ("ignore:`isinstance(treespec, LeafSpec)` is deprecated:FutureWarning",)
"""Warnings of a torch newer than the checkout, which turns them into errors; Lightning itself causes them."""


@dataclass(frozen=True, slots=True)
class Result:
    """What became of one test in one arm."""

    outcome: str
    error: str = ""


class OneProcess(LightningEnvironment):
    """Starts nothing: Lightning's watch over child processes would keep each test waiting for 5 s."""

    creates_processes_externally = True


def main() -> int:
    """Run the arms, print what differs; 1 if a test passes with DDPStrategy only."""
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--lightning", type=Path, required=True, metavar="PATH", help="checkout of Lightning")
    parser.add_argument("--lookahead", action="store_true", help="a third arm: the lookahead loops for every module")
    parser.add_argument("--devices", type=int, default=1, help="CPU devices of Trainers that say nothing or 1")
    parser.add_argument("--jobs", type=int, default=1, help="processes at a time")
    parser.add_argument("--together", action="store_true", help="all files of an arm in one process: fewer imports")
    parser.add_argument("--file-timeout", type=float, default=1200, metavar="S", help="seconds per file and arm")
    parser.add_argument("--test-timeout", type=float, default=60, metavar="S", help="seconds per test")
    parser.add_argument("--json", type=Path, metavar="FILE", help="write every result there")
    parser.add_argument("-k", default="", metavar="EXPRESSION", help="as pytest's")
    parser.add_argument("tests", nargs="*", default=["tests_pytorch"], help="files, folders or ids below PATH/tests")
    options = parser.parse_args()
    arms = ARMS if options.lookahead else ARMS[:2]
    results = _run_arms(options, arms)
    if options.json:
        told = {arm: {test: asdict(result) for test, result in tests.items()} for arm, tests in results.items()}
        options.json.write_text(json.dumps(told, indent=1), encoding="utf-8")
    return int(sum(_compare(arm, results[REFERENCE], results[arm]) for arm in arms[1:]) > 0)


def _run_arms(options: argparse.Namespace, arms: Iterable[str]) -> dict[str, dict[str, Result]]:
    from tqdm import tqdm

    root = options.lightning.resolve() / "tests"
    files = _files(root, options.tests)
    if options.devices > 1:
        files = list(_run_files(options, root, files, REFERENCE, "--collect-only"))
    groups = [files] if options.together else [[file] for file in files]
    results: dict[str, dict[str, Result]] = {arm: {} for arm in arms}
    with ThreadPoolExecutor(options.jobs) as pool:
        turns = {pool.submit(_run_files, options, root, group, arm): arm for group in groups for arm in arms}
        for turn in tqdm(as_completed(turns), total=len(turns), unit="process"):
            results[turns[turn]] |= turn.result()
    return results


def _files(root: Path, selection: Iterable[str]) -> list[str]:
    """Return what each process is to run: the test files of a folder one by one, the rest as it was given."""
    files: list[str] = []
    for given in selection:
        path = root / given.partition("::")[0]
        if not path.exists():
            raise SystemExit(f"{path} does not exist: --lightning takes a checkout of Lightning, tests are below it.")
        found = sorted(str(file.relative_to(root)) for file in path.rglob("test_*.py"))
        files += found if path.is_dir() else [given]
    return files


def _run_files(
    options: argparse.Namespace, root: Path, files: list[str], arm: str, *arguments: str
) -> dict[str, Result]:
    here = Path(__file__).resolve().parent
    with tempfile.TemporaryDirectory() as folder:
        report = Path(folder) / "report.jsonl"
        environment = {
            **os.environ,
            ARM: arm,
            DEVICES: str(options.devices),
            REPORT: str(report),
            "PYTEST_DEBUG_TEMPROOT": folder,
            "PYTHONPATH": os.pathsep.join(map(str, (here, here.parent, root))),
            "PYTHONDONTWRITEBYTECODE": "1",
            "CUDA_VISIBLE_DEVICES": "",
            "OMP_NUM_THREADS": "1",
        }
        command = [sys.executable, "-m", "pytest", *(f"{root}/{file}" for file in files), f"--rootdir={root}", "-q"]
        command += ["-p", Path(__file__).stem, "-p", "no:cacheprovider", "--continue-on-collection-errors"]
        command += [f"--timeout={options.test_timeout}", *arguments]
        command += [f"-W{ignored}" for ignored in IGNORED]
        command += ["-k", options.k] if options.k else []
        log = Path(folder) / "log"
        with log.open("w") as output:
            process = subprocess.Popen(
                command, cwd=folder, env=environment, stdout=output, stderr=subprocess.STDOUT, start_new_session=True
            )
            try:
                ended = f"pytest ended with {process.wait(options.file_timeout)}"
                _wait_for_group(process.pid)
            except subprocess.TimeoutExpired:
                ended = f"no result within {options.file_timeout:g} s"
            finally:
                with contextlib.suppress(ProcessLookupError):
                    os.killpg(process.pid, signal.SIGKILL)
                process.wait()
        return _read(report, files[0], f"{ended}: {_last_line(log)}")


def _wait_for_group(group: int, timeout_s: float = 20) -> None:
    """Give the ranks that a test has started the time to write their reports."""
    deadline = time.monotonic() + timeout_s
    with contextlib.suppress(ProcessLookupError):
        while time.monotonic() < deadline:
            os.killpg(group, 0)
            time.sleep(0.1)


def _read(report: Path, file: str, ended: str) -> dict[str, Result]:
    """Put the reports of a file's ranks together: the first phase that did not pass decides about its test."""
    ranks = sorted(report.parent.glob(f"{report.name}*"))
    lines = [line for rank in ranks for line in rank.read_text(encoding="utf-8").splitlines()]
    results: dict[str, Result] = {}
    for line in lines:
        test, outcome, error = json.loads(line)
        if test not in results or results[test].outcome in ("passed", "collected"):
            results[test] = Result(outcome, error)
    if not results:
        return {file: Result("failed", ended)}
    missing = {test: Result("failed", ended) for test, result in results.items() if result.outcome == "collected"}
    return results | missing


def _last_line(log: Path) -> str:
    lines = log.read_text(encoding="utf-8", errors="replace").split("\n")
    return next((line.strip() for line in reversed(lines) if line.strip()), "no output")


def _compare(arm: str, reference: Mapping[str, Result], results: Mapping[str, Result]) -> int:
    """Print one arm beside the reference; return its number of findings."""
    kinds: dict[str, list[str]] = {
        kind: []
        for kind in ("passed in both", "failed in both", "skipped in both", "only with ours", "expected", "findings")
    }
    for test in reference | results:
        before, after = (arms.get(test, Result("failed", "not collected")) for arms in (reference, results))
        if before.outcome == after.outcome:
            kinds[f"{after.outcome} in both"].append(test)
        elif before.outcome == "passed":
            kinds["expected" if _why(arm, test) else "findings"].append(test)
        else:
            kinds["only with ours"].append(test)
    print(f"\n{arm}, beside {REFERENCE}: {len(reference)} tests")
    for kind, tests in kinds.items():
        print(f"  {kind:16s} {len(tests):5d}")
    for test in kinds["failed in both"]:
        print(f"failed in both: {test}\n    {reference[test].error}")
    for test in kinds["only with ours"]:
        print(f"only with ours: {test}\n    {reference[test].outcome}: {reference[test].error}")
    for test in kinds["expected"]:
        print(f"expected: {test}\n    {_why(arm, test)}")
    for test in kinds["findings"]:
        print(f"FINDING: {test}\n    {results[test].error if test in results else 'not collected'}")
    return len(kinds["findings"])


def _why(arm: str, test: str) -> str | None:
    return next((reason for part, reason in EXPECTED[arm].items() if part in test), None)


# -- inside pytest, where this file is a plugin -----------------------------------------------------------------


def pytest_configure(config: pytest.Config) -> None:
    """Put the arm's strategy in place."""
    arm = os.environ[ARM]
    from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry

    import lightning_overlap.plugin.strategy  # in every arm: importing it is not what is compared

    ours = lightning_overlap.plugin.strategy.OverlapEmbeddingStrategy
    if arm == "lookahead":
        lightning_overlap.tables.has_tables = lambda model: True
    if arm != REFERENCE:
        for entry in StrategyRegistry.values():
            if entry["strategy"] is DDPStrategy:
                entry["strategy"] = ours
    _replace_default(DDPStrategy if arm == REFERENCE else ours)


def _replace_default(strategy: Any) -> None:
    """Let the Trainer take `strategy` where it would have chosen a single CPU device itself."""
    from lightning.pytorch import Trainer
    from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator, MPSAccelerator

    def on_one_cpu(accelerator: Any = "auto", devices: Any = "auto", num_nodes: int = 1, **_: Any) -> bool:
        cpu = accelerator == "cpu" or isinstance(accelerator, CPUAccelerator)
        accelerated = CUDAAccelerator.is_available() or MPSAccelerator.is_available()
        return (cpu or (accelerator == "auto" and not accelerated)) and devices in ("auto", 1, "1") and num_nodes == 1

    devices = int(os.environ[DEVICES])
    init = Trainer.__init__

    @functools.wraps(init)
    def with_strategy(self: Trainer, *args: Any, **kwargs: Any) -> None:
        if not args and kwargs.get("strategy", "auto") == "auto" and on_one_cpu(**kwargs):
            alone = devices == 1 and not kwargs.get("plugins")
            kwargs |= {"strategy": strategy(cluster_environment=OneProcess() if alone else None), "devices": devices}
        init(self, *args, **kwargs)

    Trainer.__init__ = with_strategy  # type: ignore[method-assign]


@pytest.hookimpl(tryfirst=True)
def pytest_runtest_setup(item: pytest.Item) -> None:
    """Start every test from the same seeds."""
    import numpy as np
    import torch

    random.seed(0)
    np.random.seed(0)
    torch.manual_seed(0)


def pytest_collection_finish(session: pytest.Session) -> None:
    """Note what is going to run, so that a crash is seen as one."""
    for item in session.items:
        _note(item.nodeid, "collected")


def pytest_collectreport(report: pytest.CollectReport) -> None:
    """Note a file that cannot be imported."""
    if report.failed:
        _note(report.nodeid, "failed", report.longreprtext)


def pytest_runtest_logreport(report: pytest.TestReport) -> None:
    """Note each phase of each test as soon as it is over."""
    if report.when == "setup" and report.passed:
        return
    _note(report.nodeid, report.outcome, report.longreprtext if report.failed else "")


def _note(test: str, outcome: str, error: str = "") -> None:
    # Of a traceback, the first line that pytest marks as the error says most.
    marked = [line[1:].strip() for line in error.splitlines() if line.startswith("E ")]
    first = (marked or error.splitlines() or [""])[0]
    with Path(os.environ[REPORT] + os.environ.get("LOCAL_RANK", "")).open("a", encoding="utf-8") as file:
        file.write(json.dumps([test, outcome, first[:300]]) + "\n")


if __name__ == "__main__":
    sys.exit(main())
