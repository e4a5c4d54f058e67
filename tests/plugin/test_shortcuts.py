"""What a step leaves out of Lightning's has no effect: logged values, hooks and signatures are as under DDPStrategy."""

import ast
import functools
import inspect
import textwrap
from contextlib import ExitStack
from pathlib import Path
from typing import Any

import pytest
from lightning.pytorch import Trainer
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.result import _ResultMetric

from lightning_overlap.plugin import shortcuts

from ..support.ranks import Ranks
from . import logs

EARLY = "fused_sparse_dist"


@pytest.mark.smoke
def test_logged_values_are_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """By step and by epoch, reduced in every way, synchronized, metrics of all kinds, resumed in an epoch's middle."""
    expected, actual = (ranks.run(logs.logged_in_every_manner, p, str(tmp_path)) for p in (None, EARLY))
    for (shown, pages), (theirs, their_pages) in zip(actual, expected, strict=True):
        assert len(theirs) > 60
        assert {"both_epoch", "val_both_epoch", "synced_step", "b", "mean_epoch"} <= theirs[-2][1].keys()
        assert shown == theirs
        assert pages == their_pages


def test_values_are_moved_when_they_first_come(get_ranks: Any) -> None:
    [(num, steps)], [(quick, same)] = (get_ranks(1).run(logs.num_moves, p) for p in (None, EARLY))
    assert steps == same == logs.NUM_BATCHES
    assert num >= 2 * steps
    assert quick <= 4


def test_values_of_another_device_are_moved(monkeypatch: pytest.MonkeyPatch) -> None:
    expected = logs.moved_between_devices()
    monkeypatch.setattr(_ResultMetric, "to", shortcuts._to)
    where = logs.moved_between_devices()
    assert where == expected
    assert [set(one) for one in where] == [{"cpu"}, {"cpu"}, {"meta"}, {"meta"}]


@pytest.mark.smoke
def test_hooks_that_come_in_the_middle_of_a_run_are_called(get_ranks: Any) -> None:
    [expected], [actual] = (get_ranks(1).run(logs.hooks_that_come_late, p) for p in (None, EARLY))
    assert actual == expected
    assert len([name for name, _ in actual if name.startswith("profiler")]) > 10
    kinds = {"callback's instance", "in the same hook", "module's instance", "module's class", "strategy", "profiler"}
    assert {name.rsplit(" ", 1)[0] for name, _ in actual} == kinds


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_lightning_gets_everything_back(get_ranks: Any, fails: bool) -> None:
    assert get_ranks(1).run(logs.left_behind, fails) == [[]]


def test_a_librarys_wrapper_of_lightnings_function_is_put_back(monkeypatch: pytest.MonkeyPatch) -> None:
    wrapper = functools.wraps(call._call_strategy_hook)(lambda *args, **kwargs: None)
    monkeypatch.setattr(call, "_call_strategy_hook", wrapper)
    with ExitStack() as undo:
        shortcuts.install(Trainer(accelerator="cpu", logger=False), undo)
        assert call._call_strategy_hook is not wrapper
    assert call._call_strategy_hook is wrapper


@pytest.mark.smoke
def test_only_hooks_that_do_nothing_are_left_out() -> None:
    assert len(shortcuts._EMPTY_HOOKS) >= 2 * len(shortcuts._IN_EACH_STEP)
    for hook in shortcuts._EMPTY_HOOKS:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(hook))).body
        assert isinstance(function, ast.FunctionDef)
        [docstring, *rest] = function.body
        assert isinstance(docstring, ast.Expr)
        assert isinstance(docstring.value, ast.Constant)
        assert all(isinstance(one, ast.Pass) for one in rest), hook.__qualname__
