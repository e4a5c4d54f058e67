"""A recorder shared by all callbacks that watch a fit, so that they see the same spans and step ends."""

import warnings
from contextlib import ExitStack
from typing import Any
from unittest import mock
from weakref import WeakKeyDictionary

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel

from ..plugin import OverlapEmbeddingStrategy
from ..profiling import Interval, SpanRecorder
from ..tables import compression

_UNDER_WAY: WeakKeyDictionary[OverlapEmbeddingStrategy, "Recording"] = WeakKeyDictionary()  # a strategy has one timer


class Recording:
    """A recording of steps of a fit, made by `join`; it also times `log` and the wait for dense gradients."""

    def __init__(self, strategy: OverlapEmbeddingStrategy, module: LightningModule) -> None:
        assert strategy.streams is not None
        comms = strategy.quantized_comms
        self.recorder = SpanRecorder(strategy.streams, None if comms is None else compression(comms))
        self.schedule = strategy.schedule  # at the start of the recording
        self._numbers: list[int] = []
        self._readers: list[object] = []
        self._end = ExitStack()
        self._end.callback(_UNDER_WAY.pop, strategy, None)
        self._end.callback(strategy.watch, None)
        self._end.callback(self.recorder.stop)
        self.recorder.start()
        log, on_before_backward = module.log, module.on_before_backward

        def timed(*args: Any, **kwargs: Any) -> None:
            with self.recorder.log():
                log(*args, **kwargs)

        def watched(loss: Tensor) -> None:
            on_before_backward(loss)
            self.recorder.backward(loss)

        self._end.enter_context(mock.patch.object(module, "log", timed))  # log_dict calls it too
        if isinstance(strategy.model, DistributedDataParallel):
            self._end.enter_context(mock.patch.object(module, "on_before_backward", watched))
        strategy.watch(self.recorder)

    def step(self, number: int) -> None:
        """Note the end of a step, counted from 1 on; only the first reader's call counts."""
        if not self._numbers or self._numbers[-1] != number:
            self._numbers.append(number)
            self.recorder.step()

    def window(self, number: int) -> Interval:
        """Return start and end in ms of a step that was recorded from its start."""
        return self.recorder.windows()[self._numbers.index(number) - 1]

    def leave(self, reader: object) -> None:
        """Remove a reader; the recording stops without readers."""
        if reader in self._readers:
            self._readers.remove(reader)
            if not self._readers:
                self._end.close()


def join(strategy: OverlapEmbeddingStrategy, module: LightningModule, reader: object) -> Recording:
    """Return the strategy's current recording or a new one; `reader` leaves it later."""
    recording = _UNDER_WAY.get(strategy)
    if recording is None:
        recording = _UNDER_WAY[strategy] = Recording(strategy, module)
    recording._readers.append(reader)
    return recording


def watched_strategy(trainer: Trainer, callback: Callback) -> OverlapEmbeddingStrategy | None:
    """Return the trainer's strategy; without a sparse pipeline warn and return None."""
    strategy = trainer.strategy
    if isinstance(strategy, OverlapEmbeddingStrategy) and strategy.streams is not None:
        return strategy
    warnings.warn(
        f"{type(callback).__name__} has nothing to watch: {type(strategy).__name__} runs no sparse pipeline here. Use "
        "OverlapEmbeddingStrategy and a module with TorchRec tables.",
        stacklevel=2,
    )
    return None
