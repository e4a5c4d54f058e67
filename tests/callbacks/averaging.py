"""Functions that ranks run: fits with averages, beside a plain average of all weights at every sample."""

import ast
import contextlib
import warnings
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from torch import Tensor
from torch.utils.data import DataLoader

from lightning_overlap import ExponentialMovingAverage
from lightning_overlap.checkpoint import local_parts

from ..checkpoint.resumes import StatefulBatches
from ..support.cases import Batches, Case, Model, TableSpec, make_batch
from ..support.fits import make_strategy, make_trainer

Parts = dict[str, Tensor]  # "name window" of this rank's part of a weight -> values


def case_of(shardings: str, **kwargs: Any) -> Case:
    tables = tuple(
        TableSpec(f"t{number}", (f"f{number}", "shared"), sharding=one, dim=16 if one == "column_wise" else 8)
        for number, one in enumerate(shardings.split())
    )
    optimizer = kwargs.pop("optimizer", (torch.optim.SGD, {"lr": 1.0}))
    return Case("averages", tables, optimizer=optimizer, **kwargs)


ALL = case_of("table_wise column_wise row_wise data_parallel")


def parts_of(state: Any) -> Parts:
    return {
        f"{name} {[(one.start, one.stop) for one in window]}": part.detach().clone()
        for name, piece in state.items()
        if isinstance(piece, Tensor)
        for window, part in local_parts(piece)
    }


class PlainAverage(Callback):
    """Visits all weights of this rank at every sample, in double precision."""

    def __init__(self, decay: float, every: int = 1, start: int = 0) -> None:
        self.decay, self.every, self.start, self.last = decay, every, start, -1
        self.average: Parts | None = None

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        step = trainer.global_step - 1
        if step <= self.last or step < self.start or step // self.every == self.last // self.every:
            return
        self.last = step
        now = parts_of(module.state_dict())
        before = self.average or {name: part.double() for name, part in now.items()}
        gains = {name: 1 - self.decay if part.is_floating_point() else 1 for name, part in now.items()}
        self.average = {name: before[name] + gains[name] * (part - before[name]) for name, part in now.items()}

    def off_by(self, parts: Parts) -> float:
        """The largest difference, in parts of the largest value of its weight."""
        assert self.average is not None
        pairs = [(self.average[name], part) for name, part in parts.items() if part.numel()]
        return max([float((plain - part).abs().max() / max(1, plain.abs().max())) for plain, part in pairs], default=0)


@dataclass
class Averaged:
    """What a rank has seen of a fit with averages."""

    off_by: float  # from the plain averages, in the end
    averages: Parts
    weights: Parts
    losses: Tensor
    num_samples: int
    warned: list[str]
    seen: dict[str, Any] = field(default_factory=dict)


