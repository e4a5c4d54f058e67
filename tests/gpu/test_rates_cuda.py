"""Learning rates that move, on CUDA: the first test of `sparse/test_update_rates.py` for each stream policy."""

from typing import Any

import pytest
import torch
from torch import Tensor

from lightning_overlap import MODES, STREAMS

from ..sparse import update_rates
from ..support import reference
from ..support.cases import Case
from ..support.ranks import Ranks
from .test_laws_cuda import ADAM

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def _reference(case: Case, pipeline: str) -> reference.Result:
    torch.use_deterministic_algorithms(True, warn_only=True)
    options = {"num_steps": update_rates.NUM_STEPS, "factor": update_rates.factor, "device_type": "cuda"}
    if staleness := MODES[pipeline].staleness:
        return reference.train_delayed(case, reference.Delayed(staleness), **options)
    return reference.train(case, **options)


def _fit(case: Case, pipeline: str, stream: str) -> reference.Result:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return update_rates.fit(case, pipeline, stream=stream, device_type="cuda")


@pytest.mark.parametrize("case", [*update_rates.CASES, ADAM], ids=lambda case: case.name)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("pipeline", MODES)
def test_the_update_of_a_batch_takes_the_rate_of_its_step(gpus: Ranks, case: Case, pipeline: str, stream: str) -> None:
    expected = gpus.run(_reference, case, pipeline)
    actual = gpus.run(_fit, case, pipeline, stream)
    assert [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)] == [[]] * gpus.world_size


class _TellsItsStream(torch.autograd.Function):
    @staticmethod
    def forward(ctx: Any, x: Tensor, seen: list[torch.cuda.Stream]) -> Tensor:
        ctx.seen = seen
        return 2 * x

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        ctx.seen.append(torch.cuda.current_stream())
        return None, None


class _RepeatsInBackward(_TellsItsStream):
    """As `sparse/update_rates.py`: makes a graph in its backward, and runs it there."""

    @staticmethod
    def backward(ctx: Any, *grads: Tensor) -> tuple[None, None]:
        with torch.enable_grad():
            again = _TellsItsStream.apply(torch.ones(4, device="cuda", requires_grad=True), ctx.seen)
        torch.autograd.backward(again, grads[0])
        return _TellsItsStream.backward(ctx)


def test_a_graph_made_in_a_backward_runs_on_the_stream_of_that_backward() -> None:
    """What `testing/checked_streams.py` takes for granted."""
    side, seen = torch.cuda.Stream(), list[torch.cuda.Stream]()
    x = torch.ones(4, device="cuda", requires_grad=True)
    side.wait_stream(torch.cuda.current_stream())
    with torch.cuda.stream(side):
        rows = _RepeatsInBackward.apply(x, seen)
    torch.cuda.current_stream().wait_stream(side)
    (rows * 2).sum().backward()
    torch.cuda.synchronize()
    assert seen == [side, side]
