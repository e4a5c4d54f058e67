"""Autograd must not add in place into a gradient of embeddings that the lookup stream still has to read.

Under a dispatch mode autograd never adds in place, so streams that follow operators cannot see it. These fits follow
none: they compare the memory that two nodes of a backward are given.
"""

import copy
from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_overlap import MODES, Mode
from lightning_overlap.schedules.stages import StreamName
from lightning_overlap.sparse.present_step import PresentStep
from lightning_overlap.testing import CheckedStreams
from lightning_overlap.testing.watched_fit import process_group

from ..support.cases import Batches, Case, Model, TableSpec
from ..support.fits import make_strategy, make_trainer

pytestmark = pytest.mark.filterwarnings("ignore:The lookup of", "ignore:You defined a `validation_step`")

ONE_TABLE = Case("one_table", (TableSpec("t0", ("f0",), dim=8),))
OVERLAPPING = [name for name, mode in MODES.items() if mode.has_sparse_stages and name != "sparse_dist"]


class _Producer(torch.autograd.Function):
    """Stands behind the dense part's output: notes the memory of the gradient that it is given."""

    @staticmethod
    def forward(ctx: Any, x: Tensor, model: Any) -> Tensor:
        ctx.model = model
        return x.clone()

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor, None]:
        ctx.model.dense_memory.append(gradient.data_ptr())
        return gradient, None


class AddsTheDensePart(Model):
    """Adds its dense part to the embeddings, and uses it once more: `+` gives both the very same gradient.

    The lookup's node, made last, is launched first. The dense part's gradient then gets a second term.
    """

    calls_with_a_copy = False

    def __init__(self, case: Case) -> None:
        super().__init__(case)
        self.out, self.side = torch.nn.Linear(8, 1), torch.nn.Linear(8, 1)
        self.dense_memory: list[int] = []
        self.lookup_memory: list[int] = []

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        kjt = batch.inputs["sparse"][0]
        dense = _Producer.apply(self.bottom(batch.dense), self)
        side = self.side(dense)
        embeddings = self.ebc(copy.copy(kjt) if self.calls_with_a_copy else kjt).values()
        node: Any = embeddings.grad_fn
        node.register_prehook(lambda gradients: self.lookup_memory.append(gradients[0].data_ptr()))
        return torch.square(self.out(dense + embeddings) + side).mean()


class CallsWithACopy(AddsTheDensePart):
    calls_with_a_copy = True


def _shared_memory(module: type[AddsTheDensePart], pipeline: str, stream: str = "dedicated") -> list[bool]:
    """Return for each step whether the dense part's gradient lies where the lookup reads its own."""
    with process_group("cpu"):
        model = module(ONE_TABLE)
        strategy = make_strategy(model, Mode(pipeline), stream=stream)  # type: ignore[arg-type]
        strategy.streams = CheckedStreams(StreamName.LOOKUP)  # asynchronous, and follows nothing
        make_trainer(strategy, limit_val_batches=0).fit(model, datamodule=Batches(ONE_TABLE, 6))
    assert len(model.dense_memory) == len(model.lookup_memory) == 6
    return [a == b for a, b in zip(model.dense_memory, model.lookup_memory, strict=True)]


@pytest.mark.parametrize("module", [AddsTheDensePart, CallsWithACopy])
@pytest.mark.parametrize("pipeline", OVERLAPPING)
def test_a_gradient_that_the_lookup_stream_reads_is_not_added_to(pipeline: str, module: type[AddsTheDensePart]) -> None:
    assert not any(_shared_memory(module, pipeline))


def test_autograd_does_add_in_place(monkeypatch: pytest.MonkeyPatch) -> None:
    """Guards the test above."""
    monkeypatch.setattr(PresentStep, "order_backward", lambda self, embeddings, **_: None)
    assert any(_shared_memory(AddsTheDensePart, "fused_sparse_dist"))


def test_no_gradient_is_held_after_a_backward_between_steps() -> None:
    held: list[int] = []

    class TrainsBetweenSteps(AddsTheDensePart):
        def on_train_batch_end(self, outputs: Any, batch: Any, batch_idx: int) -> None:
            sparse: Any = self.trainer.strategy._fit.sparse  # type: ignore[attr-defined]
            with torch.enable_grad():
                self.ebc(batch.inputs["sparse"][0]).values().sum().backward()
            held.append(len(sparse.shared.step.held_gradients))

    with process_group("cpu"):
        model = TrainsBetweenSteps(ONE_TABLE)
        strategy = make_strategy(model, "fused_sparse_dist", stream="dedicated")
        strategy.streams = CheckedStreams(StreamName.LOOKUP)
        make_trainer(strategy, limit_val_batches=0).fit(model, datamodule=Batches(ONE_TABLE, 4))
    assert held == [0] * 4


def test_no_gradient_is_held_after_its_backward(monkeypatch: pytest.MonkeyPatch) -> None:
    held: list[list[Tensor]] = []
    end_backward = PresentStep.end_backward

    def note(self: PresentStep, flight: Any) -> None:
        assert self.held_gradients, "the gradient of this step"
        end_backward(self, flight)
        held.append(list(self.held_gradients))

    monkeypatch.setattr(PresentStep, "end_backward", note)
    _shared_memory(AddsTheDensePart, "fused_sparse_dist")
    assert held == [[]] * 6
