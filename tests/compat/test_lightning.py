"""What Lightning's private names have to mean. Each test runs Lightning itself, without this package's strategy."""

import os
import queue
import shutil
import signal
import sys
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from pathlib import Path
from typing import Any
from unittest import mock

import pytest
import torch
from lightning.fabric.plugins.environments import LightningEnvironment
from lightning.fabric.plugins.environments.slurm import SLURMEnvironment
from lightning.pytorch import Callback, Trainer
from lightning.pytorch.callbacks import BasePredictionWriter, ModelCheckpoint, ModelPruning
from lightning.pytorch.demos.boring_classes import BoringModel
from lightning.pytorch.loggers import MLFlowLogger, WandbLogger
from lightning.pytorch.loggers.logger import DummyLogger
from lightning.pytorch.loggers.utilities import _scan_checkpoints
from lightning.pytorch.loops.fetchers import _PrefetchDataFetcher
from lightning.pytorch.loops.fit_loop import _FitLoop
from lightning.pytorch.plugins.layer_sync import TorchSyncBatchNorm
from lightning.pytorch.profilers import SimpleProfiler
from lightning.pytorch.utilities import CombinedLoader
from torch import Tensor, nn
from torch.utils.data import DataLoader

from lightning_overlap.compat import lightning
from lightning_overlap.plugin.loops.stand_in import stand_in

from .meanings import Meanings

pytestmark = pytest.mark.smoke
meanings = Meanings()


@pytest.fixture(autouse=True)
def no_launcher(monkeypatch: pytest.MonkeyPatch) -> None:
    """Trainers of these tests start by themselves, whatever a rank of an earlier test has left."""
    for name in ("TORCHELASTIC_RUN_ID", "RANK", "LOCAL_RANK", "GROUP_RANK", "WORLD_SIZE", "LOCAL_WORLD_SIZE"):
        monkeypatch.delenv(name, raising=False)


@pytest.fixture
def undo() -> Iterator[ExitStack]:
    with ExitStack() as stack:
        yield stack


class Model(BoringModel):
    """Writes down the hooks that it gets."""

    def __init__(self, hook: Callable[[Any], None] | None = None) -> None:
        super().__init__()
        self.seen: list[Any] = []
        self._hook = hook or (lambda model: None)

    def train_dataloader(self) -> Any:
        return DataLoader(torch.arange(4 * 32.0).view(4, 1, 32), batch_size=None)

    val_dataloader = test_dataloader = train_dataloader

    def predict_dataloader(self) -> Any:
        return DataLoader(torch.arange(4 * 32.0).view(4, 32))

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self._hook(self)


def make_trainer(**kwargs: Any) -> Trainer:
    off = dict.fromkeys(("logger", "enable_checkpointing", "enable_progress_bar", "enable_model_summary"), False)
    return Trainer(accelerator="cpu", devices=1, **{**off, "max_epochs": 2, "num_sanity_val_steps": 0, **kwargs})


class Staged(lightning.StagedFetcher):
    """Gives a loop each batch together with a word."""

    def __iter__(self) -> "Staged":
        iter(self.inner)
        return self

    def __next__(self) -> Any:
        self.batch, self.batch_idx, self.dataloader_idx = next(self.inner)
        self.done = self.inner.done
        return "staged", self.batch


class StagesInFit(lightning.FitLoop):
    def setup_data(self) -> None:
        super().setup_data()
        if lightning.gives_batches(self.fetcher):
            assert self.fetcher is not None
            self.fetcher = Staged(self.fetcher)
        assert not lightning.takes_iterator(self.fetcher), "Lightning calls this before each epoch"


class TakesStaged(Model):
    def training_step(self, staged: Any) -> Any:
        word, batch = staged
        self.seen.append((word, batch[0, 0].item()))
        return super().training_step(batch, 0)

    def predict_step(self, staged: Any) -> Any:
        return staged[1]

    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        self.seen.append((batch_idx, batch[0, 0].item()))

    def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
        raise AssertionError("a staged batch is not transferred")


@meanings.of(
    *("_FitLoop._data_fetcher", "_FitLoop.setup_data"),
    *(f"_DataLoaderIterDataFetcher.{name}" for name in ("_batch", "_batch_idx", "_start_profiler", "_stop_profiler")),
)
def test_a_fit_takes_staged_batches(undo: ExitStack) -> None:
    """The step gets what `next` returns, other hooks the batch; nothing is transferred; profilers time the fetching."""
    profiler, model = SimpleProfiler(), TakesStaged()
    trainer = make_trainer(max_epochs=1, limit_val_batches=0, profiler=profiler)
    stand_in(trainer, "fit_loop", StagesInFit, undo)
    trainer.fit(model)
    assert model.seen == [seen for idx in range(4) for seen in ((idx, 32.0 * idx), ("staged", 32.0 * idx))]
    assert len(profiler.recorded_durations["[_TrainingEpochLoop].train_dataloader_next"]) == 4


@pytest.mark.filterwarnings("ignore:.*`dataloader_iter`")
def test_a_module_that_takes_dataloader_iter_is_known(undo: ExitStack) -> None:
    class Iterates(Model):
        def training_step(self, dataloader_iter: Any) -> Any:
            batch, *_ = next(dataloader_iter)
            fetcher = self.trainer.fit_loop._data_fetcher
            self.seen.append((lightning.gives_batches(fetcher), lightning.takes_iterator(fetcher)))
            return super().training_step(batch, 0)

    model = Iterates()
    make_trainer(max_epochs=1, limit_val_batches=0).fit(model)
    assert set(model.seen) == {(False, True)}
    assert not lightning.takes_iterator(None), "of a fit without batches"


