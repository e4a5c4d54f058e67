"""Fits with frozen tables, and a plain loop that looks them up without gradients. Functions that ranks run."""

from collections.abc import Mapping
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from torch import Tensor
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap.compat.torchrec import kernels_in, lookups_of
from lightning_overlap.tables import table_modules

from ..support.cases import Batch, Case, Model, make_batch, make_plan
from ..support.reference import Result
from . import caller_fits
from .callers import NUM_STEPS, TrainsWeights
from .variants import Variant


class Frozen(Model):
    """The tables of the collection `ebc` are frozen; it notes whether embeddings have a graph, by collection."""

    def __init__(self, case: Case) -> None:
        super().__init__(case, fused_optimizer=False)
        self.ebc.requires_grad_(False)
        self.graphs: dict[str, list[bool]] = {name: [] for name in case.collections}

    def dense(self, batch: Batch, embeddings: Mapping[str, Any]) -> Tensor:
        for name, found in embeddings.items():
            parts = [one.values() for one in found.values()] if self.case.sequence else [found.values()]
            self.graphs[name].append(any(part.requires_grad for part in parts))
        return super().dense(batch, embeddings)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        cls, kwargs = self.case.dense
        own = in_backward_optimizer_filter(self.named_parameters())
        return cls([part for _, part in own if part.requires_grad], **kwargs)


class WithoutGradients(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        with torch.set_grad_enabled(collection != "ebc"):
            return super().embeddings(collection, batch)


class TrainsWeightsOfFrozen(TrainsWeights, Frozen):
    """The weights of the ids are trained, which are sent nowhere on one rank."""


class Fitted(NamedTuple):
    result: Result
    early: int  # lookups whose early embeddings were used
    graphs: dict[str, list[bool]]  # by collection, in every step
    gradients: list[bool]  # whether a weight of the frozen tables' kernels has a gradient


def fit(case: Case, pipeline: str) -> Fitted:
    """Train with frozen tables under the strategy."""
    module = Frozen(case)
    options = {"fused_optimizer": case.optimizer} if len(case.collections) > 1 else {}
    plan = make_plan(case, module, dist.get_world_size())
    found = caller_fits.fit(module, plan, Variant(case, "", NUM_STEPS), pipeline, options, limit_val_batches=0)
    lookups = lookups_of(table_modules(module)["ebc"])
    kernels = [kernel for lookup in lookups for _, kernel in kernels_in(lookup)]
    gradients = [weight.grad is not None for kernel in kernels for weight in kernel.parameters()]
    return Fitted(found.result, found.early, module.graphs, gradients)


def by_hand(case: Case) -> Result:
    """Train in a plain loop of DistributedModelParallel that looks up `ebc` without gradients."""
    module, rank = WithoutGradients(case), dist.get_rank()
    plan = make_plan(case, module, dist.get_world_size())
    return caller_fits.loop(module, plan, lambda index: make_batch(case, index, rank), NUM_STEPS)


def trained_weights(case: Case, pipeline: str) -> tuple[float, dict[str, list[bool]]]:
    """Train weights of ids of frozen tables on one rank; return the trained scale, and whether there were graphs."""
    module = TrainsWeightsOfFrozen(case)
    plan = make_plan(case, module, dist.get_world_size())
    caller_fits.fit(module, plan, Variant(case, "", NUM_STEPS), pipeline, limit_val_batches=0)
    return module.scale.item(), module.graphs
