"""docs/architecture.md, its picture and CONTRIBUTING's table of folders: they name what is there."""

import hashlib
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
from .test_docs import cells_of
from .test_folders import FLOOR, PACKAGE, ROOT

PAGE = ROOT / "docs" / "architecture.md"
PICTURE = ROOT / "docs" / "draw_architecture.py"
FILE = re.compile(r"(?<![\w/.])(?:[a-z_]+/)+(?:[a-z_]+\.py)?")


def names_in(cell: str) -> list[str]:
    return [name.rstrip("/").removesuffix(".py") for name in re.findall(r"`([\w./]+)`", cell)]


@pytest.mark.parametrize("path", [PAGE, PICTURE], ids=lambda path: path.name)
def test_the_files_it_names_exist(path: Path) -> None:
    named = set(FILE.findall(path.read_text(encoding="utf-8").replace("\\n", " ")))
    assert len(named) > 10
    assert not sorted(name for name in named if not ((PACKAGE / name).exists() or (ROOT / name).exists()))


@pytest.mark.parametrize(
    ("path", "head"),
    [(PAGE, ["floor", "folder or file", "what it is"]), (ROOT / "CONTRIBUTING.md", ["floor", "folders and files"])],
)
def test_its_floors_are_those_of_the_imports(path: Path, head: list[str]) -> None:
    assert {name: int(floor) for floor, names, *_ in cells_of(path, head) for name in names_in(names)} == FLOOR


def test_the_picture_was_drawn_after_the_last_change_of_its_script() -> None:
    """The script writes its own digest into the picture: run it again, and look at what it draws."""
    digest = hashlib.sha256(PICTURE.read_bytes()).hexdigest()
    assert digest.encode() in (PAGE.parent / "architecture.png").read_bytes()


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
    return [code.co_qualname for code in ours if code.co_qualname[0].isupper()]


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
