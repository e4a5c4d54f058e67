"""Modules of which a part is compiled, and a watch on what Dynamo traces in a fit. Functions that ranks run."""

import sys
from collections.abc import Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from pathlib import Path
from typing import Any
from unittest import mock

import torch
from torch import Tensor, nn
from torch._dynamo import eval_frame
from torch._dynamo.symbolic_convert import InstructionTranslatorBase
from torch.utils.checkpoint import checkpoint

import lightning_overlap
from lightning_overlap.tuning import Auto

from ..support.cases import Batch, Batches, ByHand, Case, Model, summed
from ..support.fits import make_strategy, make_trainer
from ..support.reference import Result, collect

OURS = str(Path(lightning_overlap.__file__).parent)
NUM_STEPS = 5
NUM_STEPS_OF_AUTO = 14  # some in each mode
AUTO = Auto(warm_up=1, settle=1, block=2, rounds=1)


class Head(nn.Module):
    """The dense part: takes the collections' output as it comes, and uses it first."""

    def __init__(self, model: Model, way: str, breaks: bool) -> None:
        super().__init__()
        self.bottom, self.top, self.tables = model.bottom, model.top, model.case.tables
        self.is_sequence, self.way, self.breaks = model.case.sequence, way, breaks

    def forward(self, dense: Tensor, labels: Tensor, outputs: Any) -> Tensor:
        merged = [self.bottom(dense)]
        if self.breaks:
            torch._dynamo.graph_break()
        for output in outputs:
            merged += self.columns(output)
        logits = self.top(torch.cat(merged, dim=1)).squeeze(1)
        if self.breaks:
            torch._dynamo.graph_break()
        return nn.functional.binary_cross_entropy_with_logits(logits, labels)

    def columns(self, output: Any) -> list[Tensor]:
        """Read the output of a collection in one of the ways that users do."""
        if self.is_sequence:
            pairs = output.items() if self.way == "values" else [(key, output[key]) for key in output]
            return [summed(jagged) for _, jagged in sorted(pairs)]
        if self.way == "values":
            return [output.values()]
        if self.way == "tensors":
            return [output]
        if self.way == "dict":
            return [*output.to_dict().values()]
        return [torch.clone(output[key]) for key in output.keys()]  # noqa: SIM118


class Compiled(Model):
    def __init__(self, case: Case, way: str, breaks: bool, asks: bool) -> None:
        super().__init__(case)
        self.head, self.head_reads, self.asks = Head(self, way, breaks), way, asks
        self.asked: list[Any] = []

    def training_step(self, batch: Batch, batch_idx: int) -> Tensor:
        loss = super().training_step(batch, batch_idx)
        if self.asks:
            self.ask(loss)
        return loss

    def ask(self, loss: Tensor) -> None:
        """Call what a step may call of the trainer, of the strategy and of a callback."""
        strategy: Any = self.trainer.strategy
        first = self.case.tables[0].name
        whole = strategy.table(first)
        chunks = [rows for _, rows in strategy.table_chunks(first, num_rows=50)]
        self.asked.append((whole - torch.cat(chunks)).abs().sum() + self.all_gather(whole).sum())
        self.asked.append(strategy.num_in_flight + len(strategy.split_modules) + self.trainer.global_step)

    def forward(self, batch: Batch, embeddings: Any = None) -> Tensor:
        outputs = [self.embeddings(name, batch) for name in sorted(self.case.collections)]
        if self.head_reads == "tensors":
            outputs = [output.values() for output in outputs]
        return self.head(batch.dense, batch.labels, outputs)


class CompiledByHand(ByHand, Compiled):
    def training_step(self, batch: Batch, batch_idx: int) -> None:
        loss = super().training_step(batch, batch_idx)
        optimizer = self.optimizers()
        optimizer.zero_grad()
        self.manual_backward(loss)
        optimizer.step()


@dataclass(frozen=True)
class Way:
    """How a module is compiled, and how its dense part reads embeddings."""

    case: Case
    pipeline: str
    part: str = "head"  # what is compiled
    reads: str = "values"  # one of `READS`, or "tensors": those that the step has read
    breaks: bool = False
    by_hand: bool = False
    asks: bool = False  # whether its step calls what else the package has


PARTS = ("module", "step", "head", "head in place", "function", "layer")
READS = ("values", "dict", "keys")


def _with_checkpoint(own: Any) -> Any:
    return lambda *args: checkpoint(own, *args, use_reentrant=False)


def _with_reentrant_checkpoint(own: Any) -> Any:
    def call(*args: Any) -> Any:
        anchor = torch.zeros((), requires_grad=True)  # it wants an input that needs a gradient
        return checkpoint(lambda anchor: own(*args) + 0 * anchor, anchor, use_reentrant=True)

    return call


