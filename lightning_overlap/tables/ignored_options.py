"""Options of the strategy that no table takes: refused by name, before anything is sharded."""

from collections.abc import Mapping, Sequence
from typing import Any

from torch import nn
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan

from ..distributed import warn_on_rank_zero
from ..text import some
from .supported_modules import sharded_modules
from .table import Table

WAY_OUT = (
    "Let the strategy shard it: take DistributedModelParallel, or your sharder, away (docs/migration.md, 'From "
    "DistributedModelParallel by hand')"
)


def sharded_by_user(model: nn.Module) -> dict[str, str]:
    """Return the modules of a model that its user has sharded: name -> how to call it, by its wrapper if it has one."""
    wrappers = [name for name, module in model.named_modules() if isinstance(module, DistributedModelParallel)]
    found = {name for name, module in sharded_modules(model).items() if not hasattr(module, "asked_for")}
    return {
        name: next(
            (f"{one or 'the module'} (a DistributedModelParallel)" for one in wrappers if _is_in(name, one)), name
        )
        for name in sorted(found)
    }


def _is_in(name: str, wrapper: str) -> bool:
    return not wrapper or name.startswith(f"{wrapper}.")


def options_of_tables(
    sharding: Any, fused_optimizer: Any, replicate_tables: Any, rate_per_table: bool = False
) -> list[str]:
    """Return which of the strategy's options for tables ask for something."""
    given = {"fused_optimizer": fused_optimizer, "sharding": sharding, "replicate_tables": replicate_tables}
    given["rate_per_table"] = rate_per_table
    if isinstance(sharding, ShardingPlan):
        given["sharding"] = sharding.plan
    empty = (Mapping, Sequence, bool, int)
    return [
        f"{name}=" for name, value in given.items() if value is not None and (value or not isinstance(value, empty))
    ]


def refuse_ignored_options(model: nn.Module, tables: list[Table], given: list[str]) -> None:
    """Raise a ValueError if all tables were sharded by their user, who has also `given` options of the strategy."""
    users = sharded_by_user(model)
    if not given or not users or tables or len(users) < len(sharded_modules(model)):
        return
    raise ValueError(
        f"{some(given)} of the strategy has no effect on {some(dict.fromkeys(users.values()))}: it is sharded already, "
        "and its kernels go on as they were made (TorchRec's own optimizer is SGD at lr=0.01). "
        f"{WAY_OUT}. Or leave {some(given)} out, and give all of it to what shards the module: optimizers by "
        "apply_optimizer_in_backward before, types by its plan."
    )


def warn_of_unused_optimizer(tables: list[Table], in_backward: list[Table], fused: tuple[Any, dict[str, Any]]) -> None:
    """Warn if no table takes the strategy's `fused` optimizer; frozen tables may take it in another run."""
    own = [table for table in in_backward if table.trains_itself or table.fused_optimizer is not None]
    if len(own) < len(in_backward) or not tables or (all(table.fused_optimizer == fused for table in own) and own):
        return
    whole = [table.path for table in tables if table not in in_backward]
    because = [f"{some(table.path for table in own)}: with an optimizer of their own"] if own else []
    because += [f"{some(whole)}: data-parallel, trained by configure_optimizers"] if whole else []
    warn_on_rank_zero(
        f"fused_optimizer= of the strategy has no effect, as no table takes it ({'; '.join(because)}). Leave it out."
    )
