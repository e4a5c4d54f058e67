"""The reference of frozen windows: plain DistributedModelParallel that looks up k batches before it updates a table."""

from collections.abc import Sequence
from contextlib import nullcontext
from typing import Any, NamedTuple

import torch
from torch import Tensor
from torch.nn.parallel import DistributedDataParallel
from torchrec import JaggedTensor, KeyedTensor
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


def train_windows(
    case: Case, windows: Sequence[Window], *, factor: Factor = reference.unchanged, updates_in_backward: bool = False
) -> Result:
    """Look up all batches of a window; train each on a loss of 1/k; update the tables in order; step.

    With `updates_in_backward` update the tables as TorchRec does, in the backward of each batch, and look up after it.
    """
    split = reference.split_data_parallel(case)
    # Its static graph, TorchRec's default, knows no `no_sync`.
    wrapper = DefaultDataParallelWrapper(static_graph=False)
    rank, dmp, module, optimizer, device = reference.set_up(split, "cpu", wrapper)
    fused = [name for name in sorted(split.collections) if not name.endswith("_dp")]
    others = [name for name in sorted(split.collections) if name.endswith("_dp")]
    losses = []
    for step, window in enumerate(windows):
        set_rates(optimizer, factor(step))
        set_fused_rates(dmp, factor(step))
        batches = [reference.to_device(make_batch(case, index, rank), device) for index in window.batches]
        optimizer.zero_grad()
        found = [] if updates_in_backward else [_look_up(module, fused, batch) for batch in batches]
        for place, batch in enumerate(batches):
            if updates_in_backward:
                found.append(_look_up(module, fused, batch))
            embeddings = found[place][0] | {name: module.embeddings(name, batch) for name in others}
            ddp = dmp._dmp_wrapped_module
            accumulates = isinstance(ddp, DistributedDataParallel) and place < len(batches) - 1
            with ddp.no_sync() if accumulates else nullcontext():
                loss = dmp(batch, embeddings)
                (loss / window.k).backward()
            losses.append(loss.detach())
            if updates_in_backward:
                _update(found[place][1])
        for _, cuts in [] if updates_in_backward else found:
            _update(cuts)
        optimizer.step()
    return reference.collect(module, optimizer, losses)


def _look_up(module: Any, names: list[str], batch: Any) -> tuple[dict[str, Any], list[tuple[Tensor, Tensor]]]:
    """Return embeddings by collection cut off from their tables, and at each cut what was received and the leaf."""
    embeddings: dict[str, Any] = {}
    cuts: list[tuple[Tensor, Tensor]] = []

    def cut(values: Tensor) -> Tensor:
        cuts.append((values, values.detach().requires_grad_()))
        return cuts[-1][1]

    for name in names:
        found = module.embeddings(name, batch).wait()
        if isinstance(found, KeyedTensor):
            embeddings[name] = KeyedTensor(found.keys(), found.length_per_key(), cut(found.values()))
        else:
            embeddings[name] = {
                key: JaggedTensor(values=cut(jagged.values()), lengths=jagged.lengths())
                for key, jagged in found.items()
            }
    return embeddings, cuts


def _update(cuts: list[tuple[Tensor, Tensor]]) -> None:
    torch.autograd.backward([received for received, _ in cuts], [leaf.grad for _, leaf in cuts])