class Norm(Model):
    """Has buffers that each step changes, alike on all ranks: DistributedDataParallel gives them those of rank 0."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.register_buffer("mean", torch.zeros(6))
        self.register_buffer("seen", torch.zeros((), dtype=torch.int64))

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        self.mean.lerp_(torch.arange(6.0) + batch_idx, 0.3)
        self.seen += 1
        return super().training_step(batch, batch_idx)


def train(
    case: Case = ALL,
    pipeline: Any = "fused_sparse_dist",
    *,
    ema: dict[str, Any] | None = None,
    num_steps: int = 10,
    callbacks: Sequence[Callback] = (),
    last: Sequence[Callback] = (),
    after: Callable[..., Any] | None = None,
    options: dict[str, Any] | None = None,
    data: type[Batches] = Batches,
    model: type[Model] = Norm,
    ckpt_path: str | None = None,
    **kwargs: Any,
) -> Averaged:
    """Train with averages; `after` is called with trainer, module, data and callback, and returns what `seen` gets."""
    asked = {"decay": 0.9, "tables": True, **(ema or {})}
    average = ExponentialMovingAverage(**asked)
    plain = PlainAverage(asked["decay"], asked.get("every_n_steps", 1), asked.get("start_step", 0))
    if pipeline == "async_lookup":
        options = {"staleness": 2, **(options or {})}
    module = model(case)
    strategy = make_strategy(module, pipeline, **(options or {}))
    trainer = make_trainer(strategy, callbacks=[*callbacks, average, plain, *last], **kwargs)
    batches = data(case, num_steps)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, datamodule=batches, ckpt_path=ckpt_path)
        seen = {} if after is None else after(trainer, module, batches, average)
    averages = parts_of(average.memory())
    losses = torch.stack(module.losses) if module.losses else torch.zeros(0)
    warned = [str(one.message) for one in caught if "verage" in str(one.message)]
    off_by = plain.off_by(averages) if ckpt_path is None and plain.average is not None else 0.0
    return Averaged(off_by, averages, parts_of(module.state_dict()), losses, average.num_samples, warned, seen)


class At(Callback):
    """Calls `do` with trainer and module, in a hook at some steps."""

    def __init__(self, hook: str, steps: Sequence[int], do: Callable[..., object]) -> None:
        setattr(self, hook, self._do)
        self.steps, self.do = steps, do

    def _do(self, trainer: Trainer, module: LightningModule, *args: Any, **kwargs: Any) -> None:
        if trainer.fit_loop.epoch_loop.total_batch_idx + 1 in self.steps:
            self.do(trainer, module)


def shrink(trainer: Trainer, module: LightningModule) -> None:
    """Write all tables, as a constraint on norms does."""
    with torch.no_grad():
        for name, weight in module.named_parameters():
            if "embedding" in name:
                weight.mul_(0.9)
    trainer.strategy.tables_changed()


@contextlib.contextmanager
def expecting(error: type[BaseException]) -> Any:
    try:
        yield
    except error:
        return
    raise AssertionError(f"no {error.__name__}")


def unsharded_averages(case: Case, num_ranks: int, num_steps: int, decay: float) -> dict[str, Tensor]:
    """Train the plain module in this process, on the batches of all ranks; return plain averages of all its weights."""
    module = Model(case)
    optimizer = module.configure_optimizers()
    averages: dict[str, Tensor] = {}
    for index in range(num_steps):
        optimizer.zero_grad()
        losses = [module(make_batch(case, index, rank)) for rank in range(num_ranks)]
        (torch.stack(losses).sum() / num_ranks).backward()
        optimizer.step()
        with torch.no_grad():
            for name, weight in module.state_dict().items():
                before = averages.get(name, weight.double())
                averages[name] = before + (1 - decay) * (weight - before)
    return averages


def state_of(trainer: Trainer, module: LightningModule, data: Any, average: ExponentialMovingAverage) -> dict[str, Any]:
    with average.averaged():
        table = trainer.strategy.table("t0")
    return {"state": average.averaged_state_dict(), "table": table}


class SeesWeights(Norm):
    """Keeps the weights that each evaluation step has, and what it answers."""

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.seen_in: list[tuple[str, Parts]] = []
        self.answers: list[Tensor] = []
        self.fails_at: int | None = None

    def _evaluate(self, batch: Any, batch_idx: int) -> None:
        self.answers.append(self(batch).detach().clone())
        self.seen_in.append((str(self.trainer.state.stage), parts_of(self.state_dict())))
        if self.fails_at is not None and len(self.answers) > self.fails_at:
            raise ZeroDivisionError("in the middle of an evaluation")

    validation_step = test_step = predict_step = _evaluate


class Evaluations(Batches):
    def val_dataloader(self) -> DataLoader:
        return self.loader_of(range(100, 103))

    test_dataloader = predict_dataloader = val_dataloader


class KeepsAverages(Callback):
    """Keeps averages and trained weights as each validation begins."""

    def __init__(self) -> None:
        self.before: list[tuple[Parts, Parts]] = []  # averages, weights
        self.after: list[Parts] = []

    def on_validation_start(self, trainer: Trainer, module: LightningModule) -> None:
        average = next(one for one in trainer.callbacks if isinstance(one, ExponentialMovingAverage))
        average.bring_up_to_date()
        with average.trained_weights():
            state = parts_of(module.state_dict())
            self.before.append((state | parts_of(average.memory()) if average.num_samples else state, state))


class KeepsWeights(Callback):
    """Keeps the weights after each validation, which are the trained ones wherever this stands among the callbacks."""

    def __init__(self, kept: KeepsAverages) -> None:
        self.kept = kept

    def on_validation_end(self, trainer: Trainer, module: LightningModule) -> None:
        self.kept.after.append(parts_of(module.state_dict()))


def validate_while_training(case: Case, pipeline: str, ema: dict[str, Any], **kwargs: Any) -> dict[str, Any]:
    """Train with validations in the middle and evaluations afterwards; say what was not as it should be."""
    kept = KeepsAverages()

    def evaluate(trainer: Trainer, module: Any, data: Any, average: ExponentialMovingAverage) -> dict[str, Any]:
        in_fit, num = list(module.seen_in), len(kept.before)
        module.seen_in.clear()
        weights, averages = parts_of(module.state_dict()), parts_of(average.memory())
        for method in (trainer.validate, trainer.test, trainer.predict):
            method(module, datamodule=data)
        module.fails_at = len(module.answers) + 1
        with expecting(ZeroDivisionError):
            trainer.validate(module, datamodule=data)
        per = len(in_fit) // max(1, num)
        return {
            "validations": num,
            "answers": torch.stack(module.answers),
            "in_fit": [differing(seen, kept.before[place // per][0]) for place, (_, seen) in enumerate(in_fit) if per],
            "weights_back": [
                differing(now, before)
                for now, (_, before) in zip(kept.after, kept.before[:-1], strict=True)  # the last one has failed
            ],
            "later": [differing(seen, weights | averages) for _, seen in module.seen_in],
            "in_the_end": differing(parts_of(module.state_dict()), weights),
        }

    own = {
        "model": SeesWeights,
        "data": Evaluations,
        "callbacks": [kept],
        "after": evaluate,
        "last": [KeepsWeights(kept)],
    }
    found = train(case, pipeline, ema=ema, **own, **kwargs)
    return {**found.seen, "losses": found.losses, "weights": found.weights, "off_by": found.off_by}


def differing(mine: Parts, theirs: Parts) -> list[str]:
    return sorted(name for name in mine.keys() | theirs.keys() if not torch.equal(mine[name], theirs[name]))


class SavesAt(Callback):
    """Saves after some steps, in the middle of validations too; goes before or behind the averaging callback."""

    def __init__(self, folder: str, steps: Sequence[int]) -> None:
        self.folder, self.steps = folder, steps
        self.weights: dict[str, Parts] = {}

    def _save(self, trainer: Trainer, module: LightningModule, name: str) -> None:
        trainer.save_checkpoint(f"{self.folder}/{name}.ckpt")
        average = next(one for one in trainer.callbacks if isinstance(one, ExponentialMovingAverage))
        with average.trained_weights():
            self.weights[name] = parts_of(module.state_dict())

    def on_train_batch_end(self, trainer: Trainer, module: LightningModule, *_: Any) -> None:
        name = f"step={trainer.global_step}"
        if trainer.global_step in self.steps and name not in self.weights:  # not in the middle of an accumulation
            self._save(trainer, module, name)

    def on_validation_batch_end(self, trainer: Trainer, module: LightningModule, _: Any, __: Any, index: int) -> None:
        if index == 1 and trainer.global_step in self.steps:
            self._save(trainer, module, f"validating={trainer.global_step}")


class StatefulData(StatefulBatches):
    def __init__(self, case: Case, num_steps: int) -> None:
        super().__init__("own-sized", num_steps, case)

    def val_dataloader(self) -> DataLoader:
        batches = [make_batch(self.case, index, self.trainer.global_rank) for index in range(100, 103)]
        return DataLoader(batches, batch_size=None)


def train_saving(
    case: Case, pipeline: str, folder: str, steps: Sequence[int], resume: str | None, **kwargs: Any
) -> Any:
    """Train two epochs, or go on from a checkpoint of the folder; `first` saves before the sample of its step."""
    saver = SavesAt(folder, steps)
    own: dict[str, Any] = {"data": StatefulData, "num_steps": 8, "max_epochs": 2, "val_check_interval": 3}
    own["callbacks" if kwargs.pop("first", False) else "last"] = [saver]
    found = train(case, pipeline, ckpt_path=resume and f"{folder}/{resume}.ckpt", **{**own, **kwargs})
    found.seen["saved"] = saver.weights
    return found


def whole(of_ranks: Sequence[Averaged], what: str = "averages") -> dict[str, Tensor]:
    """Put the parts of all ranks together."""
    windows: dict[str, list[tuple[list[tuple[int, int]], Tensor]]] = {}
    for one in of_ranks:
        for key, part in getattr(one, what).items():
            name, _, window = key.partition(" ")
            windows.setdefault(name, []).append((ast.literal_eval(window), part))
    found: dict[str, Tensor] = {}
    for name, parts in windows.items():
        size = [max(window[dim][1] for window, _ in parts) for dim in range(parts[0][1].dim())]
        found[name] = torch.zeros(size, dtype=parts[0][1].dtype)
        for window, part in parts:
            found[name][tuple(slice(*ends) for ends in window)] = part
    return found


def load_and_validate(case: Case, path: str, **kwargs: Any) -> Averaged:
    """Validate a checkpoint with a module of other weights, and return the weights that validation steps have."""
    average = ExponentialMovingAverage(0.9, tables=True)
    module = SeesWeights(case)
    with torch.no_grad():
        for weight in module.parameters():
            weight.zero_()
    callbacks = [average] if kwargs.pop("averages", True) else []
    trainer = make_trainer(make_strategy(module, "fused_sparse_dist"), callbacks=callbacks)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.validate(module, datamodule=Evaluations(case, 1), ckpt_path=path)
    warned = [str(one.message) for one in caught if "verage" in str(one.message)]
    return Averaged(
        0, module.seen_in[-1][1], parts_of(module.state_dict()), torch.zeros(()), average.num_samples, warned
    )


def save_averages(case: Case, path: str, **kwargs: Any) -> Averaged:
    """Train, and save the averages as the module's weights, in the fit or after it."""

    def save(trainer: Trainer, module: Any, *_: Any) -> dict[str, Any]:
        average = next(one for one in trainer.callbacks if isinstance(one, ExponentialMovingAverage))
        with average.averaged():
            trainer.save_checkpoint(path)
        return {"state": average.averaged_state_dict()}

    if kwargs.pop("in_fit"):
        kwargs |= {"last": [At("on_train_batch_end", [7], save)], "num_steps": 7}
        return train(case, "semi_sync_deferred", after=state_of, **kwargs)
    return train(case, "semi_sync_deferred", after=save, num_steps=7, **kwargs)


def saves_last(folder: str) -> ModelCheckpoint:
    return ModelCheckpoint(folder, save_last=True)
