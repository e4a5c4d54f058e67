"""docs/architecture.md and its picture: the files that they name, the floors, and the walk of a step."""

import inspect
import re
from collections.abc import Callable
from contextlib import ExitStack
from pathlib import Path
from typing import Any
from unittest import mock

import pytest

from lightning_overlap.plugin.loops.batch_stream import BatchStream
from lightning_overlap.sparse import input_dist, module_flight
from lightning_overlap.sparse.module_flight import ModuleFlight
from lightning_overlap.sparse.present_step import PresentStep

from ..support.cases import TABLE_WISE, Batches, Model
from ..support.fits import make_strategy, make_trainer
from ..support.ranks import Ranks
from .test_folders import FLOOR, PACKAGE, ROOT

PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "draw_architecture.py"
FILE = re.compile(r"(?<![\w/.])(?:[a-z_]+/)+(?:[a-z_]+\.py)?")


def cells_of(path: Path, head: list[str]) -> list[list[str]]:
    """Return the rows of all tables of a page that have this head."""
    rows, inside = [], False
    for line in path.read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip().strip("|").split("|")] if line.startswith("|") else []
        inside = cells == head or (inside and bool(cells))
        if inside and cells != head and set(line) - set("|- "):
            rows.append(cells)
    return rows


def names_in(cell: str) -> list[str]:
    return [name.rstrip("/").removesuffix(".py") for name in re.findall(r"`([\w./]+)`", cell)]


@pytest.mark.parametrize("path", [PAGE, PICTURE], ids=lambda path: path.name)
def test_the_files_it_names_exist(path: Path) -> None:
    named = set(FILE.findall(path.read_text(encoding="utf-8").replace("\\n", " ")))
    assert len(named) > 10
    assert not sorted(name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists()))


def test_its_floors_are_those_of_the_imports() -> None:
    rows = cells_of(PAGE, ["floor", "folder or file", "what it is"])
    assert {name: int(floor) for floor, names, _ in rows for name in names_in(names)} == FLOOR


ENDS = (
    (BatchStream, "_stage"),  # a batch is taken from the loader, and copied,
    (input_dist, "InputSizes"),  # its sizes are sent,
    (input_dist, "PackedExchange"),  # and its ids;
    (PresentStep, "begin"),  # the step begins,
    (ModuleFlight, "serve"),  # the module is called,
    (module_flight, "wait_for"),  # its embeddings are used,
    # The tables are looked up for the next batch. (A sharded class keeps TorchRec's own method from its first fit on.)
    (module_flight, "updates_at_present_rate"),
)


def methods_on_the_stack() -> list[str]:
    frames = [info.frame for info in reversed(inspect.stack(0))]
    ours = [frame.f_code for frame in frames if frame.f_globals["__name__"].startswith("lightning_overlap.")]
    names = [code.co_qualname for code in ours if code.co_qualname[0].isupper()]
    return [name for name in names if not name.endswith("Launcher.launch")]  # around the whole run


def walk() -> list[str]:
    """Return which methods of the package are on the stack where the third step comes to one of `ENDS`."""
    model, methods = Model(TABLE_WISE), []
    trainer = make_trainer(make_strategy(model))

    def noting(own: Callable[..., Any]) -> Callable[..., Any]:
        def call(*args: Any, **kwargs: Any) -> Any:
            if trainer.fit_loop.batch_idx == 2:
                methods.extend(methods_on_the_stack())
            return own(*args, **kwargs)

        return call

    with ExitStack() as stack:
        for owner, name in ENDS:
            stack.enter_context(mock.patch.object(owner, name, noting(getattr(owner, name))))
        trainer.fit(model, datamodule=Batches(TABLE_WISE, 9))
    return list(dict.fromkeys(methods))


def test_a_step_comes_to_the_tables_and_back_through_the_methods_it_names(get_ranks: Callable[..., Ranks]) -> None:
    named = [re.findall(r"`([A-Z]\w+\.\w+)`", cells[1]) for cells in cells_of(PAGE, ["", "call", "what it does"])]
    methods, _ = get_ranks(2).run(walk)
    assert [name for names in named for name in names] == methods
