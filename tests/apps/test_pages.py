"""The code on every page runs as it stands there: Python in a rank, shell lines read by the program that they call."""

import importlib.util
import itertools
import json
import os
import pkgutil
import re
import shutil
import subprocess
import sys
import tomllib
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
from hydra._internal.core_plugins.basic_sweeper import BasicSweeper
from hydra.core.override_parser.overrides_parser import OverridesParser
from packaging.requirements import Requirement
from torch.distributed.run import get_args_parser

from lightning_overlap.apps import config_checks
from lightning_overlap.deltas.serving.command import _parser as replica_parser
from lightning_overlap.profiling.command import main as timeline

from ..profiling.test_command import steps, write
from ..support.ranks import free_port
from .pages import PAGES, ROOT, Block, blocks, commands
from .pages import run_python as run_python_of
from .test_conf import composed

OWN_PROJECT = ROOT / "examples" / "own_project"
CLUSTER = {  # shown whole on the page; tests/cluster runs them
    path.read_text(encoding="utf-8"): path.name
    for path in (ROOT / "examples" / "cluster").iterdir()
    if path.suffix in (".sh", ".sbatch", ".yaml") or path.name == "ray_train.py"
}
RUN_ELSEWHERE = {"README.md", "docs/quickstart.md"}  # by test_readme.py
BLOCKS = [block for page in PAGES for block in blocks(page)]
WITH_PYTHON = sorted({block.page for block in BLOCKS if block.language == "python"} - RUN_ELSEWHERE)
IN_SHELL = [block for block in BLOCKS if block.language == "bash" and not block.why_not_run]
SCRIPTS = [block for block in IN_SHELL if block.text.startswith("#!") and block.text not in CLUSTER]


def test_every_block_says_what_it_is() -> None:
    """```text for drawings and what a program says. Only these are not run, for the reason on the page."""
    assert {block.language for block in BLOCKS} == {"python", "bash", "text", "yaml"}
    assert {(block.page, block.why_not_run) for block in BLOCKS if block.why_not_run} == {
        ("docs/deltas_sinks.md", "by a broker"),  # made and looked at, below
        ("docs/clusters.md", "by Ray"),  # tests/cluster/test_ray.py does
    }


def test_the_page_shows_the_scripts_of_clusters_as_they_are() -> None:
    shown = [CLUSTER[block.text] for block in BLOCKS if block.page == "docs/clusters.md" and block.text in CLUSTER]
    assert sorted(shown) == sorted(CLUSTER.values())


CONFIGS = [block for block in BLOCKS if block.language == "yaml" and block.text not in CLUSTER]


@pytest.mark.parametrize("block", CONFIGS, ids=lambda block: block.page)
def test_a_config_is_that_of_the_example(block: Block) -> None:
    first, _, text = block.text.partition("\n")
    assert (OWN_PROJECT / first.removeprefix("# ")).read_text(encoding="utf-8") == text


@pytest.mark.parametrize("page", WITH_PYTHON)
def test_python_runs(page: str, get_ranks: Any, tmp_path: Path) -> None:
    num_ranks = 2 if "devices=2" in (ROOT / page).read_text(encoding="utf-8") else 1
    names = get_ranks(num_ranks).run(run_python_of, page, tmp_path)[0]
    assert names  # something was made
    if page == "docs/checkpoints.md":
        assert {"items-0.npy", "items-0.parquet"} <= {path.name for path in tmp_path.iterdir()}
    if page == "docs/deltas.md":
        assert {"has_served", "scores"} <= set(names)
        assert list((tmp_path / "deltas").glob("g000001-s000000000003-*"))
    if page == "docs/timeline.md":
        assert {"rank0.png", "spans.json.gz"} <= {path.name for path in tmp_path.iterdir()}


def _make(words: list[str], folder: Path) -> None:
    command = ["make", "--dry-run", f"PYTHON={sys.executable}", *words]  # a search for Python takes half a second
    subprocess.run(command, cwd=ROOT, check=True, capture_output=True)


def _pip(words: list[str], folder: Path) -> None:
    assert words[0] in ("install", "uninstall")
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    for option, word in itertools.pairwise(words):
        if option == "-r":
            assert (ROOT / word).is_file()
        elif option == "-e" or word.startswith("lightning_overlap["):
            assert set(Requirement(word.replace(".", "here", 1)).extras) <= project["optional-dependencies"].keys()


