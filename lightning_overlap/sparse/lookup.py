"""Look up a sharded module's tables: in parts by who writes them, each after its last update."""

from __future__ import annotations

from collections.abc import Mapping
from contextlib import AbstractContextManager, nullcontext
from typing import Any

import torch
from torch import Tensor
from torchrec.distributed.types import Awaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..schedules import WeightOwner
from ..tables import SetRates, owners_of_parts
from .module_context import ModuleContext, replaced
from .update_rates import _updates_at_present_rate


def look_up(
    state: ModuleContext, owners: frozenset[WeightOwner], set_rates: SetRates | None, *, defers_update: bool
) -> None:
    """Look up the tables of a module that belong to `owners` and start their output dists, on the current stream.

    A module of one owner takes TorchRec's own `compute_and_output_dist`. In a mixed one each call looks up the parts of
    the given owners, and the last call assembles the module's output.

    Args:
        state: The batch in this module, with its received ids; gets the output (`embeddings`) once all parts are there.
        owners: Who writes the tables that are to be looked up.
        set_rates: Gives the kernels the present learning rates. The update of this batch then takes the rate that holds
            in its backward, not at this lookup. None: no scheduler moves the rates.
        defers_update: Whether to cut the graph of fused tables' embeddings for a deferred update.
    """
    parts = parts_to_look_up(state, owners)
    with (
        _updates_at_present_rate(state.module, set_rates),
        deferring_update(state) if defers_update else nullcontext(),
    ):
        if len(parts) == len(owners_of_parts(state.module)):
            state.embeddings = state.module.compute_and_output_dist(state.context, state.dist_input)
            state.dist_input = None
        else:
            _start_output_dist(state, _compute(state, parts))


def deferring_update(state: ModuleContext) -> AbstractContextManager[None]:
    """Within this context output dists cut the graph of fused tables' embeddings, for `state.deferred`."""
    owners = owners_of_parts(state.module)
    if WeightOwner.FUSED_BACKWARD not in owners:
        return nullcontext()
    dists = [
        state.deferred.deferring(dist) if owner is WeightOwner.FUSED_BACKWARD else dist
        for dist, owner in zip(state.module._output_dists, owners, strict=True)
    ]
    return replaced(state.module, "_output_dists", dists)


def _compute(state: ModuleContext, parts: list[int]) -> dict[int, Tensor]:
    """Run the kernels of some parts; return the embeddings by part, before their output dist."""
    module = state.module
    lookups = [lookup if part in parts else _NOTHING for part, lookup in enumerate(module._lookups)]
    with replaced(module, "_lookups", lookups):
        embeddings = module.compute(state.context, state.dist_input)
    return {part: embeddings[part] for part in parts}


def _start_output_dist(state: ModuleContext, embeddings: Mapping[int, Tensor]) -> None:
    """Start the output dists of some parts; once all parts have theirs, assemble the module's output."""
    module = state.module
    num_parts = len(owners_of_parts(module))
    for part, of_part in embeddings.items():
        state.output_dist_awaitables[part] = module._output_dists[part](of_part, state.context.sharding_contexts[part])
    if len(state.output_dist_awaitables) == num_parts:
        started = [state.output_dist_awaitables[part] for part in range(num_parts)]
        with replaced(module, "_output_dists", [_already_started] * num_parts):
            state.embeddings = module.output_dist(state.context, started)
        state.output_dist_awaitables = {}
        state.dist_input = None


def parts_to_look_up(state: ModuleContext, owners: frozenset[WeightOwner]) -> list[int]:
    """Return the parts of a module whose tables belong to `owners` and are still to be looked up."""
    return [
        part
        for part, owner in enumerate(owners_of_parts(state.module))
        if owner in owners and part not in state.output_dist_awaitables
    ]


class _Nothing:
    """Stands for the lookup of a part that is not run now, and for its embeddings."""

    def __call__(self, features: KeyedJaggedTensor) -> _Nothing:
        return self

    def view(self, *shape: int) -> _Nothing:
        return self


_NOTHING = _Nothing()


def _already_started(output: Awaitable[torch.Tensor], context: Any) -> Awaitable[torch.Tensor]:
    """Stand for an output dist where the module assembles what `_start_output_dist` has started."""
    return output
