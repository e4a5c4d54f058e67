"""The parts of a checkpoint that have sharded state, part -> name -> piece, and the package's entries of it."""

from collections.abc import Mapping
from typing import Any

from torch import Tensor

MODEL, FUSED, TABLE_OPTIMIZERS = "model", "fused_optimizer", "table_optimizers"
"""Weights, state of fused optimizers, state of dense optimizers for shards of tables."""
AVERAGES = "lightning_overlap_averages"
"""Key of a checkpoint: the averages of `ExponentialMovingAverage`, by the names of the weights in `state_dict`.

A file has it (`checkpoint_format="full"`, or consolidated), and a folder once it is loaded. `checkpoint["state_dict"] |
checkpoint[AVERAGES]` is the averaged module's `state_dict`.
"""
COLLISIONS = "lightning_overlap_collisions"
"""State of managed collision modules that is in no `state_dict`, by the names of `managed_collision_state`."""

# Users add entries of their own in `on_save_checkpoint`: no entry of the package may have a name that they may choose.
_OURS = "lightning_overlap_"
ENTRIES: Mapping[str, str] = {
    **{part: f"{_OURS}{part}" for part in (FUSED, TABLE_OPTIMIZERS)},
    **{part: part for part in (AVERAGES, COLLISIONS)},
}
"""Part -> the entry of Lightning's checkpoint that has it, in a full file and once a folder is loaded."""
FUSED_CLASSES = f"{_OURS}fused_optimizer_classes"
"""The entry with the classes of the fused optimizers; in every checkpoint that has states of optimizers."""
MODEL_OBJECTS = f"{_OURS}model_objects"
"""The entry of a folder with what of the module's `state_dict` is no tensor that the folder holds, as rank 0 has it."""
SHARDED_NAMES = f"{_OURS}sharded_names"
"""The entry of a folder with the names of the tensors in the module's `state_dict` that are in sharded modules."""
LOADERS = f"{_OURS}loader_states"
"""The entry with the states of every rank's data loaders."""
ASSIGNING_RANKS = f"{_OURS}managed_collision_ranks"
"""The entry with the number of ranks whose managed collision modules assigned rows to ids."""


def rename_former_entries(checkpoint: dict[str, Any]) -> None:
    """Give the package's entries that have no prefix their present names, in place.

    They are those of an older checkpoint, and of a folder that Lightning's consolidate command has made a file of: it
    names entries as the parts of the folder. Other entries are the user's.
    """
    is_older = FUSED_CLASSES.removeprefix(_OURS) in checkpoint and FUSED_CLASSES not in checkpoint
    ours = [FUSED_CLASSES, LOADERS] if is_older else []
    if is_older or FUSED_CLASSES in checkpoint:
        ours += [ENTRIES[part] for part in (FUSED, TABLE_OPTIMIZERS) if _is_state(checkpoint.get(part))]
    if isinstance(checkpoint.get(ASSIGNING_RANKS.removeprefix(_OURS)), int) and FUSED_CLASSES not in checkpoint:
        ours.append(ASSIGNING_RANKS)
    for entry in ours:
        former = entry.removeprefix(_OURS)
        if former in checkpoint and entry not in checkpoint:
            checkpoint[entry] = checkpoint.pop(former)


def _is_state(entry: object) -> bool:
    """Whether an entry may be one of the parts: tensors by the names of weights and kinds of state."""
    return isinstance(entry, Mapping) and all(
        isinstance(name, str) and "." in name and isinstance(value, Tensor) for name, value in entry.items()
    )
