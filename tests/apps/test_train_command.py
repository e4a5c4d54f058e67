"""`overlap-train` as a user meets it: a process in another folder."""

import contextlib
import csv
import io
import json
import os
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import yaml

from lightning_overlap.train import main

pytestmark = pytest.mark.slow

ROOT = Path(__file__).resolve().parents[2]
SMALL = ("experiment=smoke", "callbacks=none", "logger=none")

BROKEN = """
from lightning_overlap.data import SyntheticDataModule

class BrokenOnRankOne(SyntheticDataModule):
    def train_dataloader(self):
        for index, batch in enumerate(super().train_dataloader()):
            if self.rank == 1 and index == 5:
                raise OSError("the disk of rank 1 is gone")
            yield batch
"""


def environment(**more: str) -> dict[str, str]:
    launchers = ("RANK", "LOCAL_RANK", "WORLD_SIZE", "MASTER_ADDR")
    inherited = {name: value for name, value in os.environ.items() if name not in launchers}
    return inherited | {"PYTHONPATH": str(ROOT)} | more


def train(
    folder: Path,
    *arguments: str,
    module: str = "lightning_overlap.train",
    code: int = 0,
    **variables: str,
) -> subprocess.CompletedProcess[str]:
    """Run the command in `folder`; check its exit code, and that no rank outlives it."""
    done: subprocess.CompletedProcess[str] = subprocess.run(
        [sys.executable, "-m", module, *arguments],
        cwd=folder,
        env=environment(**variables),
        capture_output=True,
        text=True,
        timeout=300,
    )
    assert done.returncode == code, done.stderr
    assert not ranks_of(folder)
    return done


def ranks_of(folder: Path, command: int | None = None) -> list[int]:
    """Process ids of what runs in `folder`, but for the command itself: its ranks."""
    found = []
    for process in Path("/proc").glob("[0-9]*"):
        with contextlib.suppress(OSError):  # one that has ended
            if (process / "cwd").readlink() == folder and int(process.name) != command:
                found.append(int(process.name))
    return found


def wait_until(reached: Callable[[], bool]) -> None:
    deadline = time.monotonic() + 300  # the command and its ranks import what they need
    while not reached():
        assert time.monotonic() < deadline
        time.sleep(0.1)


def run_folder(folder: Path) -> Path:
    (config,) = folder.glob("outputs/*/*/config.yaml")
    return config.parent


def test_two_modes_side_by_side(tmp_path: Path) -> None:
    arguments = ("experiment=smoke", "compare=[base]", "data.batch_size=32", "sharding.tables.cat_1=column_wise")
    done = train(tmp_path, *arguments)
    assert "Epoch 0: 100%" in done.stdout + done.stderr  # the progress bar
    lines = [line.split() for line in done.stdout.splitlines()]
    assert ["mode", "base", "fused_sparse_dist"] in lines
    assert ["steps", "20", "20"] in lines
    assert "losses identical: yes" in done.stdout
    assert "\ntest_auc" in done.stdout
    assert "\npeak memory" in done.stdout
    folder = run_folder(tmp_path)
    assert len(list(folder.rglob("metrics.csv"))) == 2  # the loggers', one for each mode, and no other
    with open(folder / "steps.csv", encoding="utf-8") as file:
        steps = list(csv.DictReader(file))
    losses = {name: [row["loss"] for row in steps if row["mode"] == name] for name in ("base", "fused_sparse_dist")}
    assert losses["base"] == losses["fused_sparse_dist"]
    assert len(losses["base"]) == 20
    record = yaml.safe_load((folder / "config.yaml").read_text(encoding="utf-8"))
    assert (record["data"]["batch_size"], record["data"]["num_dense"], record["compare"]) == (32, 13, ["base"])
    assert 0 < summary_of(folder)["metrics"]["test_auc"] < 1


def test_a_sweep_trains_each_and_takes_data_parallel_tables(tmp_path: Path) -> None:
    done = train(
        tmp_path,
        "-m",
        *SMALL,
        "pipeline=base,semi_sync",
        "sharding=data_parallel",
        "trainer.max_steps=6",
        "trainer.devices=1",
    )
    folders = [path.parent for path in sorted(tmp_path.glob("multirun/*/*/*/summary.json"))]
    assert [summary_of(folder)["mode"] for folder in folders] == ["base", "semi_sync"]
    head, _, *rows = done.stdout[done.stdout.rindex("\nrun  ") :].splitlines()[1:5]
    assert " ".join(head.split()) == "run mode steps samples/s step median final loss losses metric"
    for row, pipeline in zip(rows, ("base", "semi_sync"), strict=True):
        assert row.split()[0] == f"pipeline={pipeline}"  # what all runs have in common is said once
        assert "test_auc" in row.split()
    assert f"\nall runs: {SMALL[0]} " in done.stdout


def test_a_checkpoint_is_saved_tested_and_gone_on_from_and_tensorboard_gets_what_is_logged(tmp_path: Path) -> None:
    arguments = ("experiment=smoke", "logger=none")
    train(tmp_path, "experiment=smoke", "logger=tensorboard", "callbacks=model_checkpoint", "hydra.run.dir=first")
    events = list((tmp_path / "first" / "logs").rglob("events.out.tfevents.*"))
    assert len(events) == 2  # of the fit and of the test, of rank 0 alone
    content = b"".join(path.read_bytes() for path in events)
    for tag in (b"overlap/step_ms", b"overlap/communication/hidden_ms", b"val_auc", b"test_auc"):
        assert tag in content, tag
    assert not list(tmp_path.rglob("metrics.csv"))
    [last] = (tmp_path / "first").rglob("last.ckpt")
    checkpoint = f"ckpt_path={last.relative_to(tmp_path)}"

    tested = train(tmp_path, *arguments, "callbacks=none", "hydra.run.dir=second", "task=test", checkpoint)
    aucs = [summary_of(tmp_path / run)["metrics"]["test_auc"] for run in ("first", "second")]
    assert aucs[0] == aucs[1]
    assert summary_of(tmp_path / "second")["num_steps"] == 0
    assert "\nsteps " in tested.stdout
    assert "step time" not in tested.stdout

    train(
        tmp_path,
        *arguments,
        "callbacks=none",
        "hydra.run.dir=third",
        "trainer.max_epochs=2",
        "trainer.devices=1",
        checkpoint,
    )
    assert summary_of(tmp_path / "third")["num_steps"] == 20  # of 40: the first epoch's are done


