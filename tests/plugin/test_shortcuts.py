"""What a step leaves out of Lightning's has no effect: logged values, hooks and signatures are as under DDPStrategy."""

import ast
import inspect
import textwrap
from contextlib import suppress
from functools import partial
from pathlib import Path
from types import MethodType
from typing import Any
from unittest.mock import patch

import pytest
import torch
import torchmetrics
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import LambdaCallback, ModelCheckpoint
from lightning.pytorch.trainer import call
from lightning.pytorch.trainer.connectors.logger_connector.fx_validator import _FxValidator
from lightning.pytorch.utilities.exceptions import MisconfigurationException
from torch import Tensor
from torchmetrics import Metric

from lightning_overlap.plugin import shortcuts

from ..support.cases import TABLE_WISE, Batch, Batches, Model
from ..support.fits import make_trainer
from ..support.ranks import Ranks
from .test_features import Recorded, Setting, make_strategy, run


class Summed(Metric):
    """States of both kinds: a tensor and a list."""

    full_state_update = False

    def __init__(self) -> None:
        super().__init__()
        self.add_state("total", torch.tensor(0.0), dist_reduce_fx="sum")
        self.add_state("seen", [], dist_reduce_fx="cat")

    def update(self, value: Tensor) -> None:
        self.total = self.total + value.sum()
        self.seen.append(value.reshape(-1))

    def compute(self) -> Tensor:
        return self.total + torch.cat([part.reshape(-1) for part in self.seen]).max()  # synchronized, they are one


class Logs(Recorded):
    def __init__(self, fused: bool) -> None:
        super().__init__(fused)
        self.mean, self.summed = torchmetrics.MeanMetric(), Summed()
        self.extremes = torchmetrics.MinMaxMetric(torchmetrics.MeanMetric())  # one made of another
        self.several = torchmetrics.MetricCollection([torchmetrics.MaxMetric(), torchmetrics.MinMetric()])

    def _log(self, prefix: str, batch: Batch, loss: Tensor) -> None:
        super()._log(prefix, batch, loss)
        value = batch.dense.abs().mean()
        for metric in (self.mean, self.summed, self.extremes, self.several):
            metric.update(value)
        self.log(prefix + "at_step", value, on_step=True, on_epoch=False, prog_bar=True)
        self.log(prefix + "epoch", value, on_step=False, on_epoch=True)
        self.log(prefix + "graph", value.clone().requires_grad_() * 2, on_step=True, enable_graph=True)
        for name in ("min", "mean", "sum"):
            self.log(prefix + name, value, on_step=True, on_epoch=True, reduce_fx=name, sync_dist=True)
        self.log(prefix + "number", 3, on_step=True, on_epoch=True)
        self.log(prefix + "double", value.double(), on_step=True, on_epoch=True)
        self.log_dict({prefix + "a": value, prefix + "b": self.summed}, on_step=False, on_epoch=True)
        self.log_dict(self.several, on_step=True, on_epoch=True)
        self.log(prefix + "mean_metric", self.mean, on_step=True, on_epoch=True)
        if self.trainer.training:  # an attribute's name is looked for in the module itself
            self.extremes.compute()
        self.log(prefix + "smallest", self.extremes.min_val.clone(), on_step=True, on_epoch=True)

    def on_train_batch_end(self, *args: Any) -> None:
        self.log("at_batch_end", float(args[2]), on_step=True, on_epoch=True)
        super().on_train_batch_end(*args)

    def on_train_epoch_end(self) -> None:
        self.log("at_epoch_end", 1.5)
        super().on_train_epoch_end()


EVERY_MANNER = Setting(
    {"log_every_n_steps": 2, "val_check_interval": 3, "num_sanity_val_steps": 1},
    model=Logs,
    callbacks=(ModelCheckpoint(None, "{step}", every_n_train_steps=5, save_top_k=-1),),
    calls=("fit", "fit anew from step=10.ckpt"),  # in the middle of the second epoch
)


