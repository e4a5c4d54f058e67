"""Modules whose state is no tensor of fixed shape, saved in every format. Functions that ranks run."""

import copy
from collections.abc import Iterable
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import torch
from lightning.pytorch import Callback, Trainer
from torch import Tensor, nn
from torchmetrics import Metric

from ..support.cases import TABLE_WISE, Case
from ..support.fits import make_strategy, make_trainer
from .checkpoints import Evaluated, EvaluatedBatches


class Remembers(nn.Module):
    """Has a state that may be anything, and notes with which version a state is loaded."""

    _version = 3

    def __init__(self) -> None:
        super().__init__()
        self.state: Any = 0
        self.version: int | None = None
        self.register_load_state_dict_pre_hook(self._note_version)

    @staticmethod
    def _note_version(module: Any, state_dict: Any, prefix: str, metadata: Any, *_: Any) -> None:
        module.version = metadata.get("version")

    def get_extra_state(self) -> Any:
        return self.state

    def set_extra_state(self, state: Any) -> None:
        self.state = state


class Collects(Metric):
    """A metric with a list, and a tensor that changes its shape and its dtype."""

    def __init__(self) -> None:
        super().__init__()
        self.add_state("parts", [], persistent=True)
        self.add_state("total", torch.tensor(0), persistent=True)

    def update(self, parts: list[Tensor], total: Tensor) -> None:
        self.parts, self.total = list(parts), total

    def compute(self) -> int:
        return len(self.parts)


class Names(nn.Module):
    """Adds as many tensors to a `state_dict` as it has, under names of its own."""

    def __init__(self) -> None:
        super().__init__()
        self.kept: dict[str, Tensor] = {}
        self.register_state_dict_post_hook(self._add)
        self.register_load_state_dict_pre_hook(self._take)

    @staticmethod
    def _add(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        state_dict.update({f"{prefix}{name}": value for name, value in module.kept.items()})

    @staticmethod
    def _take(module: Any, state_dict: Any, prefix: str, *_: Any) -> None:
        mine = [key for key in state_dict if key.startswith(prefix)]
        module.kept = {key.removeprefix(prefix): state_dict.pop(key) for key in mine}


@dataclass(frozen=True)
class State:
    """What the modules have."""

    any: Any = 0
    parts: tuple[Tensor, ...] = ()
    total: Tensor | None = None
    kept: tuple[tuple[str, Tensor], ...] = ()


class Modules(nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.remembers, self.collects, self.names = Remembers(), Collects(), Names()

    def put(self, state: State) -> None:
        self.remembers.state = state.any
        self.collects.update(list(state.parts), torch.tensor(0) if state.total is None else state.total)
        self.names.kept = dict(state.kept)

    def get(self) -> dict[str, Any]:
        whole = {"any": self.remembers.state, "parts": list(self.collects.parts), "total": self.collects.total}
        return {**whole, "kept": self.names.kept, "version": self.remembers.version}

    def spoil(self) -> None:
        """Change what is there in place, as a step does after an asynchronous save has begun."""
        spoil(self.remembers.state)
        self.collects.parts.append(torch.zeros(1))
        for tensor in (self.collects.total, *self.names.kept.values()):
            tensor.zero_()


def spoil(value: Any) -> None:
    if isinstance(value, Tensor):
        value.zero_()
    elif isinstance(value, dict):
        for one in value.values():
            spoil(one)
        value["spoilt"] = True
    elif isinstance(value, list | tuple):
        for one in value:
            spoil(one)
        if isinstance(value, list):
            value.append("spoilt")


class WithModules(Evaluated):
    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.modules_with_state = Modules()


class Saves(Callback):
    """Saves after the first step an early state, and after the second one the state that counts, in several formats."""

    def __init__(self, folder: str, states: tuple[State, State], how: str) -> None:
        self.folder, self.states, self.how = folder, states, how

    def on_train_batch_end(self, trainer: Trainer, module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        strategy: Any = trainer.strategy
        module.modules_with_state.put(copy.deepcopy(self.states[batch_idx]))
        if batch_idx == 0:
            trainer.save_checkpoint(f"{self.folder}/early.ckpt")
            return
        if self.how == "incremental":
            trainer.save_checkpoint(f"{self.folder}/incremental.ckpt")
            strategy.checkpoint_format = "full"
            trainer.save_checkpoint(f"{self.folder}/full.ckpt")
            strategy.checkpoint_format = "incremental"
        strategy.async_checkpoint = True
        trainer.save_checkpoint(f"{self.folder}/{self.how}-asynchronous.ckpt")
        module.modules_with_state.spoil()
        strategy.finish_save()


def save(folder: str, how: str, early: State, of_ranks: tuple[State, ...]) -> None:
    model = WithModules(TABLE_WISE)
    strategy = make_strategy(model, checkpoint_format=how, most_increments=10)
    rank = torch.distributed.get_rank()
    trainer = make_trainer(strategy, callbacks=[Saves(folder, (early, of_ranks[rank]), how)])
    trainer.fit(model, datamodule=EvaluatedBatches(TABLE_WISE, 2))


def load(paths: Iterable[Path], before: State) -> dict[str, dict[str, Any]]:
    """Return what a new module has once each checkpoint is loaded, of a fit and of a validation in turn."""
    found = {}
    for number, path in enumerate(paths):
        model = WithModules(TABLE_WISE)
        model.modules_with_state.put(copy.deepcopy(before))
        trainer = make_trainer(make_strategy(model), max_epochs=1 + number % 2, limit_val_batches=1)
        if number % 2:
            trainer.validate(model, datamodule=EvaluatedBatches(TABLE_WISE, 2), ckpt_path=path, verbose=False)
        else:
            trainer.fit(model, datamodule=EvaluatedBatches(TABLE_WISE, 2), ckpt_path=path)
        found[path.name] = model.modules_with_state.get()
    return found
