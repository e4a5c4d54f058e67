"""The hooks of a strategy inside a step: each tells the walker how far the trainer is."""

import contextlib
from collections.abc import Callable
from operator import methodcaller
from typing import Any

import torch
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.streamable import Pipelineable
from typing_extensions import override

from ..runtime import NOTHING, BatchCopies, CudaStreams, Flight, Walker
from ..schedules import Stage, StreamName
from ..sparse import count_anew, keyed_jagged_tensors, note_lengths
from ..tables import count_writes, watch_lengths
from .loops import StagedBatch
from .run import HasRun


class WalksSteps(HasRun):
    """The hooks of a strategy around the parts of a step, which drive the walker; else they are DDPStrategy's."""

    _release_features: bool
    _copy_in_place: bool

    @override
    def forget_run(self) -> None:
        super().forget_run()
        self._transferred: Any = None  # event after the user's last `on_after_batch_transfer`

    @property
    def split_modules(self) -> tuple[str, ...]:
        """Names of the modules whose weight gradients come after the backward; known after a fit's first backward."""
        return () if self._fit is None or self._fit.split_layers is None else self._fit.split_layers.names

    @override
    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        device = device or self.root_device
        loaded = keyed_jagged_tensors(batch)
        note_lengths(loaded)
        fit = self._fit
        timer = None if fit is None else fit.sparse.telemetry.timer
        with NOTHING if timer is None else timer.copy(), self._placing_copies(device):
            if device.type == "cuda" and not _has_own_hook(self.lightning_module, "transfer_batch_to_device"):
                # Lightning passes non_blocking to tensors only: the host would wait for the others.
                move = methodcaller("to", device, non_blocking=True)
                batch = apply_to_collection(batch, Pipelineable, move, allow_frozen=True)
            has_hook = _has_own_hook(self.lightning_module, "on_after_batch_transfer")
            streams = self.streams if has_hook else None
            if streams is not None:
                # The user's hook may read what training_step writes. Without such a hook the copies do not wait.
                streams.order(StreamName.COMPUTE, then=StreamName.MEMCPY)
            batch = super().batch_to_device(batch, device, dataloader_idx)
            staged = keyed_jagged_tensors(batch)
            if has_hook:
                count_anew(staged)
            if torch.is_inference_mode_enabled():
                count_writes(staged)
            watch_lengths(staged)
            if streams is not None:
                self._transferred = streams.record(StreamName.MEMCPY)
        if fit is not None and self._release_features and any(kjt is own for kjt in staged for own in loaded):
            reason = "no copy of them is made, so the data loader's own objects would lose their values"
            fit.sparse.discovery.keep_features(f"the batch's KeyedJaggedTensors are on {device} already and {reason}")
        return batch

    def _placing_copies(self, device: torch.device) -> contextlib.AbstractContextManager[Any]:
        """Within this context copies take memory from the compute stream's pool, if `copy_in_place` says so."""
        streams, on_cuda = self.streams, self._copy_in_place and device.type == "cuda"
        if on_cuda and isinstance(streams, CudaStreams) and streams.current() is StreamName.MEMCPY:
            return BatchCopies(streams, "cuda")
        return NOTHING

    @override
    def training_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_shared_calls()
        staged = args[0] if args else None
        if not isinstance(staged, StagedBatch):
            return super().training_step(*args, **kwargs)
        if self.streams is not None and self._transferred is not None:
            self.streams.wait(StreamName.COMPUTE, self._transferred)  # the hook may have read what this step writes
            self._transferred = None
        if (fit := self._fit) is not None:
            fit.mid_step.begin()
        with staged.walker.forward():
            output = super().training_step(*staged.arguments)
        if not self._automatic:
            # The user's own backwards and steps lie inside training_step, and end with it at the latest.
            self.end_optimization()
        return output

    @override
    def validation_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_shared_calls()
        return _evaluate(super().validation_step, *args, **kwargs)

    @override
    def test_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_shared_calls()
        return _evaluate(super().test_step, *args, **kwargs)

    @override
    def predict_step(self, *args: Any, **kwargs: Any) -> Any:
        self._begin_shared_calls()
        return _evaluate(super().predict_step, *args, **kwargs)

    def take_part(self, walker: Walker, flight: Flight) -> None:
        """Take part in the lookups of a batch of an evaluation that this rank lacks and others have."""
        self._begin_shared_calls()
        with self.precision_plugin.val_step_context(), walker.forward():
            flight.take_part()
        walker.after(Stage.DENSE_FORWARD)

    @override
    def backward(self, *args: Any, **kwargs: Any) -> Tensor:
        # So that a compiled step (manual optimization) runs the whole backward outside of compiled code.
        return super().backward(*args, **kwargs)

    @override
    def pre_backward(self, closure_loss: Tensor) -> None:
        self._ledger.check_trained("a backward would train averages")
        super().pre_backward(closure_loss)
        fit = self._fit
        if fit is not None:
            fit.mid_step.end_forward()
        if self._losses is not None:
            self._losses.compare(closure_loss)
        self._after(Stage.DENSE_FORWARD)
        if fit is not None:
            fit.sparse.backward_begins()
            if fit.walker is not None:
                fit.walker.begin_backward(closure_loss, is_only=self._automatic)
        if self._losses is not None:
            self._losses.begin_backward()

    @override
    def post_backward(self, closure_loss: Tensor) -> None:
        super().post_backward(closure_loss)
        if (fit := self._fit) is not None:
            fit.sparse.backward_ends()
        if self._automatic:
            self._after(Stage.BACKWARD)
        elif (walker := self._walker) is not None:
            walker.wait_for_lookups()  # the rest of training_step may read the tables
        if self._losses is not None:
            self._losses.end_backward()

    @override
    def optimizer_step(
        self,
        optimizer: Optimizer,
        closure: Callable[[], Any],
        model: LightningModule | nn.Module | None = None,
        **kwargs: Any,
    ) -> Any:
        self._ledger.check_trained("an optimizer's step would train averages")
        output = super().optimizer_step(optimizer, closure, model, **kwargs)
        if self._automatic:
            self._after(Stage.OPTIMIZER_STEP)
        return output

    def end_optimization(self) -> None:
        """Tell the walker that the optimization of a batch is over, with a step of the optimizer or without.

        After an `optimizer_step` this runs no row again.
        """
        self._after(Stage.OPTIMIZER_STEP)
        fit = self._fit
        if fit is None:
            return
        fit.mid_step.end()
        if fit.tuner is not None and fit.walker is not None:
            fit.tuner.step()

    @override
    def on_train_end(self) -> None:
        self._begin_shared_calls()
        super().on_train_end()
        if self._fit is not None:
            self._fit.finish()
        self.settle_exchanges()

    @property
    def _automatic(self) -> bool:
        module = self.lightning_module
        return module is not None and module.automatic_optimization

    def _after(self, stage: Stage) -> None:
        self._begin_shared_calls()
        self._num_stages_done += 1
        if (walker := self._walker) is not None:
            walker.after(stage)


