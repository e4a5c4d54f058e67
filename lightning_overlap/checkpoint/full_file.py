"""Checkpoints of sharded tables as one file of plain tensors, which also loads into the unsharded module."""

import io
import socket
import zipfile
from collections.abc import Iterator, Mapping, Sequence
from functools import partial
from pathlib import Path
from typing import IO, Any, cast

import torch
import torch.distributed as dist
from lightning_utilities.core.apply_func import apply_to_collection
from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.distributed.types import ShardedTensor

from ..distributed import Group, gather_objects, together, warn_on_rank_zero
from ..storage import About, DamagedError, Place, SealedFile, put_file, read_seal
from ..tables import hands_out_rows, rate_setter, sharded_modules
from ..text import some, without_secrets
from .dense_state import State, empty_table_states, load_by_name, put_table_states
from .managed_collision_state import Generators
from .model_state import ordered, restore_objects
from .moved_ids import Move, move_ids, segment_names
from .parts import (
    AVERAGES,
    COLLISIONS,
    ENTRIES,
    FUSED,
    FUSED_CLASSES,
    MODEL,
    MODEL_OBJECTS,
    SHARDED_NAMES,
    TABLE_OPTIMIZERS,
    rename_former_entries,
)
from .plain_state import take_plain_state
from .rate_groups import match_rate_groups
from .sharded_folder import (
    is_rank_zero,
    on_rank_zero,
    read_file,
    take_state,
    writing,
)
from .table_state import Loading, fill_from_whole, first_owners, local_parts


def gather_checkpoint(
    checkpoint: dict[str, Any], model: nn.Module, group: Group, generators: Generators | None = None
) -> dict[str, Any] | None:
    """Return Lightning's checkpoint with unsharded tensors on rank 0; None on other ranks. Every rank calls this."""
    names = list(checkpoint["state_dict"])
    state = take_state(checkpoint, model, group, generators=generators)
    parts = (MODEL, FUSED, TABLE_OPTIMIZERS, AVERAGES, COLLISIONS)
    gathered = {part: dict(gather(state.get(part, {}), group)) for part in parts}
    if not is_rank_zero(group):
        return None
    del checkpoint[SHARDED_NAMES]
    restore_objects(checkpoint, gathered.pop(MODEL))
    whole = checkpoint["state_dict"]
    for name in names:
        whole.move_to_end(name)
    return {
        **checkpoint,
        **{ENTRIES[part]: pieces for part, pieces in gathered.items() if pieces},
    }


def gather(pieces: Mapping[str, Any], group: Group) -> Iterator[tuple[str, Tensor]]:
    """Gather tensors; yield (name, unsharded tensor on the host) on rank 0. All ranks iterate to the end."""
    rank = 0 if group is None else group.rank()
    tensors = {key: piece for key, piece in pieces.items() if isinstance(piece, Tensor)}
    mine = {
        key: (tuple(piece.size()), piece.dtype, [window for window, _ in local_parts(piece)])
        for key, piece in tensors.items()
    }
    everyone = gather_objects(mine, group)
    for key in sorted(set().union(*everyone)):
        size, dtype, _ = next(theirs[key] for theirs in everyone if key in theirs)
        chunks = first_owners([theirs[key][2] if key in theirs else () for theirs in everyone])
        parts = local_parts(tensors[key]) if key in tensors else []
        if rank != 0:
            for window, part in parts:
                if (rank, window) in chunks:
                    dist.send(part.cpu().contiguous(), group_dst=0, group=group)
        elif [owner for owner, _ in chunks] == [0] and parts[0][1].shape == size:
            yield key, parts[0][1].cpu()
        else:
            whole = torch.empty(size, dtype=dtype)
            for owner, window in chunks:
                into = whole[window]
                if owner == 0:
                    part = next(part for place, part in parts if place == window)
                else:
                    part = into if into.is_contiguous() else torch.empty(into.shape, dtype=dtype)
                    dist.recv(part, group_src=owner, group=group)
                into.copy_(part)
            yield key, whole


def write_file(content: dict[str, Any] | None, place: Place, group: Group, about: About | None = None) -> None:
    """Write a result of `gather_checkpoint` as one local file; every rank raises an OSError if it failed."""

    def write() -> None:
        with place.one_file() as file:
            sealed = SealedFile(file)
            torch.save(content, cast(IO[bytes], sealed))
            sealed.seal(about)

    with writing(place):
        on_rank_zero(write, group)


def upload_file(content: dict[str, Any] | None, address: str, group: Group) -> None:
    """Write a result of `gather_checkpoint` to an address of fsspec; every rank raises an OSError if it failed."""

    def write() -> None:
        buffer = io.BytesIO()
        torch.save(content, buffer)
        put_file(address, buffer.getvalue())

    with writing(without_secrets(address)):
        on_rank_zero(write, group)


def check_file(path: Path, group: Group) -> None:
    """Raise a DamagedError on every rank if a checkpoint file has not the bytes that were saved; all ranks call this.

    The ranks of a host share the reading. A file without checksums, as Lightning writes it, is not checked.
    """
    hosts = gather_objects(socket.gethostname(), group)
    rank = 0 if group is None else group.rank()
    on_this_host = [other for other, host in enumerate(hosts) if host == hosts[rank]]

    def check() -> None:
        try:
            if (seal := read_seal(path)) is not None:
                seal.check(on_this_host.index(rank), len(on_this_host))
        except DamagedError as err:
            place = f" (found by rank {rank} on {hosts[rank]})" if len(set(hosts)) > 1 else ""
            raise DamagedError(f"{err}{place}") from err

    together(check, group, alike=(DamagedError,))