@meanings.of("_FitLoop._combined_loader", "_FitLoop._load_combined_loader_states", "_FitLoop._should_reload_train_dl")
@pytest.mark.parametrize("every", [0, 1])
def test_when_loaders_are_made(undo: ExitStack, every: int) -> None:
    """Each epoch asks for loaders; states are loaded into new ones, before they are iterated for the first time."""
    seen: list[str] = []

    class Looks(lightning.FitLoop):
        def setup_data(self) -> None:
            seen.append("anew" if self.makes_loaders_anew else "ask")
            super().setup_data()

        def load_loader_states(self) -> None:
            if self.fetcher is not None:
                assert self.fetcher.combined_loader.flattened is not self.loaders
            assert [type(loader) for loader in self.loaders] == [DataLoader]
            super().load_loader_states()
            seen.append("states")

        @contextmanager
        def making_iterator(self) -> Iterator[None]:
            yield
            assert self.fetcher is not None
            assert self.fetcher.iterator is not None
            seen.append("iterator")

    class Asks(Model):
        def on_train_end(self) -> None:
            if not every:
                self.trainer.fit_loop.setup_data()
                loop.forget_loaders()
                loop.setup_data()

    trainer = make_trainer(max_epochs=2, limit_val_batches=0, reload_dataloaders_every_n_epochs=every)
    stand_in(trainer, "fit_loop", Looks, undo)
    loop: Any = trainer.fit_loop
    trainer.fit(Asks())
    # Lightning's loop makes another iterator at the start of the second epoch.
    if every:  # before the first epoch, which asks again, and before the second
        assert seen == ["anew", "states", "iterator", "ask", "anew", "states", "iterator", "iterator"]
    else:
        assert seen == ["ask", "states", "iterator", "ask", "ask", "iterator", "ask", "ask", "states", "iterator"]


