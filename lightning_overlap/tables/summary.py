"""Which table is sharded how, and what trains it: a few lines for people."""

from __future__ import annotations

from collections.abc import Iterable, Mapping
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchrec.distributed.embedding_types import EmbeddingComputeKernel

from .sharded_module import fused_rates
from .supported_modules import sharded_modules, spec_of, tables_of
from .table import _some

NUM_NAMED = 3
"""Tables of one kind that are named; of more there is a number."""


def table_lines(model: nn.Module, optimizers: Iterable[Optimizer], *, scheduled: bool, moved: bool) -> list[str]:
    """Return a line for all tables of one module that are sharded alike and trained alike.

    Args:
        model: Its tables are sharded.
        optimizers: Those of `configure_optimizers`.
        scheduled: Whether a scheduler moves learning rates.
        moved: Whether those of the fused tables are among them.
    """
    owner_of = {id(p): type(one).__name__ for one in optimizers for group in one.param_groups for p in group["params"]}
    lines = []
    for name, module in sharded_modules(model).items():
        collection = module if spec_of(module) is None else tables_of(module)
        plan: Mapping[str, Any] = getattr(collection, "module_sharding_plan", None) or {}
        weights = {path.split(".")[-2]: weight for path, weight in collection.named_parameters() if "." in path}
        rates, classes = fused_rates(module), getattr(module, "fused_optimizers_of_tables", {})
        alike: dict[tuple[str, str], list[str]] = {}
        for table, parameter in plan.items():
            if parameter.compute_kernel == EmbeddingComputeKernel.DENSE.value:
                owner = owner_of.get(id(weights.get(table)))
                trainer = f"{owner} of configure_optimizers" if owner else "nothing (requires_grad=False)"
            elif rates is None:
                trainer = "the optimizer of its kernel"
            elif table not in rates:
                trainer = "nothing (requires_grad=False)"
            else:
                constant = ", constant: the scheduler does not move it (see combined_optimizer)"
                trainer = (
                    f"{classes.get(table, 'an optimizer')} in the backward, lr {rates[table]:g}"
                    f"{constant if scheduled and not moved else ''}"
                )
            alike.setdefault((parameter.sharding_type, trainer), []).append(table)
        for (kind, trainer), tables in alike.items():
            lines.append(f"{name}: {_some(tables, NUM_NAMED)}: {kind}, trained by {trainer}")
    return lines