def _evaluate(step: Callable[..., Any], *args: Any, **kwargs: Any) -> Any:
    staged = args[0] if args else None
    if not isinstance(staged, StagedBatch):
        return step(*args, **kwargs)
    with staged.walker.forward():
        output = step(*staged.arguments)
    staged.walker.after(Stage.DENSE_FORWARD)
    return output


def _has_own_hook(module: LightningModule | None, hook: str) -> bool:
    if module is None:
        return False
    data = module.trainer.datamodule  # type: ignore[attr-defined]
    return _is_own(module, hook, LightningModule) or (data is not None and _is_own(data, hook, LightningDataModule))


def _is_own(owner: Any, hook: str, base: type) -> bool:
    """Whether the user has overridden a hook of Lightning's class `base`, in a class or on the object."""
    return getattr(getattr(owner, hook), "__func__", None) is not getattr(base, hook)


_HOOKS_AFTER = {  # stage -> hooks of modules and callbacks, and hooks of modules alone, that run before the next stage
    Stage.DENSE_FORWARD: (("on_before_backward",), ("backward",)),
    Stage.BACKWARD: (
        ("on_after_backward", "on_before_optimizer_step"),
        ("optimizer_step", "configure_gradient_clipping"),
    ),
}


def hooks_run_after(trainer: Trainer, stage: Stage) -> bool:
    """Whether a hook of the user or of a callback, which may read tables, runs between a stage and the next one."""
    module, callbacks = trainer.lightning_module, trainer.callbacks  # type: ignore[attr-defined]
    hooks, of_module_alone = _HOOKS_AFTER[stage]
    of_module = (*hooks, *of_module_alone)
    return any(_is_own(module, hook, LightningModule) for hook in of_module) or any(
        _is_own(callback, hook, Callback)
        for callback in callbacks
        if getattr(callback, "reads_tables", True)  # callbacks of this package that watch a run say False
        for hook in hooks
    )