def _command(name: str) -> Callable[[list[str], Path], None]:
    def run(words: list[str], folder: Path) -> None:
        if "--config-dir" in words:
            place = words.index("--config-dir")
            words[place : place + 2] = [f"hydra.searchpath=[file://{OWN_PROJECT / words[place + 1]}]"]
        words = [word.replace("pkg://shop.configs", f"file://{OWN_PROJECT / 'configs'}") for word in words]
        overrides = [word for word in words if not word.startswith("-")]
        assert set(words) - set(overrides) <= {"-m", "--help"}
        for word in words:
            if word.startswith("ckpt_path="):  # a checkpoint that a reader has
                checkpoint = folder / word.removeprefix("ckpt_path=")
                checkpoint.parent.mkdir(parents=True, exist_ok=True)
                checkpoint.touch()
        jobs = [overrides]
        if "-m" in words:
            parsed = OverridesParser.create().parse_overrides(overrides)
            ((*jobs,),) = BasicSweeper.split_arguments(parsed, max_batch_size=None)
            assert len(jobs) > 1
        for job in jobs[:3]:
            config_checks.check(composed(*job, command=name))

    return run


def _timeline(words: list[str], folder: Path) -> None:
    for word in words:
        if word.endswith(".json.gz"):
            write(folder, word, {len(list(folder.iterdir())): steps()})
    assert timeline(words) == 0
    assert list(folder.rglob("*.png"))


def _python(words: list[str], folder: Path) -> None:
    if words[0] == "-m":
        assert importlib.util.find_spec(words[1])
        return
    text = (ROOT / words[0]).read_text(encoding="utf-8")
    assert all(f'"{word}"' in text for word in words[1:] if word.startswith("--"))


def _torchrun(words: list[str], folder: Path) -> None:
    options = get_args_parser().parse_args(words)
    if options.module:
        assert options.training_script == "lightning_overlap.train"
        _command("config")(options.training_script_args, folder)
    else:
        assert (ROOT / options.training_script).is_file()


def _curl(words: list[str], folder: Path) -> None:
    assert words[0] == "-d"
    assert json.loads(words[1]).keys() == {"table", "ids"}  # what tests/deltas sends to the server


PROGRAMS: dict[str, Callable[[list[str], Path], Any]] = {  # the readers of a line, in less than its minutes
    "make": _make,
    "pip": _pip,
    "overlap-train": _command("config"),
    "overlap-bench": _command("bench"),
    "overlap-timeline": _timeline,
    "overlap-replica": lambda words, folder: replica_parser().parse_args(words),
    "python": _python,
    "torchrun": _torchrun,
    "curl": _curl,
    "cp": lambda words, folder: shutil.copytree(ROOT / words[1], folder / words[2]),
    "cd": lambda words, folder: os.chdir(folder / words[0]),
    "export": lambda words, folder: None,
}


def test_each_command_is_installed_by_its_name() -> None:
    project = tomllib.loads((ROOT / "pyproject.toml").read_text(encoding="utf-8"))["project"]
    assert project["scripts"].keys() <= PROGRAMS.keys()
    assert all(callable(pkgutil.resolve_name(target)) for target in project["scripts"].values())


def _name(block: Block) -> str:
    return f"{block.page}: {block.text.splitlines()[0][:40]}"


@pytest.mark.parametrize("block", [block for block in IN_SHELL if not block.text.startswith("#!")], ids=_name)
def test_shell_lines_are_understood(block: Block, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.chdir(tmp_path)
    monkeypatch.syspath_prepend(OWN_PROJECT)
    for program, *words in commands(block.text):
        PROGRAMS[program](words, tmp_path)


STUBS = {
    "scontrol": 'echo 127.0.0.1; echo "another of $3"',
    # A task on each host of a job; here all are this one.
    "srun": 'pids=; for node in 0 1; do SLURM_NODEID=$node "$@" & pids="$pids $!"; done; '
    "for pid in $pids; do wait $pid || exit 1; done",
    "torchrun": f'exec {sys.executable} -m torch.distributed.run "$@"',
}


@pytest.mark.slow
@pytest.mark.parametrize("block", SCRIPTS, ids=_name)
def test_a_batch_script_trains_on_two_hosts(block: Block, tmp_path: Path) -> None:
    for name, text in STUBS.items():
        (tmp_path / name).write_text(f"#!/bin/sh\n{text}\n", encoding="utf-8")
        (tmp_path / name).chmod(0o755)
    (tmp_path / "job.sh").write_text(block.text.replace("29500", str(free_port())), encoding="utf-8")
    environment = {
        **{"PATH": f"{tmp_path}:{os.environ['PATH']}", "PYTHONPATH": str(ROOT), "OMP_NUM_THREADS": "1"},
        **{"SLURM_JOB_ID": "17", "SLURM_NNODES": "2", "SLURM_GPUS_ON_NODE": "1", "SLURM_JOB_NODELIST": "host[0-1]"},
    }
    done = subprocess.run(
        ["bash", str(tmp_path / "job.sh")], cwd=ROOT, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    [auc] = re.findall(r"validation AUC: (0\.\d+)", done.stdout)  # of the first rank
    assert float(auc) > 0.6
    for page in (block.page, "examples/torchrun/README.md"):
        assert "examples/torchrun/train.py" in (ROOT / page).read_text(encoding="utf-8")
