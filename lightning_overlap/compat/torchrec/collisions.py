"""Managed collision modules of TorchRec's: their ids, the rows that ids have, and state that is in no checkpoint."""

from collections.abc import Mapping
from typing import NamedTuple

import torch
from torch import Tensor
from torchrec.modules.mc_modules import MCHManagedCollisionModule

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "MCHManagedCollisionModule": (
        *("_current_history_buffer_offset", "_current_iter", "_history_accumulator", "_history_metadata"),
        *("_input_history_buffer_size", "_last_eviction_iter"),
    ),
}

_ITERATION = "_current_iter_tensor"  # a buffer, equal on all ranks: batches in which the module has counted ids


class SeenIds(NamedTuple):
    """What a module has noted since its last eviction, and when that was. TorchRec saves none of it."""

    iteration: int  # batches in which the module has counted ids
    evicted_at: int  # the same at its last eviction
    num_at_most: int  # ids for which there is room until the next eviction; -1 before the first batch
    ids: Tensor  # (num_ids,), int64
    metadata: Mapping[str, Tensor]  # name -> (num_ids,), int64, as the eviction policy wants it


def seen_ids(module: MCHManagedCollisionModule) -> SeenIds:
    """Return what a module has noted since its last eviction, in its memory."""
    num = module._current_history_buffer_offset
    has_begun = module._input_history_buffer_size != -1
    iteration = module._current_iter if module._current_iter != -1 else int(module.get_buffer(_ITERATION))
    return SeenIds(
        iteration,
        module._last_eviction_iter if module._current_iter != -1 else iteration,
        module._input_history_buffer_size,
        module._history_accumulator[:num] if has_begun else torch.empty(0, dtype=torch.int64, device=module.device),
        {name: values[:num] for name, values in module._history_metadata.items()},
    )


def set_seen_ids(module: MCHManagedCollisionModule, seen: SeenIds) -> None:
    """Let a module go on from what another one has noted."""
    module._current_iter, module._last_eviction_iter = seen.iteration, seen.evicted_at
    module.get_buffer(_ITERATION).fill_(seen.iteration)
    module._input_history_buffer_size, module._current_history_buffer_offset = seen.num_at_most, len(seen.ids)
    module._history_metadata.clear()
    if seen.num_at_most == -1:
        return
    module._history_accumulator = torch.empty(seen.num_at_most, dtype=torch.int64, device=module.device)
    module._history_accumulator[: len(seen.ids)] = seen.ids
    for name, values in seen.metadata.items():
        buffer = torch.zeros(seen.num_at_most, dtype=torch.int64, device=module.device)
        buffer[: len(values)] = values
        module.register_buffer(f"_history_{name}", buffer, persistent=False)
        module._history_metadata[name] = buffer


def forget_seen_ids(module: MCHManagedCollisionModule) -> None:
    """Let a module begin as TorchRec begins after a load: without ids, at the saved number of batches."""
    module._current_iter = module._last_eviction_iter = -1
    module._current_history_buffer_offset = 0