def load_file(path: Path, *, weights_only: bool | None) -> dict[str, Any]:
    """Read a checkpoint file; weights, averages and states of tables stay on the disk until they are copied."""
    checkpoint = read_file(path, weights_only=weights_only, mmap=zipfile.is_zipfile(path))
    rename_former_entries(checkpoint)
    checkpoint.pop(SHARDED_NAMES, None)
    if MODEL_OBJECTS in checkpoint and "state_dict" in checkpoint:  # Lightning's consolidate command has left it there
        restore_objects(checkpoint, checkpoint["state_dict"])
    if "state_dict" not in checkpoint:
        has = some(map(str, checkpoint)) or "nothing"
        raise ValueError(
            f"{path} is no checkpoint of Lightning: it has {has}, but no 'state_dict'. "
            "If it is a module's own state_dict, load it before the fit: module.load_state_dict(torch.load(...))."
        )
    copied_later = ("state_dict", *ENTRIES.values())
    return {
        key: value if key in copied_later else apply_to_collection(value, Tensor, Tensor.clone)
        for key, value in checkpoint.items()
    }


def load_collisions(checkpoint: Mapping[str, Any], model: nn.Module, group: Group) -> tuple[dict[str, Any], list[Move]]:
    """Copy unsharded state of managed collision modules and their tables into a sharded module, with its ids moved.

    Returns a checkpoint with the sharded state in its place, and how rows have moved, for `load_fused`. All ranks call
    this. Raises a RuntimeError if the state was saved from another model.
    """
    whole, mine = checkpoint["state_dict"], model.state_dict()
    segments = segment_names(model)
    within = tuple(f"{name}." for name, module in sharded_modules(model).items() if hands_out_rows(module))
    pieces = {
        key: torch.empty_like(piece) if key in segments else piece
        for key, piece in mine.items()
        if key.startswith(within) and isinstance(whole.get(key), Tensor) and not isinstance(whole[key], ShardedTensor)
    }
    together(partial(fill_from_whole, pieces, whole), group)
    moves = move_ids(model, {name: pieces[key] for key, name in segments.items() if key in pieces}, group)
    for move in moves:
        move.apply(pieces, of_optimizers=False)
    state_dict = ordered({**whole, **{key: mine[key] for key in pieces}}, like=whole)
    return {**checkpoint, "state_dict": state_dict}, moves


def load_fused(
    checkpoint: State,
    optimizers: Sequence[Optimizer],
    schedulers: Sequence[Any],
    model: nn.Module,
    group: Group,
    moves: Sequence[Move] = (),
) -> None:
    """Copy fused optimizer state into the kernels, unless `load_folder` has loaded it; all ranks call this.

    `moves` are those of `load_collisions`.

    Raises a RuntimeError if the state was saved from another model, or with another fused optimizer.
    """
    warned = take_plain_state(checkpoint, optimizers, schedulers, model, group)
    match_rate_groups(checkpoint, optimizers, schedulers)
    num_schedulers = len(checkpoint.get("lr_schedulers", []))
    if num_schedulers > len(schedulers):  # Lightning drops the others without a word
        warn_on_rank_zero(
            f"the checkpoint has {num_schedulers} learning-rate scheduler(s), this run has {len(schedulers) or 'none'}:"
            " their state is not used, and a learning rate that no scheduler of this run moves stays as it was saved. "
            "To go on with the schedule, return the same schedulers from configure_optimizers."
        )
    saved = checkpoint.get(ENTRIES[FUSED], {})
    if saved is None:  # `load_folder` has loaded it
        return

    def plan_and_fill() -> Loading:
        moves_rates = rate_setter(optimizers) is not None
        loading = Loading(model, saved, checkpoint.get(FUSED_CLASSES, {}), warned, moves_rates=moves_rates)
        fill_from_whole(loading.pieces, saved)
        return loading

    loading = together(plan_and_fill, group)
    for move in moves:
        move.apply(loading.pieces, of_optimizers=True)
    loading.finish()


def load_dense(checkpoint: Mapping[str, Any], optimizers: Sequence[Optimizer], model: nn.Module) -> None:
    """Load the state of the optimizers of `configure_optimizers`, after `load_fused`; raise as `load_by_name` does."""
    states, saved = checkpoint["optimizer_states"], checkpoint.get(ENTRIES[TABLE_OPTIMIZERS], {})
    pieces = empty_table_states({key: (value.shape, value.dtype) for key, value in saved.items()}, model)
    fill_from_whole(pieces, saved)
    put_table_states(pieces, states)
    moved = set().union(*(load_by_name(*pair, model) for pair in zip(optimizers, states, strict=False)))
    if moved:
        warn_on_rank_zero(
            f"{', '.join(sorted(moved))}: the dense optimizer trains these tables only in the saved run or only in "
            "this run; its state for them is reset or not used."
        )
