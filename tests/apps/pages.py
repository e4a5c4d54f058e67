"""The code on the pages: its blocks, shell lines, and a run of a page's Python. Functions that ranks run."""

import os
import re
import shlex
import subprocess
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Trainer

from lightning_overlap import OverlapEmbeddingStrategy

from ..profiling.test_command import steps, write
from ..support.cases import TABLE_WISE, Batches, Model, make_batch
from ..support.fits import QUIET, make_trainer

ROOT = Path(__file__).resolve().parents[2]
PAGES = [ROOT / "README.md", ROOT / "CONTRIBUTING.md", *sorted((ROOT / "docs").glob("*.md"))]
NOT_RUN = re.compile(r"<!-- not run: (?P<why>\S.*) -->\n\Z")  # before a block that cannot run here


@dataclass(frozen=True)
class Block:
    page: str  # from the repository's root
    language: str  # empty if the block has none
    text: str
    why_not_run: str | None  # the reason that the page gives


def blocks(path: Path) -> list[Block]:
    text = path.read_text(encoding="utf-8")
    found = []
    for match in re.finditer(r"^```(?P<language>\w*)\n(?P<text>.*?)^```$", text, flags=re.DOTALL | re.MULTILINE):
        marked = NOT_RUN.search(text[: match.start()])
        page = path.relative_to(ROOT).as_posix()
        found.append(Block(page, match["language"], match["text"], marked and marked["why"]))
    return found


def python_of(page: str) -> list[str]:
    return [block.text for block in blocks(ROOT / page) if block.language == "python"]


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield words


def run_program(folder: Path, *arguments: str) -> subprocess.CompletedProcess[str]:
    environment = os.environ | {"PYTHONPATH": f"{ROOT}{os.pathsep}{folder}", "OMP_NUM_THREADS": "1"}
    command = [sys.executable, *arguments]
    done: subprocess.CompletedProcess[str] = subprocess.run(
        command, cwd=folder, env=environment, capture_output=True, text=True, timeout=300
    )
    assert done.returncode == 0, done.stderr
    return done


# Places and times of a page that are not here.
REPLACED = {
    "docs/checkpoints.md": {"item_table": "t0"},
    "docs/deltas.md": {"s3://bucket/deltas": "deltas", "step=1000": "step=3"},
}


def run_python(page: str, folder: Path) -> list[str]:
    """Run a page's Python, block after block in one namespace, in a folder; return the names that it has made."""
    os.chdir(folder)
    write(folder, "rank0.json.gz", {0: steps()})
    names = _given()
    given = set(names)
    fits = mock.patch.object(Trainer, "__init__", _quiet(Trainer.__init__))
    kafka = mock.patch.dict(sys.modules, {"confluent_kafka": mock.MagicMock()})
    with fits, kafka, warnings.catch_warnings(action="ignore"):
        for block in blocks(ROOT / page):
            if block.language == "python" and block.why_not_run != "by Ray":
                _run(block, names)
    return sorted(names.keys() - given - {"__builtins__"})


def _run(block: Block, names: dict[str, Any]) -> None:
    text = block.text
    for said, done in REPLACED.get(block.page, {}).items():
        text = text.replace(said, done)
    before = set(names)
    try:
        exec(compile(text, block.page, "exec"), names)
    except StopIteration:  # no more requests
        names["has_served"] = True
    new = names.keys() - before
    if re.search("^def configure_optimizers", text, flags=re.MULTILINE):
        trainer = make_trainer(OverlapEmbeddingStrategy(sharding="table_wise"))
        trainer.fit(_with_optimizers_of(names), datamodule=Batches(TABLE_WISE, 3))
    if "trainer" in new:
        if "configure_optimizers" in names:  # the module has the page's
            names["module"] = _with_optimizers_of(names, fused_optimizer=False)
        names["trainer"].fit(names["module"], datamodule=names["datamodule"])
    for name in sorted(new):
        if name.startswith("test_"):
            names[name]()


def _given() -> dict[str, Any]:
    requests = iter([make_batch(TABLE_WISE, number, 0) for number in range(2)])
    return {
        "torch": torch,
        "rank": 0,
        "module": Model(TABLE_WISE),
        "datamodule": Batches(TABLE_WISE, 3),
        "MyModule": lambda num_rows: Model(TABLE_WISE, fused_optimizer=False),
        "MyLightningModule": lambda table_device: Model(TABLE_WISE, fused_optimizer=False),
        "MyDataModule": lambda batch_size: Batches(TABLE_WISE, 12),
        "next_request": lambda: next(requests),  # which ends a page's endless loop
    }


def _quiet(init: Any) -> Any:
    devices = int(os.environ["LOCAL_WORLD_SIZE"])
    options = {"max_epochs": 1, "accelerator": "cpu", "devices": devices, **QUIET}
    return lambda self, **kwargs: init(self, **{**options, **kwargs})


def _with_optimizers_of(names: dict[str, Any], **options: Any) -> Model:
    return type("OfThePage", (Model,), {"configure_optimizers": names["configure_optimizers"]})(TABLE_WISE, **options)
