"""The all-to-alls of the input dist in a run. Functions that ranks run."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch import nn

from lightning_overlap.distributed import Issue, wrap_collectives

from .cases import TABLE_WISE, Batches, Model
from .fits import make_strategy, make_trainer


@contextmanager
def of_input_dist() -> Iterator[list[dict[str, Any]]]:
    calls: list[dict[str, Any]] = []

    def keep(name: str, call: dict[str, Any], issue: Issue) -> dist.Work | None:
        if call["group"].group_desc == "lookahead":
            calls.append(call)
        return issue()

    with wrap_collectives(keep, ["all_to_all_single"]):
        yield calls


def dtypes_of_a_run(num_batches: int) -> tuple[list[torch.dtype], set[torch.dtype]]:
    looked_up: set[torch.dtype] = set()

    def look(module: Any, args: tuple[Any, ...]) -> None:
        if type(module).__name__ == "GroupedPooledEmbeddingsLookup":
            looked_up.update((args[0].values().dtype, args[0].lengths().dtype))

    model = Model(TABLE_WISE)
    with of_input_dist() as calls, nn.modules.module.register_module_forward_pre_hook(look):
        make_trainer(make_strategy(model)).fit(model, datamodule=Batches(TABLE_WISE, num_batches))
    return [call["input"].dtype for call in calls], looked_up
