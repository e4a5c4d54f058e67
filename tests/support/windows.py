"""The reference of accumulated gradients: plain DistributedModelParallel that steps after k batches."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import NamedTuple

from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.model_parallel import DefaultDataParallelWrapper

from . import reference
from .cases import Case, make_batch
from .reference import Factor, Result, set_fused_rates, set_rates


class Window(NamedTuple):
    batches: tuple[int, ...]
    k: int  # what their losses are divided by, where the window is cut short, too


def windows_of(num_batches: int, k: int, first: int = 0) -> list[Window]:
    """Return the windows of an epoch: of k batches, at its end of fewer; from a batch on."""
    windows = [range(start, min(start + k, num_batches)) for start in range(0, num_batches, k)]
    rest = [Window(tuple(batch for batch in window if batch >= first), k) for window in windows]
    return [window for window in rest if window.batches]


def train_windows(case: Case, windows: Sequence[Window], *, factor: Factor = reference.unchanged) -> Result:
    """Train each batch of a window on a loss of 1/k, then step; each batch's backward updates the tables."""
    # Its static graph, TorchRec's default, knows no `no_sync`.
    wrapper = DefaultDataParallelWrapper(static_graph=False)
    rank, dmp, module, optimizer, device = reference.set_up(reference.split_data_parallel(case), "cpu", wrapper)
    losses = []
    for step, window in enumerate(windows):
        set_rates(optimizer, factor(step))
        set_fused_rates(dmp, factor(step))
        optimizer.zero_grad()
        for place, index in enumerate(window.batches):
            batch = reference.to_device(make_batch(case, index, rank), device)
            ddp = dmp._dmp_wrapped_module
            accumulates = isinstance(ddp, DistributedDataParallel) and place < len(window.batches) - 1
            with ddp.no_sync() if accumulates else nullcontext():
                loss = dmp(batch)
                (loss / window.k).backward()
            losses.append(loss.detach())
        optimizer.step()
    return reference.collect(module, optimizer, losses)
