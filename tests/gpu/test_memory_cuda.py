"""What holds less memory on CUDA: ids that are given back early, copies in the compute stream's pool. Losses stay."""

from typing import Any

import pytest
import torch

from lightning_overlap import MODES, StreamName
from lightning_overlap.runtime.streams import BatchCopies, CudaStreams

from ..support import reference
from ..support.cases import MIXED, WEIGHTED, Case
from ..support.fits import fit
from ..support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]


def _reference(case: Case, staleness: int) -> reference.Result:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return reference.train_delayed(case, reference.Delayed(staleness), device_type="cuda")


def _fit(case: Case, pipeline: str, options: dict[str, Any]) -> reference.Result:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return fit(case, pipeline, device_type="cuda", options=options)


@pytest.mark.parametrize("case", [MIXED, WEIGHTED], ids=lambda case: case.name)
@pytest.mark.parametrize(
    "options", [{"release_features": True}, {"copy_in_place": True}], ids=lambda one: next(iter(one))
)
@pytest.mark.parametrize("pipeline", MODES)
def test_trains_the_same(gpus: Ranks, pipeline: str, options: dict[str, Any], case: Case) -> None:
    actual = gpus.run(_fit, case, pipeline, options)
    expected = gpus.run(_reference, case, MODES[pipeline].staleness)
    assert [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)] == [[]] * gpus.world_size


def test_a_placed_copy_does_not_write_what_is_still_read() -> None:
    """Its memory was just given back by the compute stream, where a kernel that reads it is still to run."""
    device = torch.device("cuda", torch.cuda.current_device())
    streams = CudaStreams(device, StreamName.LOOKUP)
    streams.begin_step()
    host = torch.full((1 << 20,), 3.0).pin_memory()
    wrong = 0
    for _ in range(20):
        before = torch.full((1 << 20,), 7.0, device=device)
        torch.cuda._sleep(20_000_000)
        seen = before.sum()
        address = before.data_ptr()
        del before
        with streams.on(StreamName.MEMCPY), BatchCopies(streams, "cuda"):
            copied = host.to(device, non_blocking=True)
        assert copied.data_ptr() == address, "the compute stream's pool gives it again at once"
        torch.cuda.synchronize()
        wrong += int(seen.item() != 7.0 * (1 << 20)) + int(not bool((copied == 3.0).all()))
    assert wrong == 0