def _with_vjp(own: Any) -> Any:
    return lambda dense, *args: torch.func.vjp(lambda dense: own(dense, *args), dense)[0]


WRAPPERS = {"checkpoint": _with_checkpoint, "reentrant": _with_reentrant_checkpoint, "vjp": _with_vjp}


def compile_part(model: Compiled, part: str, **options: Any) -> Any:
    """Compile a part of a module; return what a user gives to `fit`."""
    if part == "module":
        return torch.compile(model, **options)
    if part == "step":
        model.training_step = torch.compile(model.training_step, **options)  # type: ignore[method-assign]
    elif part == "head":
        model.head = torch.compile(model.head, **options)
    elif part == "head in place":
        model.head.compile(**options)
    elif part == "function":
        model.head.forward = torch.compile(model.head.forward, **options)  # type: ignore[method-assign]
    elif part == "collection":
        model.ebc = torch.compile(model.ebc, **options)
    elif part in WRAPPERS:
        model.head.forward = WRAPPERS[part](model.head.forward)  # type: ignore[method-assign]
    elif part == "layer":
        model.top[0] = torch.compile(model.top[0], **options)
    return model


@dataclass
class Traced:
    """What Dynamo has traced: how many frames, and those that are ours, or that ours have called."""

    num: int = 0
    wrong: tuple[str, ...] = ()


@contextmanager
def watching(found: Traced) -> Iterator[None]:
    """Note each frame that Dynamo traces or inlines."""
    run = InstructionTranslatorBase.run

    def watched(translator: Any) -> Any:
        found.num += 1
        code = translator.f_code
        if code.co_filename.startswith(OURS) or _called_by_ours():
            name = f"{code.co_filename}:{code.co_firstlineno} {code.co_name}"
            found.wrong = tuple(dict.fromkeys([*found.wrong, name]))
        return run(translator)

    with mock.patch.object(InstructionTranslatorBase, "run", watched):
        yield


def _called_by_ours() -> bool:
    """Whether this package stands between the compiled code that the user has called and what is traced now."""
    frame = sys._getframe(2)
    while frame is not None:
        code = frame.f_code
        if code.co_filename == eval_frame.__file__ and code.co_name == "compile_wrapper":
            return False
        if code.co_filename.startswith(OURS):
            return True
        frame = frame.f_back
    return False


def fit(way: Way, backend: str | None, **options: Any) -> tuple[Result, Traced]:
    """Fit a module of which a part is compiled, or none of it; return what it trained and what was traced."""
    torch._dynamo.reset()
    model = (CompiledByHand if way.by_hand else Compiled)(way.case, way.reads, way.breaks, way.asks)
    pipeline: Any = AUTO if way.pipeline == "auto" else way.pipeline
    trainer = make_trainer(make_strategy(model, pipeline))
    given = model if backend is None else compile_part(model, way.part, backend=backend, **options)
    traced = Traced()
    with watching(traced):
        trainer.fit(given, datamodule=Batches(way.case, NUM_STEPS_OF_AUTO if way.pipeline == "auto" else NUM_STEPS))
    return collect(model, trainer.optimizers[0], model.losses), traced


def differences(ways: list[Way], backend: str) -> list[list[str]]:
    """Return for each way in what the compiled fit differs from the uncompiled one, and what was traced wrongly."""
    problems = []
    for way in ways:
        result, traced = fit(way, backend)
        found = [f"traced: {name}" for name in traced.wrong]
        if not traced.num and way.part not in WRAPPERS:
            found.append("nothing was traced")
        result.dense, result.dense_state = (_by_own_names(one) for one in (result.dense, result.dense_state))
        found += _differences(result, fit(way, None)[0], exact=backend == "eager" and way.part != "vjp")
        problems.append(found)
    torch._dynamo.reset()
    return problems


def _by_own_names(tensors: dict[str, Tensor]) -> dict[str, Tensor]:
    """Return tensors by the names that they have without `torch.compile(module)`."""
    return {name.replace("_orig_mod.", ""): tensor for name, tensor in tensors.items()}


def _differences(mine: Result, theirs: Result, *, exact: bool) -> list[str]:
    found = mine.differences(theirs)
    if exact:
        return found
    parts = [(mine.tables, theirs.tables), (mine.dense, theirs.dense)]
    pairs = [(mine.losses, theirs.losses), *((own[key], other[key]) for own, other in parts for key in other)]
    return [] if all(torch.allclose(own, other, rtol=1e-4, atol=1e-5) for own, other in pairs) else found