def logged_in_several_ways(pipeline: str | None) -> tuple[list[Any], int]:
    """Return after each batch what was logged, and how often Lightning checked it: from batch to batch it changes."""
    seen: list[Any] = []

    class Changes(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters() if pipeline is None else self.top.parameters(), 0.1)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            loss = super().training_step(batch, batch_idx)
            value = torch.tensor(1.0 + batch_idx, device="meta" if batch_idx > 5 else "cpu")
            self.log("moved", value, on_step=True, on_epoch=True, batch_size=2)
            self.log("in_two_hooks", torch.tensor(1.0 + batch_idx))
            self.log("mean", torch.tensor(1.0 + batch_idx), on_epoch=True, batch_size=1 + batch_idx)
            self.log("one_element", torch.full((1, 1), 1.0 + batch_idx))
            if batch_idx == 9:
                with pytest.raises(ValueError, match="must have a single element"):
                    self.log("mean", torch.ones(2), on_epoch=True, batch_size=1)
                with pytest.raises(MisconfigurationException, match="twice in `training_step`"):
                    self.log("mean", torch.ones(()), on_epoch=True, prog_bar=True, batch_size=1)
            return loss

        def on_train_batch_end(self, *args: Any) -> None:
            self.log("in_two_hooks", torch.tensor(2.0 + len(seen)))
            for metric in self.trainer._results.values():  # type: ignore[attr-defined]
                seen.append([str(getattr(metric, state)) for state in metric._defaults])

        def on_train_epoch_end(self) -> None:
            self.trainer._results.clear()  # type: ignore[attr-defined]  # no copy leads from the device "meta"
            self.trainer._logger_connector.reset_metrics()  # type: ignore[attr-defined]

    model = Changes(TABLE_WISE, fused_optimizer=pipeline is not None)
    check = _FxValidator.check_logging_and_get_default_levels
    with patch.object(_FxValidator, check.__name__, wraps=check) as checks:
        make_trainer(make_strategy(pipeline)).fit(model, datamodule=Batches(TABLE_WISE, 12))
    return seen, checks.call_count


def hooks_that_come_late(pipeline: str | None) -> list[tuple[str, int]]:
    """Return the calls of hooks that were not there when the fit began: from batch to batch, more things have some."""
    calls: list[tuple[str, int]] = []

    def note(name: str, module: LightningModule, batch_idx: int) -> Any:
        return lambda *args, **kwargs: calls.append((f"{name} {module._current_fx_name}", batch_idx))

    def meddle(trainer: Any, module: Any, batch: Batch, batch_idx: int) -> None:
        note_here = partial(note, module=module, batch_idx=batch_idx)
        if batch_idx == 1:
            late: Any = Callback()
            late.on_before_zero_grad = note_here("callback's instance")
            late.on_train_batch_start = note_here("in the same hook")
            trainer.callbacks.append(late)
        if batch_idx == 2:
            module.on_after_backward = MethodType(note_here("module's instance"), module)
        if batch_idx == 3:
            type(module).on_before_backward = note_here("module's class")
        if batch_idx == 4:
            trainer.strategy.on_train_batch_start = note_here("strategy")

    class Meddled(Model):
        def configure_optimizers(self) -> Any:
            return torch.optim.SGD(self.parameters() if pipeline is None else self.top.parameters(), 0.1)

        def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
            if batch_idx == 5:
                self.trainer.profiler.start = note("profiler", self, 5)  # type: ignore[attr-defined]
            if batch_idx == 6:  # a step of another signature, from the next batch on
                self.training_step = lambda batch: super(Meddled, self).training_step(batch, 7)  # type: ignore
            return super().training_step(batch, batch_idx)

    trainer = make_trainer(make_strategy(pipeline), callbacks=[LambdaCallback(on_train_batch_start=meddle)])
    trainer.fit(Meddled(TABLE_WISE, fused_optimizer=pipeline is not None), datamodule=Batches(TABLE_WISE, 9))
    # A lookahead fetches elsewhere in a step.
    fetches = ("profiler None", "profiler backward", "profiler batch_to_device")
    return [one for one in calls if one[0] not in fetches and "transfer" not in one[0]]


