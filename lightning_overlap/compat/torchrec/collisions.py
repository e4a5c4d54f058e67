"""Managed collision modules of TorchRec's: their ids, the rows that ids have, and state that is in no checkpoint."""

from collections.abc import Callable, Mapping
from contextlib import AbstractContextManager, ExitStack
from typing import Any, NamedTuple, TypeAlias

import torch
from torch import Tensor
from torchrec.distributed.embedding_sharding import bucketize_kjt_before_all2all
from torchrec.modules.mc_modules import MCHManagedCollisionModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "MCHManagedCollisionModule": (
        *("_current_history_buffer_offset", "_current_iter", "_history_accumulator", "_history_metadata"),
        *("_eviction_policy", "_evicted", "_mch_metadata", "_mch_remapped_ids_mapping", "_mch_sorted_raw_ids"),
        *("_output_global_offset", "_update_and_evict"),
        *("_input_history_buffer_size", "_last_eviction_iter", "_input_hash_func"),
    ),
}

_ITERATION = "_current_iter_tensor"  # a buffer, equal on all ranks: batches in which the module has counted ids

_NO_ID = torch.iinfo(torch.int64).max  # in a slot that no id has
SORTED_IDS, ROWS_OF_IDS = "_mch_sorted_raw_ids", "_mch_remapped_ids_mapping"
"""Buffers of a module, with an entry for each of its rows: the ids, ascending, and their rows in the whole table."""
SEGMENTS = "_output_segments_tensor"
"""Buffer of a module: the first row of each rank's shard of the table and the end of the last, then -1."""


class KnownIds(NamedTuple):
    """The ids that have rows."""

    ids: Tensor  # (num_ids,), int64, ascending within each shard
    rows: Tensor  # (num_ids,), int64: in the unsharded table
    metadata: Mapping[str, Tensor]  # name -> (num_ids,), int64, of the eviction policy: counts, last batch, ...


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


def known_ids(module: MCHManagedCollisionModule) -> KnownIds:
    """Return copies of the ids in a module's buffers, on the host; the buffers may be those of other shards."""
    is_id = module._mch_sorted_raw_ids != _NO_ID
    return KnownIds(
        module._mch_sorted_raw_ids[is_id].cpu(),
        module._mch_remapped_ids_mapping[is_id].cpu(),
        {name: values[is_id].cpu() for name, values in module._mch_metadata.items()},
    )


def give_rows(module: MCHManagedCollisionModule, ids: Tensor, metadata: Mapping[str, Tensor]) -> Tensor:
    """Forget all ids of a module, and give rows to `ids`, distinct; return their rows in the shard, -1 for none.

    If there are more ids than rows, the module's eviction policy decides. No row is reset.
    """
    first, count = module._output_global_offset, module.output_size()
    sorted_ids, rows = module._mch_sorted_raw_ids, module._mch_remapped_ids_mapping
    sorted_ids.fill_(_NO_ID)
    rows.copy_(torch.arange(first, first + count))
    for buffer in module._mch_metadata.values():
        buffer.zero_()
    if len(ids) == 0:
        return torch.empty(0, dtype=torch.int64)
    ids, order = ids.to(sorted_ids.device).sort()
    ordered = {name: values.to(ids.device)[order.to(values.device)] for name, values in metadata.items()}
    # To the policy they are ids that were seen since the last eviction, as often and at the times that it knows.
    counts = ordered.get("counts", torch.ones_like(ids))
    module._current_iter = int(module.get_buffer(_ITERATION))
    names = [name for name, _, is_of_seen_ids in module._eviction_policy.metadata_info if is_of_seen_ids]
    module._update_and_evict(
        ids, counts.clone(), {name: ordered.get(name, torch.zeros_like(ids)).clone() for name in names}
    )
    module._evicted = False
    places = torch.searchsorted(sorted_ids, ids)
    has_row = sorted_ids[places] == ids
    for name, values in ordered.items():
        module._mch_metadata[name][places[has_row]] = values[has_row]
    found = torch.empty_like(ids)
    found[order] = torch.where(has_row, rows[places] - first, -1)
    return found.cpu()


