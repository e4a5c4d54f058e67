"""The code on the pages: its blocks, shell lines, and a run of a page's Python. Functions that ranks run."""

from __future__ import annotations

import os
import re
import shlex
import sys
import warnings
from collections.abc import Iterator
from dataclasses import dataclass
from pathlib import Path
from types import ModuleType
from typing import Any
from unittest import mock

import torch
from lightning.pytorch import Trainer

from ..profiling.test_command import steps, write
from ..support.cases import TABLE_WISE, Batches, Model, make_batch
from ..support.fits import QUIET

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


def commands(text: str) -> Iterator[list[str]]:
    """Yield the words of each command of a shell block, without comments."""
    for line in text.replace("\\\n", " ").splitlines():
        words = shlex.split(line, comments=True)
        while "&&" in words:
            yield words[: words.index("&&")]
            words = words[words.index("&&") + 1 :]
        if words:
            yield words


class NoMoreRequests(Exception):  # ends a page's endless loop
    pass


REPLACED = {  # places and times of a page that are not here
    "docs/deltas.md": {"s3://bucket/deltas": "deltas", "step=1000": "step=3"},
}


def run_python(page: str, folder: Path) -> list[str]:
    """Run a page's Python, block after block in one namespace, in a folder; return the names that it has made."""
    os.chdir(folder)
    write(folder, "rank0.json.gz", {0: steps()})
    names = _given()
    given = set(names)
    fits = mock.patch.object(Trainer, "__init__", _quiet(Trainer.__init__))
    kafka = mock.patch.dict(sys.modules, {"confluent_kafka": _anything("confluent_kafka")})
    with fits, kafka, warnings.catch_warnings():
        warnings.simplefilter("ignore")
        for block in blocks(ROOT / page):
            if block.language == "python":
                _run(block, names)
    return sorted(names.keys() - given - {"__builtins__"})


def _run(block: Block, names: dict[str, Any]) -> None:
    text = block.text
    for said, done in REPLACED.get(block.page, {}).items():
        text = text.replace(said, done)
    before = set(names)
    try:
        exec(compile(text, block.page, "exec"), names)
    except NoMoreRequests:
        names["has_served"] = True
    new = names.keys() - before
    if "trainer" in new:
        if "configure_optimizers" in names:  # the module has the page's
            kind = type("OfThePage", (Model,), {"configure_optimizers": names["configure_optimizers"]})
            names["module"] = kind(TABLE_WISE, fused_optimizer=False)
        names["trainer"].fit(names["module"], datamodule=names["datamodule"])
    for name in sorted(new):
        if name.startswith("test_"):
            names[name]()


def _given() -> dict[str, Any]:
    requests = iter(range(2))

    def next_request() -> Any:
        for number in requests:
            return make_batch(TABLE_WISE, number, 0)
        raise NoMoreRequests

    return {
        "torch": torch,
        "rank": 0,
        "module": Model(TABLE_WISE),
        "datamodule": Batches(TABLE_WISE, 3),
        "MyModule": lambda num_rows: Model(TABLE_WISE, fused_optimizer=False),
        "MyLightningModule": lambda table_device: Model(TABLE_WISE, fused_optimizer=False),
        "MyDataModule": lambda batch_size: Batches(TABLE_WISE, 12),
        "next_request": next_request,
    }


def _quiet(init: Any) -> Any:
    def quiet(self: Trainer, **kwargs: Any) -> None:
        devices = int(os.environ["LOCAL_WORLD_SIZE"])
        init(self, **{"max_epochs": 1, "accelerator": "cpu", "devices": devices, **QUIET, **kwargs})

    return quiet


def _anything(name: str) -> ModuleType:
    module = ModuleType(name)
    module.__getattr__ = lambda attribute: mock.MagicMock()  # type: ignore[method-assign]
    return module