def _lightning() -> list[Any]:
    names = ("_call_callback_hooks", "_call_lightning_module_hook", "_call_strategy_hook")
    return [*(getattr(call, name) for name in names), LightningModule.log]


def left_behind(fails: bool) -> list[str]:
    """Return what is not Lightning's own after a fit, or after one that an error ended; and that it was not, within."""
    before, within = _lightning(), []

    def end(trainer: Trainer, module: LightningModule, outputs: Any, batch: Batch, batch_idx: int) -> None:
        within.extend(_lightning())
        if fails and batch_idx == 2:
            raise InterruptedError

    trainer = make_trainer(make_strategy("fused_sparse_dist"), callbacks=[LambdaCallback(on_train_batch_end=end)])
    with suppress(InterruptedError):
        trainer.fit(Model(TABLE_WISE), datamodule=Batches(TABLE_WISE, 4))
    assert not set(before) & set(within)
    return [one.__name__ for one in _lightning() if one not in before]


EARLY = "fused_sparse_dist"


@pytest.mark.smoke
def test_logged_values_are_the_same(ranks: Ranks, tmp_path: Path) -> None:
    """By step and by epoch, reduced in every way, synchronized, metrics of all kinds, resumed in an epoch's middle."""
    expected, actual = (ranks.run(run, p, EVERY_MANNER, f"{tmp_path}/{p}") for p in (None, EARLY))
    for mine, theirs in zip(actual, expected, strict=True):
        names = {name for entry in theirs.trace if isinstance(entry, dict) for name in entry}
        assert {"both_epoch", "validate_both_epoch", "sum_step", "b", "mean_metric_epoch", "at_batch_end_step"} <= names
        assert mine.trace == theirs.trace
        assert mine.logged == theirs.logged
        assert mine.losses == pytest.approx(theirs.losses, rel=1e-3, abs=1e-4)


def test_only_what_is_logged_as_before_is_not_checked_again(get_ranks: Any) -> None:
    """Values that come from another device, with other arguments or a wrong shape are treated as by Lightning."""
    [(expected, num_checks)], [(actual, num_left)] = (
        get_ranks(1).run(logged_in_several_ways, p) for p in (None, EARLY)
    )
    assert actual == expected
    assert num_checks - num_left > 20


@pytest.mark.smoke
def test_hooks_that_come_in_the_middle_of_a_run_are_called(get_ranks: Any) -> None:
    [expected], [actual] = (get_ranks(1).run(hooks_that_come_late, p) for p in (None, EARLY))
    assert actual == expected
    assert len([name for name, _ in actual if name.startswith("profiler")]) > 10
    kinds = {"callback's instance", "in the same hook", "module's instance", "module's class", "strategy", "profiler"}
    assert {name.rsplit(" ", 1)[0] for name, _ in actual} == kinds


@pytest.mark.parametrize("fails", [False, True], ids=["ends", "fails"])
def test_lightning_gets_everything_back(get_ranks: Any, fails: bool) -> None:
    assert get_ranks(1).run(left_behind, fails) == [[]]


@pytest.mark.smoke
def test_only_hooks_that_do_nothing_are_left_out() -> None:
    assert len(shortcuts._EMPTY_HOOKS) >= 2 * len(shortcuts._IN_EACH_STEP)
    for hook in shortcuts._EMPTY_HOOKS:
        [function] = ast.parse(textwrap.dedent(inspect.getsource(hook))).body
        assert isinstance(function, ast.FunctionDef)
        assert ast.get_docstring(function)
        assert all(isinstance(one, ast.Pass) for one in function.body[1:]), hook.__qualname__