def first_row(module: MCHManagedCollisionModule) -> int:
    """Return the first row of a module's shard in the unsharded table."""
    return int(module._output_global_offset)


def id_of_row(module: MCHManagedCollisionModule) -> Tensor:
    """Return the id of each row of a module's shard, `(rows,)`, int64, in its memory; the largest int64 for none."""
    ids = torch.empty_like(module._mch_sorted_raw_ids)
    ids[module._mch_remapped_ids_mapping - module._output_global_offset] = module._mch_sorted_raw_ids
    return ids


def ranks_of(module: MCHManagedCollisionModule, ids: Tensor, num_ranks: int) -> Tensor:
    """Return the rank that looks each id up, `(num_ids,)`, for ids on the host."""
    blocks = module.buckets()
    kjt = KeyedJaggedTensor(["ids"], ids.contiguous(), lengths=torch.tensor([len(ids)]))
    by_rank, places = bucketize_kjt_before_all2all(
        kjt,
        num_buckets=num_ranks,
        block_sizes=torch.tensor([-(-module.input_size() // blocks)]),
        total_num_blocks=torch.tensor([[blocks]]),
        output_permute=True,
        keep_original_indices=True,
    )
    return torch.repeat_interleave(torch.arange(num_ranks), by_rank.lengths().long())[places.long()]


def set_known_ids(module: MCHManagedCollisionModule, ids: Tensor, rows: Tensor, iteration: int) -> None:
    """Forget all ids of a module, and let distinct `ids` have these rows of its shard, as rows of the whole table.

    To the eviction policy each id was seen once, in the last of `iteration` batches, and none since the last eviction.
    """
    first, count = module._output_global_offset, module.output_size()
    sorted_ids, device = module._mch_sorted_raw_ids, module._mch_sorted_raw_ids.device
    ids, order = ids.to(device).sort()
    rows = rows.to(device)[order]
    is_free = torch.ones(count, dtype=torch.bool, device=device)
    is_free[rows - first] = False
    sorted_ids.fill_(_NO_ID)
    sorted_ids[: len(ids)] = ids
    module._mch_remapped_ids_mapping.copy_(torch.cat([rows, is_free.nonzero().squeeze(1) + first]))
    for name, buffer in module._mch_metadata.items():
        buffer.zero_()
        buffer[: len(ids)] = 1 if name == "counts" else iteration
    module.get_buffer(_ITERATION).fill_(iteration)
    forget_seen_ids(module)


def hash_of(module: MCHManagedCollisionModule) -> tuple[int, bool]:
    """Return the range of a module's ids (0: any), and whether it maps ids by a function of the user's first."""
    return module.input_size(), module._input_hash_func is not None


Evicting: TypeAlias = Callable[[Mapping[str, Tensor]], AbstractContextManager[None]]
"""Called with table -> rows of this rank's shard, `(num,)`, that are about to be reset; they are within the context."""


class _Evict:
    """Stands in for the method of a sharded module that resets rows."""

    def __init__(self, module: Any) -> None:
        self._reset: Callable[[Mapping[str, Tensor | None]], None] = module._evict
        self.watchers: list[Evicting] = []

    def __call__(self, evictions: Mapping[str, Tensor | None]) -> None:
        rows = {table: rows for table, rows in evictions.items() if rows is not None}
        with ExitStack() as stack:
            for watch in self.watchers if rows else ():
                stack.enter_context(watch(rows))
            self._reset(evictions)


def watch_evictions(module: Any, evicting: Evicting) -> Callable[[], None]:
    """Let `evicting` surround each reset of rows in a sharded managed collision module; return what ends this."""
    if not isinstance(vars(module).get("_evict"), _Evict):
        module._evict = _Evict(module)
    watched = module._evict
    watched.watchers.append(evicting)

    def stop() -> None:
        watched.watchers.remove(evicting)
        if not watched.watchers:
            del module._evict  # the class's method is left

    return stop