def summary_of(folder: Path) -> dict[str, Any]:
    modes: list[dict[str, Any]] = json.loads((folder / "summary.json").read_text(encoding="utf-8"))["modes"]
    return modes[-1]


WRONG: tuple[tuple[tuple[str, ...], int, str], ...] = (
    (("pipeline=async_lookup_3_deferred",), 2, "pipeline=async_lookup pipeline.staleness=3 pipeline.defer_update"),
    (("pipeline=fused_sparse_dst",), 2, "unknown pipeline 'fused_sparse_dst'. Did you mean 'fused_sparse_dist'"),
    (("sed=3",), 2, "unknown key 'sed'. Did you mean 'seed'"),
    (("pipline=base",), 2, "unknown key 'pipline'. Did you mean 'pipeline'"),
    (("hydra.rn.dir=here",), 2, "unknown key 'hydra.rn'. Did you mean 'hydra.run'"),
    (("+pipline=base",), 1, "Did you mean pipeline=...?"),
    (("experiment=adult_income", "data.path=../no/adult.gz"), 1, "FileNotFoundError: '../no/adult.gz' does not"),
    (SMALL, 1, "the run folder cannot be written. Start the command in a writable folder"),
)


def refusals(folder: Path) -> list[tuple[Any, str]]:
    """Call the command in this process, for each of `WRONG` in a folder of its own; return exit codes and stderr."""
    found = []
    for number, (arguments, _, _) in enumerate(WRONG):
        place = folder / str(number)
        place.mkdir()
        if arguments == SMALL:
            (place / "outputs").write_text("a file, as root may write any folder", encoding="utf-8")
        own = mock.patch.dict(os.environ, environment(), clear=True), mock.patch.object(sys, "argv", ["", *arguments])
        with own[0], own[1], contextlib.chdir(place), contextlib.redirect_stderr(io.StringIO()) as said:
            try:
                main()
            except SystemExit as end:
                found.append((end.code, said.getvalue()))
    return found


def test_what_is_wrong_is_said_without_a_traceback(get_ranks: Any, tmp_path: Path) -> None:
    ranks = get_ranks(1)
    [found] = ranks.run(refusals, tmp_path)
    ranks.close()  # the command has changed its process, by Hydra's logs for one
    for (arguments, code, words), (exit_code, said) in zip(WRONG, found, strict=True):
        assert (exit_code, said[:7]) == (code, "error: "), arguments
        assert words in said
        assert "Traceback" not in said


def test_a_process_of_the_command_says_nothing_else(tmp_path: Path) -> None:
    arguments, code, words = WRONG[1]
    said = train(tmp_path, *arguments, code=code).stderr
    assert said.startswith("error: ")
    assert words in said
    assert "Traceback" not in said


def test_a_rank_that_fails_ends_all_with_its_own_message(tmp_path: Path) -> None:
    (tmp_path / "conf" / "data").mkdir(parents=True)
    (tmp_path / "conf" / "data" / "broken.yaml").write_text("_target_: broken_data.BrokenOnRankOne\n", encoding="utf-8")
    (tmp_path / "broken_data.py").write_text(BROKEN, encoding="utf-8")
    done = train(
        tmp_path,
        *("--config-dir", "conf", "data=broken", "callbacks=none", "logger=none"),
        PYTHONPATH=os.pathsep.join([str(ROOT), str(tmp_path)]),
        code=1,
    )
    told, traceback = done.stderr.splitlines()[-2:]  # the first cause comes last
    assert told == "error: rank 1: OSError: the disk of rank 1 is gone"
    assert traceback.endswith("/errors/rank_1.txt")
    assert "ChildFailedError" not in done.stderr
    assert "OSError" in (run_folder(tmp_path) / "errors" / "rank_1.txt").read_text(encoding="utf-8")


@pytest.mark.parametrize(("signum", "exit_code"), [(signal.SIGTERM, 143), (signal.SIGKILL, -9)])
def test_a_command_that_is_stopped_leaves_no_rank(tmp_path: Path, signum: signal.Signals, exit_code: int) -> None:
    arguments = [sys.executable, "-m", "lightning_overlap.train", "data.num_batches=100000", "data.batch_size=16"]
    arguments += ["logger=none"]
    pipes = {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with subprocess.Popen(arguments, cwd=tmp_path, env=environment(), **pipes) as command:
        try:
            assert command.stderr is not None
            assert command.stdout is not None
            if signum == signal.SIGTERM:  # in the middle of an epoch
                wait_until(lambda: b"20/100000" in os.read(command.stdout.fileno(), 65536))
            else:  # while the ranks start
                wait_until(lambda: len(ranks_of(tmp_path, command.pid)) == 2)
            command.send_signal(signum)
            assert command.wait(timeout=30) == exit_code
            wait_until(lambda: not ranks_of(tmp_path))
            errors = command.stderr.read()
        finally:
            command.kill()
    assert (b"error: stopped by SIGTERM" in errors) == (signum == signal.SIGTERM)