@meanings.of("_FitLoop._results", "_TrainingEpochLoop._results")
def test_results_are_lightnings(undo: ExitStack) -> None:
    seen: list[bool] = []

    class Logs(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            same(self)

    def same(model: Any) -> None:
        loop = model.trainer.fit_loop
        seen.append(loop._results is _FitLoop._results.fget(loop))  # type: ignore[attr-defined]

    trainer = make_trainer()
    stand_in(trainer, "fit_loop", lightning.FitLoop, undo)
    trainer.fit(Logs(same))
    assert seen == [True] * 16


def test_a_logged_value_is_moved_once_and_is_lightnings(undo: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    moved: list[str] = []
    own = lightning._ResultMetric.to

    def to(metric: Any, *args: Any) -> Any:
        moved.append(metric.meta.name)
        return own(metric, *args)

    monkeypatch.setattr(lightning._ResultMetric, "to", to)

    class Logs(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("mean", batch.mean(), on_step=True, on_epoch=True)
            self.log("max", batch.max(), on_step=False, on_epoch=True, reduce_fx="max")
            self.log("number", 3.0)
            return super().training_step(batch, batch_idx)

    at_end = []
    for in_place in (False, True):
        trainer = make_trainer(max_epochs=2)
        if in_place:
            stand_in(trainer.fit_loop, "epoch_loop", lightning.EpochLoop, undo)
            trainer.fit_loop.epoch_loop.log_in_place()  # type: ignore[attr-defined]
            moved.clear()
        trainer.fit(Logs())
        at_end.append({name: value.item() for name, value in trainer.callback_metrics.items()})
        assert len(moved) == (0 if in_place else 27)  # three names in each of eight steps, and at the end
    assert at_end[0] == at_end[1]
    assert at_end[0].keys() == {"mean", "mean_step", "mean_epoch", "max", "number"}
    # From another device, the first time.
    metric = lightning._PlacedMetric(next(iter(trainer.fit_loop.epoch_loop._results.values())).meta, is_tensor=True)
    assert metric.to(torch.device("meta")).value.device.type == "meta"


@meanings.of("_TrainingEpochLoop._should_check_val_fx")
@pytest.mark.parametrize("validates", [True, False])
def test_a_loop_decides_when_to_validate(undo: ExitStack, validates: bool) -> None:
    asked: list[Any] = []

    class Decides(lightning.EpochLoop):
        def validates_after(self, fetcher: Any) -> bool:
            asked.append((self.batch_idx, super().validates_after(fetcher)))
            return validates

    class Counts(Model):
        def on_validation_start(self) -> None:
            self.seen.append("validation")

    trainer, model = make_trainer(max_epochs=1), Counts()
    stand_in(trainer.fit_loop, "epoch_loop", Decides, undo)
    trainer.fit(model)
    assert asked == [(0, False), (1, False), (2, False), (3, True)]
    assert model.seen == ["validation"] * (4 * validates)


@meanings.of("_TrainingEpochLoop.advance", "_TrainingEpochLoop.on_advance_end", "_TrainingEpochLoop._is_training_done")
def test_a_loop_advances_batch_by_batch(undo: ExitStack) -> None:
    seen: list[Any] = []

    class Looks(lightning.EpochLoop):
        def advance(self, fetcher: Any) -> None:
            super().advance(fetcher)
            seen.append(("advance", self.batch_idx))

        def on_advance_end(self, fetcher: Any) -> None:
            super().on_advance_end(fetcher)
            seen.append(("end", self.batch_idx, self.ends))

    trainer = make_trainer(max_epochs=1, limit_val_batches=0)
    stand_in(trainer.fit_loop, "epoch_loop", Looks, undo)
    trainer.fit(Model())
    assert seen == [one for idx in range(4) for one in (("advance", idx), ("end", idx, idx == 3))]


@meanings.of("_TrainingEpochLoop._num_ready_batches_reached")
def test_the_last_batch_of_an_epoch_is_known(undo: ExitStack) -> None:
    seen: list[bool] = []

    class Looks(Model):
        def on_train_batch_end(self, *_: Any) -> None:
            seen.append(self.trainer.fit_loop.epoch_loop.epoch_is_over)

    trainer = make_trainer(max_epochs=1, limit_val_batches=0, limit_train_batches=3)
    stand_in(trainer.fit_loop, "epoch_loop", lightning.EpochLoop, undo)
    trainer.fit(Looks())
    assert seen == [False, False, True]


def test_loops_are_told_whether_they_continue() -> None:
    """With `max_steps` the fit loop's own setter says that every fit continues."""
    trainer = make_trainer(max_steps=3)
    epoch_loop = trainer.fit_loop.epoch_loop
    trainer.fit_loop.restarting = False
    assert trainer.fit_loop.restarting
    for restarting in (False, True):
        lightning.set_restarting(trainer.fit_loop, restarting)
        assert [loop.restarting for loop in (trainer.fit_loop, epoch_loop, epoch_loop.val_loop)] == [restarting] * 3


@meanings.of("_EvaluationLoop._on_evaluation_end")
def test_the_end_of_a_validation(undo: ExitStack) -> None:
    """All that is left are the hooks of its end, callbacks' first."""
    seen: list[Any] = []

    class Ends(lightning.EvaluationLoop):
        def before_end_hooks(self) -> None:
            seen.append(self.trainer.callback_metrics["x"].item())

    class Logs(Model):
        def validation_step(self, batch: Any, batch_idx: int) -> None:
            self.log("x", float(batch_idx))

        def on_validation_epoch_end(self) -> None:
            seen.append("epoch end")

    class Looks(Callback):
        def on_validation_end(self, *_: Any) -> None:
            seen.append("end")

    trainer = make_trainer(max_epochs=1, callbacks=[Looks()])
    stand_in(trainer.fit_loop.epoch_loop, "val_loop", Ends, undo)
    trainer.fit(Logs())
    assert seen == ["epoch end", 1.5, "end"]


@meanings.of("_PredictionLoop._on_predict_end")
def test_the_end_of_predictions(undo: ExitStack) -> None:
    """All that is left are the hooks of their end, callbacks' first."""
    seen: list[str] = []

    class Ends(lightning.PredictionLoop):
        def before_end_hooks(self) -> None:
            seen.append("before")

    class Looks(Callback):
        def on_predict_epoch_end(self, *_: Any) -> None:
            seen.append("epoch end")

        def on_predict_end(self, *_: Any) -> None:
            seen.append("end")

    trainer = make_trainer(callbacks=[Looks()])
    stand_in(trainer, "predict_loop", Ends, undo)
    trainer.predict(Model())
    assert seen == ["epoch end", "before", "end"]


@meanings.of("Trainer._logger_connector", "_LoggerConnector._callback_metrics", "_LoggerConnector._first_loop_iter")
@pytest.mark.parametrize("changed", [False, True])
def test_metrics_of_an_epoch_in_two_runs(undo: ExitStack, changed: bool) -> None:
    """The second run has the epoch's last two batches, and the metrics of the whole one; not of what it logs anew."""
    at_end: list[dict[str, float]] = []
    saved: list[Any] = []

    class Logs(Model):
        first, num = 0, 4

        def training_step(self, batch: Any, batch_idx: int) -> Any:
            value = batch[0, 0] / 7
            self.log("mean", value, on_step=True, on_epoch=True, batch_size=1 + int(batch[0, 0]) // 32)
            self.log("max", -value, on_epoch=True, on_step=False, reduce_fx="max", prog_bar=changed and self.first > 0)
            self.log("sum", value, on_epoch=True, on_step=False, reduce_fx=torch.sum, batch_size=1)
            return super().training_step(batch, batch_idx)

        def train_dataloader(self) -> Any:
            return DataLoader(super().train_dataloader().dataset[self.first : self.num], batch_size=None)

        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            if self.first == 0 and batch_idx == 1:
                trainer = self.trainer
                saved.extend(
                    (lightning.callback_metrics(trainer), lightning.epoch_results(trainer.fit_loop.epoch_loop))
                )

        def on_train_epoch_end(self) -> None:
            at_end.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    class GoesOn(lightning.EpochLoop):
        def on_run_start(self, fetcher: Any) -> None:
            super().on_run_start(fetcher)
            before, results = saved
            lightning.restore_callback_metrics(self.trainer, before)
            lightning.restore_epoch_results(self.trainer, results)
            at_end.append({name: value.item() for name, value in self.trainer.callback_metrics.items()})

    options: dict[str, Any] = {"max_epochs": 1, "limit_val_batches": 0}
    make_trainer(**options).fit(Logs())
    trainer, rest = make_trainer(**options), Logs()
    rest.first = 2
    stand_in(trainer.fit_loop, "epoch_loop", GoesOn, undo)
    trainer.fit(rest)
    whole, before, resumed = at_end
    assert before["mean_step"] == pytest.approx(32 / 7)
    assert whole.keys() == resumed.keys()
    assert {name for name in whole if whole[name] != resumed[name]} == ({"max"} if changed else set())


@meanings.of("_TrainingEpochLoop._broadcast_sigterm_tensor")
def test_ranks_share_a_sigterm_before_each_batch(undo: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    seen: list[int] = []

    class Shares(lightning.EpochLoop):
        def share_sigterm(self) -> None:
            seen.append(self.batch_idx)

        def advance(self, fetcher: Any) -> None:
            with pytest.MonkeyPatch.context() as patch:
                patch.setattr(torch.distributed, "is_initialized", lambda: len(seen) <= self.batch_idx + 1)
                patch.setattr(Trainer, "world_size", 2)
                super().advance(fetcher)

    trainer = make_trainer(max_epochs=1, limit_val_batches=0)
    stand_in(trainer.fit_loop, "epoch_loop", Shares, undo)
    trainer.fit(Model())
    assert seen == [-1, 0, 1, 2]  # before the batch counts


@meanings.of("_TrainingEpochLoop._build_kwargs")
def test_how_many_arguments_a_training_step_takes(undo: ExitStack) -> None:
    class One(Model):
        def training_step(self, batch: Any) -> Any:
            return super().training_step(batch, 0)

    def count(model: Any) -> None:
        model.seen.append(model.trainer.fit_loop.epoch_loop.num_step_arguments(torch.zeros(1), 0))

    for model, expected in ((One(count), 1), (Model(count), 2)):
        trainer = make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=0)
        stand_in(trainer.fit_loop, "epoch_loop", lightning.EpochLoop, undo)
        trainer.fit(model)
        assert model.seen == [expected]


@meanings.of("_TrainingEpochLoop._should_accumulate", "_TrainingEpochLoop._batches_that_stepped")
@pytest.mark.parametrize("every", [1, 2, 3])
@pytest.mark.parametrize("stands_in", [False, True])
def test_accumulation_and_the_step_of_loggers(undo: ExitStack, every: int, stands_in: bool) -> None:
    logged: list[int] = []

    class Log(DummyLogger):
        def log_metrics(self, metrics: Any, step: int) -> None:
            logged.append(step)

    class Logs(Model):
        def training_step(self, batch: Any, batch_idx: int) -> Any:
            self.log("x", 1.0)
            return super().training_step(batch, batch_idx)

    class Looks(Callback):
        def on_train_batch_start(self, trainer: Trainer, *_: Any) -> None:
            self.before = trainer.global_step

        def on_train_batch_end(self, trainer: Trainer, *_: Any) -> None:
            assert lightning.accumulates(trainer) == (trainer.global_step == self.before)
            if not lightning.accumulates(trainer):
                steps.append(lightning.logged_step(trainer))

    steps: list[int] = []
    kwargs: dict[str, Any] = {"accumulate_grad_batches": every, "log_every_n_steps": 1, "limit_val_batches": 0}
    trainer = make_trainer(logger=Log(), callbacks=[Looks()], **kwargs)
    if stands_in:
        stand_in(trainer.fit_loop, "epoch_loop", lightning.EpochLoop, undo)
    trainer.fit(Logs())
    assert sorted(set(logged)) == steps


@meanings.of("LightningModule._on_before_batch_transfer", "lightning.pytorch.trainer.call._call_strategy_hook")
def test_a_batch_is_transferred_with_the_users_hooks() -> None:
    class Transfers(Model):
        def on_before_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.seen.append(("before", dataloader_idx))
            return batch + 1

        def on_after_batch_transfer(self, batch: Any, dataloader_idx: int) -> Any:
            self.seen.append(("after", dataloader_idx))
            return batch * 2

        def on_train_start(self) -> None:
            self.seen.append(lightning.transfer_batch(self.trainer, torch.ones(1), 3).item())

    model = Transfers()
    make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=0).fit(model)
    assert model.seen[:3] == [("before", 3), ("after", 3), 4.0]


@meanings.of("CombinedLoader._state_dicts")
def test_states_of_loaders() -> None:
    class Stateful:
        def __iter__(self) -> Iterator[Tensor]:
            for self.position in range(4):
                yield torch.ones(1, 32)

        def __len__(self) -> int:
            return 4

        def state_dict(self) -> dict[str, int]:
            return {"position": self.position}

        def load_state_dict(self, state: dict[str, int]) -> None:
            raise NotImplementedError

    class Loads(Model):
        def __init__(self, loader: Any) -> None:
            super().__init__(lambda model: model.seen.append(states(model.trainer)))
            self._loader = loader

        def train_dataloader(self) -> Any:
            return self._loader

    def states(trainer: Any) -> Any:
        return lightning.loader_states(trainer.fit_loop._data_fetcher)

    stateful, plain = Loads(Stateful()), Loads(DataLoader(torch.ones(4, 1, 32), batch_size=None))
    for model in (stateful, plain):
        make_trainer(max_epochs=1, limit_val_batches=0).fit(model)
    assert stateful.seen == [[{"position": position}] for position in range(4)]
    assert plain.seen == [[]] * 4


@meanings.of("_EvaluationLoop._evaluation_step", "_EvaluationLoop._data_fetcher", "_EvaluationLoop._is_sequential")
@meanings.of(
    *(
        f"_EvaluationLoop.{name}"
        for name in ("_build_kwargs", "_build_step_args_from_hook_kwargs", "_verify_dataloader_idx_requirement")
    )
)
@pytest.mark.parametrize("num_loaders", [1, 2])
def test_an_evaluation(undo: ExitStack, num_loaders: int) -> None:
    """Arguments of steps are those that Lightning passes; a check comes first, and something after each step."""
    seen: list[Any] = []

    class Looks(lightning.EvaluationLoop):
        def check_signatures(self) -> None:
            super().check_signatures()
            seen.append("check")

        def after_step(self) -> None:
            assert lightning.gives_batches(self.fetcher)
            seen.append(("after", *self.step_arguments(None, self.batch_progress.current.ready - 1, 1)[1:]))

    class One(Model):
        def test_step(self, batch: Any, batch_idx: int, *dataloader_idx: int) -> None:
            seen.append(("step", batch_idx, *dataloader_idx))

        if num_loaders == 1:

            def test_step(self, batch: Any, batch_idx: int) -> None:  # type: ignore[misc]
                seen.append(("step", batch_idx))

        def test_dataloader(self) -> Any:
            return [DataLoader(torch.ones(2, 1, 32), batch_size=None) for _ in range(num_loaders)]

    trainer = make_trainer()
    stand_in(trainer, "test_loop", Looks, undo)
    trainer.test(One(), verbose=False)
    assert seen[0] == "check"
    steps, after = seen[1::2], seen[2::2]
    assert [len(step) for step in steps] == [len(one) for one in after] == [1 + num_loaders] * (2 * num_loaders)
    assert {step[0] for step in steps} == {"step"}
    assert {one[0] for one in after} == {"after"}


@meanings.of(
    *(
        f"_PredictionLoop.{name}"
        for name in ("_data_fetcher", "_predict_step", "_return_predictions", "_store_data_for_prediction_writer")
    ),
    "_DataLoaderIterDataFetcher._dataloader_idx",
)
@pytest.mark.parametrize("staged", [True, False])
def test_writers_get_predictions_of_staged_batches(undo: ExitStack, tmp_path: Path, staged: bool) -> None:
    class Writer(BasePredictionWriter):
        def write_on_epoch_end(self, trainer: Any, module: Any, predictions: Any, batch_indices: Any) -> None:
            self.written = [one[0, 0].item() for one in predictions]

    class Stages(lightning.PredictionLoop):
        def reset(self) -> None:
            super().reset()
            assert self.fetcher is not None
            self.fetcher = Staged(self.fetcher) if staged else self.fetcher

        def after_step(self) -> None:
            steps.append(self.batch_progress.current.ready)

    class Plain(Model):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    steps: list[int] = []
    writer = Writer("epoch")
    trainer = make_trainer(callbacks=[writer])
    stand_in(trainer, "predict_loop", Stages, undo)
    assert trainer.predict(TakesStaged() if staged else Plain(), return_predictions=False) is None
    assert writer.written == [0.0, 32.0, 64.0, 96.0]
    assert steps == [1, 2, 3, 4]


@meanings.of(
    *(
        f"_PredictionLoop.{name}"
        for name in ("_build_kwargs", "_build_step_args_from_hook_kwargs", "_verify_dataloader_idx_requirement")
    )
)
def test_arguments_of_a_prediction(undo: ExitStack) -> None:
    seen: list[Any] = []

    class Looks(lightning.PredictionLoop):
        def check_signatures(self) -> None:
            super().check_signatures()
            seen.append("check")

        def after_step(self) -> None:
            seen.append(self.step_arguments("batch", 5, 0))

    class Plain(Model):
        def predict_step(self, batch: Any, batch_idx: int) -> Any:
            return batch

    trainer = make_trainer(limit_predict_batches=1)
    stand_in(trainer, "predict_loop", Looks, undo)
    trainer.predict(Plain())
    assert seen == ["check", ("batch", 5)]


@meanings.of("Trainer._signal_connector", "_SignalConnector._sigterm_notifier_fn")
def test_a_handler_of_sigterm(undo: ExitStack) -> None:
    heard: list[int] = []
    trainer = make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=0)
    assert lightning.replaced_sigterm_handler(trainer) is None

    def handler(signum: int, frame: Any) -> None:
        heard.append(signum)

    lightning.replace_sigterm_handler(trainer, handler, undo)
    assert lightning.replaced_sigterm_handler(trainer) is handler
    before = signal.getsignal(signal.SIGTERM)
    trainer.fit(Model(lambda model: os.kill(os.getpid(), signal.SIGTERM)))
    assert heard == [signal.SIGTERM]
    assert not trainer.received_sigterm  # Lightning's handler would have noted it
    assert signal.getsignal(signal.SIGTERM) == before
    undo.close()
    assert lightning.replaced_sigterm_handler(trainer) is None


def test_a_noted_sigterm_ends_the_fit() -> None:
    model = Model(lambda model: lightning.note_sigterm(model.trainer))
    with pytest.raises(SystemExit):
        make_trainer(limit_val_batches=0).fit(model)
    assert model.trainer.global_step == 1


@meanings.of("_SignalConnector._slurm_sigusr_handler_fn")
def test_a_handler_of_slurms_signal(undo: ExitStack, monkeypatch: pytest.MonkeyPatch) -> None:
    for name, value in {"SLURM_NTASKS": "1", "SLURM_JOB_NAME": "train", "SLURM_JOB_ID": "1"}.items():
        monkeypatch.setenv(name, value)
    heard: list[int] = []
    environment = SLURMEnvironment(requeue_signal=signal.SIGUSR1)
    trainer = make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=0, plugins=[environment])
    own = lightning.requeue_handler(trainer)
    lightning.replace_requeue_handler(trainer, lambda signum, frame: heard.append(signum), undo)
    connector = trainer._signal_connector
    connector.register_signal_handlers()
    try:
        os.kill(os.getpid(), signal.SIGUSR1)
    finally:
        connector.teardown()
    assert heard == [signal.SIGUSR1]
    undo.close()
    assert lightning.requeue_handler(trainer) == own


@meanings.of("Trainer._checkpoint_connector", "_CheckpointConnector.resume_start")
def test_a_checkpoint_is_read_by_resume_start(undo: ExitStack, tmp_path: Path) -> None:
    path, first = tmp_path / "a.ckpt", Model()
    trainer = make_trainer(max_epochs=1, limit_val_batches=0)
    trainer.fit(first)
    trainer.save_checkpoint(path)
    seen: list[Any] = []

    def around(own: Callable[..., None], found: Any = None, *args: Any, **kwargs: Any) -> None:
        seen.append((found, torch.equal(second.layer.weight, first.layer.weight)))
        own(found, *args, **kwargs)

    for ckpt_path in (None, path):
        second, trainer = Model(), make_trainer(limit_val_batches=0)
        lightning.wrap_resume_start(trainer, around, undo)
        trainer.fit(second, ckpt_path=ckpt_path)
    assert seen == [(None, False), (path, False)]
    assert trainer.current_epoch == 2
    undo.close()
    assert "resume_start" not in vars(trainer._checkpoint_connector)


class ByHand(Model):
    """Makes the steps of its optimizer itself."""

    def __init__(self) -> None:
        super().__init__()
        self.automatic_optimization = False

    def training_step(self, batch: Any, batch_idx: int) -> None:
        optimizer = self.optimizers()
        self.manual_backward(self.layer(batch).sum())
        for _ in range(2):
            optimizer.step()


@pytest.mark.parametrize("kind", [Model, ByHand])
def test_a_fit_loops_state_between_two_epochs(tmp_path: Path, kind: type[Model]) -> None:
    """A fit that begins with it has the counts of one that has trained its epochs, and goes on with the next one."""
    path, module = tmp_path / "a.ckpt", kind()
    trainer = make_trainer(max_epochs=2, limit_val_batches=0)
    trainer.fit(module)
    is_automatic = kind is Model
    assert trainer.global_step == 8 if is_automatic else 16
    trainer.save_checkpoint(path)
    checkpoint = torch.load(path, weights_only=True)
    state = lightning.fit_loop_state(epochs=2, batches=8, steps=trainer.global_step, is_automatic=is_automatic)
    torch.save({**checkpoint, "loops": {"fit_loop": state}}, path)
    again = make_trainer(max_epochs=3, limit_val_batches=0)
    again.fit(kind(), ckpt_path=path)
    trainer.fit_loop.max_epochs = 3
    trainer.fit(module)
    for one in (trainer, again):
        assert (one.current_epoch, one.fit_loop.epoch_loop.total_batch_idx) == (3, 11)
        assert one.global_step == (12 if is_automatic else 24)
        assert lightning.logged_step(one) == 12


@meanings.of(
    "_CheckpointConnector._parse_ckpt_path",
    "ModelCheckpoint._ModelCheckpoint__resolve_ckpt_dir",
    "ModelCheckpoint._find_last_checkpoints",
)
def test_what_a_word_for_a_checkpoint_stands_for(undo: ExitStack, tmp_path: Path) -> None:
    seen: list[Any] = []

    def around(own: Callable[..., Any], fn: Any, ckpt_path: Any, **kwargs: Any) -> Any:
        last = lightning.last_checkpoints(callback, trainer)
        seen.append((fn.value, ckpt_path, lightning.checkpoint_folder(callback, trainer), last))
        assert own(fn, ckpt_path, **kwargs) == max(last, default=None)
        return found

    found, folder = None, str(tmp_path / "checkpoints")
    for _ in range(2):
        callback = ModelCheckpoint(save_last=True)  # its folder is in that of the trainer
        options: dict[str, Any] = {"default_root_dir": tmp_path, "enable_checkpointing": True, "callbacks": [callback]}
        trainer = make_trainer(max_epochs=1, limit_val_batches=0, **options)
        lightning.wrap_checkpoint_search(trainer, around, undo)
        with warnings.catch_warnings(action="ignore"):  # there is no last checkpoint yet
            trainer.fit(Model(), ckpt_path="last")
        found = str(tmp_path / "other.ckpt")
        shutil.copy(Path(folder, "last.ckpt"), found)
    assert seen == [("fit", "last", folder, set()), ("fit", "last", folder, {f"{folder}/last.ckpt"})]
    assert trainer.ckpt_path == found
    undo.close()
    assert "_parse_ckpt_path" not in vars(trainer._checkpoint_connector)


@meanings.of("Trainer._teardown")
def test_tear_down_ends_a_run() -> None:
    class Ends(Callback):
        def on_exception(self, trainer: Trainer, *_: Any) -> None:
            lightning.tear_down(trainer)
            seen.append(trainer.fit_loop._data_fetcher is None or trainer.fit_loop._data_fetcher.iterator is None)

    def fail(model: Any) -> None:
        raise ValueError("in a step")

    seen: list[bool] = []
    with pytest.raises(ValueError, match="in a step"):
        make_trainer(callbacks=[Ends()]).fit(Model(fail))
    assert seen == [True]


def test_a_save_ends_with_a_barrier_of_this_name(tmp_path: Path) -> None:
    trainer = make_trainer(max_steps=1)
    trainer.fit(Model())
    with mock.patch.object(trainer.strategy, "barrier") as barrier:
        trainer.save_checkpoint(tmp_path / "a.ckpt")
    assert barrier.call_args_list == [mock.call(lightning.AFTER_SAVE)]


@meanings.of("MLFlowLogger._log_model", "WandbLogger._log_model")
@pytest.mark.parametrize("library", ["wandb", "mlflow"])
@pytest.mark.parametrize("log_model", [False, True, "all"])
def test_a_logger_that_uploads_checkpoints(library: str, log_model: Any, tmp_path: Path) -> None:
    """It uploads files and leaves folders out, without a word."""
    kind, installed = {"wandb": (WandbLogger, "_WANDB_AVAILABLE"), "mlflow": (MLFlowLogger, "_MLFLOW_AVAILABLE")}[
        library
    ]
    stubs = mock.patch.dict(sys.modules, {name: mock.MagicMock() for name in ("mlflow", "mlflow.tracking", "wandb")})
    with stubs, mock.patch(f"lightning.pytorch.loggers.{library}.{installed}", True):
        logger = kind(log_model=log_model)
    assert lightning.uploads_checkpoints(logger) == bool(log_model)
    file, folder = tmp_path / "file.ckpt", tmp_path / "folder.ckpt"
    file.touch()
    folder.mkdir()
    callback = ModelCheckpoint(tmp_path)
    callback.best_k_models = {str(path): torch.tensor(0.0) for path in (file, folder)}
    assert [path for _, path, *_ in _scan_checkpoints(callback, {})] == [str(file)]


@meanings.of("ModelCheckpoint._link_checkpoint")
def test_last_is_linked_by_another_function(undo: ExitStack, tmp_path: Path) -> None:
    class Own(ModelCheckpoint):
        @staticmethod
        def _link_checkpoint(trainer: Any, filepath: str, linkpath: str) -> None:
            linked.append(("own", Path(filepath).name, Path(linkpath).name))

    linked: list[Any] = []
    for kind in (ModelCheckpoint, Own):
        callback = kind(tmp_path / kind.__name__, save_last="link")
        trainer = make_trainer(max_epochs=1, limit_val_batches=0, enable_checkpointing=True, callbacks=[callback])

        def link(trainer: Any, filepath: Any, linkpath: Any) -> None:
            linked.append((Path(filepath).name, Path(linkpath).name))

        lightning.replace_link(callback, link, undo)
        trainer.fit(Model())
    assert linked == [("epoch=0-step=4.ckpt", "last.ckpt"), ("own", "epoch=0-step=4.ckpt", "last.ckpt")]


@meanings.of("ModelPruning._parameters_to_prune")
def test_which_parameters_are_pruned() -> None:
    model, callback = Model(), ModelPruning("l1_unstructured", amount=0.5)
    make_trainer(max_epochs=1, limit_train_batches=1, limit_val_batches=0, callbacks=[callback]).fit(model)
    assert {(id(module), name) for module, name in lightning.pruned_parameters(callback)} == {
        (id(model.layer), "weight"),
        (id(model.layer), "bias"),
    }


@meanings.of("DDPStrategy._ddp_kwargs", "DDPStrategy._ddp_comm_hook", "DDPStrategy._start_method")
def test_options_of_a_strategy() -> None:
    def hook(state: Any, bucket: Any) -> None:
        raise NotImplementedError

    made = lightning.Strategy(start_method="spawn", ddp_comm_hook=hook, static_graph=True)
    assert lightning.ddp_options(made) == {"static_graph": True}
    assert lightning.comm_hook(made) is hook
    assert lightning.comm_hook(lightning.Strategy()) is None
    assert lightning.start_method(made) == "spawn"


@meanings.of("DDPStrategy._configure_launcher", "DDPStrategy._launcher")
def test_a_strategy_makes_its_launcher() -> None:
    class Chooses(lightning.Strategy):
        def _make_launcher(self) -> None:
            super()._make_launcher()
            made.append(self.launcher)
            lightning.set_launcher(self, None)

    for method in ("popen", "spawn"):
        made: list[Any] = []
        trainer = make_trainer(strategy=Chooses(start_method=method))
        assert [lightning.starts_python_processes(one) for one in made] == [method == "spawn"]
        assert trainer.strategy.launcher is None  # what `Trainer.fit` uses


@meanings.of("Strategy._layer_sync")
def test_synchronized_layers_are_taken_out() -> None:
    trainer = make_trainer(strategy=lightning.Strategy(), sync_batchnorm=True)
    model: nn.Module = nn.Sequential(nn.BatchNorm1d(2))
    synced = TorchSyncBatchNorm().apply(model)
    assert isinstance(synced[0], nn.SyncBatchNorm)
    assert not isinstance(lightning.without_layer_sync(trainer.strategy, synced)[0], nn.SyncBatchNorm)
    assert lightning.without_layer_sync(lightning.Strategy(), model) is model


@meanings.of("CombinedLoader._iterator", "CombinedLoader._mode")
@pytest.mark.parametrize("mode", ["max_size", "max_size_cycle"])
def test_shorter_loaders_end(mode: Any) -> None:
    """Of a combination that gives None in the place of a loader that has ended; others begin it anew."""
    combined = CombinedLoader({"short": [1, 2], "long": [3, 4, 5]}, mode)
    fetcher = _PrefetchDataFetcher()
    fetcher.setup(combined)
    iter(fetcher)
    lightning.end_shorter_loaders(fetcher, 2)
    first = next(fetcher)[0]
    assert first == {"short": None if mode == "max_size" else 1, "long": 3}


@meanings.of("_FitLoop._last_train_dl_reload_epoch", "_EvaluationLoop._last_val_dl_reload_epoch")
@meanings.of("_EvaluationLoop._should_reload_val_dl", "_EvaluationLoop.setup_data")
def test_the_epochs_in_which_loaders_are_made(undo: ExitStack) -> None:
    """Lightning counts from them up to the next ones, and knows the present epoch by the epochs that are completed."""

    class Made(Model):
        def train_dataloader(self) -> Any:
            made.append(("training", self.trainer.current_epoch))
            return super().train_dataloader()

        def val_dataloader(self) -> Any:
            made.append(("validation", self.trainer.current_epoch))
            return super().train_dataloader()

        def on_train_epoch_end(self) -> None:
            epochs.append((loop.loaders_epoch, validation.loaders_epoch, validation.makes_loaders_anew))

    made: list[tuple[str, int]] = []
    epochs: list[tuple[float, float, bool]] = []
    trainer = make_trainer(max_epochs=4, reload_dataloaders_every_n_epochs=2, num_sanity_val_steps=0)
    stand_in(trainer, "fit_loop", lightning.FitLoop, undo)
    stand_in(trainer.fit_loop.epoch_loop, "val_loop", lightning.EvaluationLoop, undo)
    loop: Any = trainer.fit_loop
    validation = loop.epoch_loop.val_loop
    assert loop.loaders_epoch == validation.loaders_epoch == float("-inf")
    trainer.fit(Made())
    assert made == [("training", 0), ("validation", 0), ("training", 2), ("validation", 2)]
    assert epochs == [(0, 0, False), (0, 0, False), (2, 2, False), (2, 2, False)]
    loop.loaders_epoch = validation.loaders_epoch = 1
    loop.epoch_progress.current.completed = 3
    assert trainer.current_epoch == 3
    assert loop.makes_loaders_anew
    assert validation.makes_loaders_anew


@meanings.of("DDPStrategy._lightning_module", "DDPStrategy._model", "DDPStrategy._optimizers")
def test_a_copied_strategy_without_its_module() -> None:
    strategy, model = lightning.Strategy(), Model()
    strategy.connect(model)
    strategy.optimizers = [torch.optim.SGD(model.parameters(), lr=0.1)]
    assert strategy.lightning_module is model
    copy = object.__new__(lightning.Strategy)
    copy.__setstate__(lightning.without_module(strategy.__getstate__()))
    assert copy.lightning_module is None
    assert copy.model is None
    assert copy.optimizers == copy.lr_scheduler_configs == []


@meanings.of(*(f"_MultiProcessingLauncher.{name}" for name in ("_wrapping_function", "_strategy", "_start_method")))
@meanings.of("_MultiProcessingLauncher._collect_rank_zero_results")
def test_what_a_started_process_runs(tmp_path: Path) -> None:
    """The parent gets the state of the module, hooks of `state_dict` included."""

    class Launcher(lightning.ProcessLauncher):
        def run_in_process(self, *args: Any, **kwargs: Any) -> None:
            seen.append("run")
            super().run_in_process(*args, **kwargs)

        def collect_results(self, trainer: Any, results: Any) -> Any:
            seen.append(("collect", results))
            with trainer.lightning_module.register_state_dict_post_hook(add):
                return super().collect_results(trainer, results)

    def add(module: Any, state: Any, *_: Any) -> None:
        state["added"] = torch.ones(1)

    seen: list[Any] = []
    devices, environment = [torch.device("cpu")], LightningEnvironment()
    strategy = lightning.Strategy(parallel_devices=devices, cluster_environment=environment, start_method="fork")
    launcher, results = Launcher(strategy, "fork"), queue.SimpleQueue[Any]()
    assert launcher.strategy is strategy
    trainer = make_trainer(max_epochs=1, limit_val_batches=0, default_root_dir=tmp_path)
    trainer.fit(Model())
    launcher._wrapping_function(0, trainer, lambda one: one + 1, (1,), {}, results)
    assert seen == ["run", ("collect", 2)]
    assert "added" in torch.load(results.get().weights_path)


def test_each_listed_name_has_a_test() -> None:
    assert meanings.without_test(lightning.PRIVATE_NAMES) == set()
