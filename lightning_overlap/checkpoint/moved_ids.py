"""Ids of managed collision modules that were saved by other ranks: each moves to the rank that looks it up now.

A checkpoint is loaded by position first: this rank's shard of the table has some rows of it, and the buffers of its
managed collision module have the ids at the same positions, with the rows that they have in the whole table. From there
an id goes to its rank, gets a row, and takes the weights and the optimizer state of its former row along.
"""

from collections.abc import Mapping, Sequence
from dataclasses import dataclass

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

from ..compat.torchrec import SEGMENTS, KnownIds, first_row, give_rows, known_ids, ranks_of
from ..distributed import Group, gather_objects, together, warn_on_rank_zero
from ..tables import sharded_modules
from ..text import some
from .table_state import KERNEL_KINDS, Piece, StateKey, local_parts, table_weights

_BYTES_AT_ONCE = 1 << 26  # of rows, from all ranks together


def segment_names(model: nn.Module) -> dict[str, str]:
    """Return the name in `state_dict` -> module, of the buffers that say which rank had which rows."""
    return {f"{name}.{SEGMENTS}": name for name in counting_modules(model)}


def counting_modules(model: nn.Module) -> dict[str, MCHManagedCollisionModule]:
    """Return this rank's modules that count ids between evictions, by their names, the same on all ranks."""
    return {name: module for name, module in _modules(model).items() if isinstance(module, MCHManagedCollisionModule)}


def weight_of(model: nn.Module, name: str) -> str:
    """Return the name in `state_dict` of the table of a managed collision module, from the module's name."""
    outer = next(path for path in sharded_modules(model) if name.startswith(f"{path}."))
    table = name.rpartition(".")[2]
    [weight] = [key for key in table_weights(model) if key.startswith(f"{outer}.") and key.split(".")[-2] == table]
    return weight


def immovable_collisions(model: nn.Module) -> str:
    """Return the names of managed collision modules whose ids cannot move to other ranks, with their classes."""
    return some(
        f"{name} ({type(module).__name__})"
        for name, module in _modules(model).items()
        if not isinstance(module, MCHManagedCollisionModule)
    )


def _modules(model: nn.Module) -> dict[str, ManagedCollisionModule]:
    within = tuple(f"{name}." for name in sharded_modules(model))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ManagedCollisionModule) and name.startswith(within)
    }


def move_ids(model: nn.Module, segments: Mapping[str, Tensor], group: Group) -> "list[Move]":
    """Move the ids of modules that were saved in other shards; return how their rows move, for `Move.apply`.

    `segments` are the saved buffers of this name by module. The modules' buffers have been loaded by position, and all
    ranks call this. Ids for which a rank has no row are evicted by the module's policy, and a warning counts them.
    Raises a RuntimeError if an id was saved with a row that its table has not.
    """
    moves = []
    for name, module in counting_modules(model).items():
        saved, own = segments.get(name), module.get_buffer(SEGMENTS)
        if saved is not None and not torch.equal(saved.cpu(), own.cpu()):
            moves.append(_move(weight_of(model, name), module, [int(row) for row in saved if row >= 0], group))
    return moves


def exchange(values: Tensor, ranks: Tensor, group: Group) -> Tensor:
    """Send each of `values` (along dimension 0, on the host) to a rank; return what came, by sending rank."""
    if group is None or group.size() == 1:
        return values
    order = torch.argsort(ranks, stable=True)
    counts = torch.bincount(ranks, minlength=group.size())
    return _all_to_all(values[order], counts, _transposed(counts, group), group)


@dataclass(frozen=True, slots=True, eq=False)
class Move:
    """How rows of a table move between ranks."""

    weight: str  # the table's name in `state_dict`
    first: int  # this rank's first row in the table
    leave: Sequence[Tensor]  # by rank: rows of this shard that go there
    come: Sequence[Tensor]  # by rank: rows of this shard into which the rows from there are written
    most: int  # rows from one rank to another
    others: Sequence[
        tuple[int, float]
    ]  # row of the table for unknown ids, of each saved shard: its share in this one's
    group: Group

    @torch.no_grad()
    def apply(self, pieces: Mapping[str, Piece], of_optimizers: bool) -> None:
        """Move the rows of the table's pieces: of its weight, or of the state of its fused optimizer."""
        for name in sorted(pieces):
            key = StateKey.parse(name) if of_optimizers else StateKey(name, "")
            if key.weight == self.weight and key.kind not in KERNEL_KINDS:
                self._apply(pieces[name])

    def _apply(self, piece: Piece) -> None:
        [(_, part)] = local_parts(piece)
        before = part.to("cpu", copy=True)
        width = before[:1].numel()
        step = max(1, _BYTES_AT_ONCE // (width * before.element_size() * len(self.come)))
        for start in range(0, self.most, step):
            leave, come = ([rows[start : start + step] for rows in by_rank] for by_rank in (self.leave, self.come))
            sent = before[torch.cat(leave)]
            if self.group is not None and self.group.size() > 1:
                counts, others = (torch.tensor([len(rows) for rows in by_rank]) for by_rank in (leave, come))
                raw = sent.view(len(sent), width).view(torch.uint8)  # gloo knows few dtypes
                received = _all_to_all(raw, counts, others, self.group)
                sent = received.view(before.dtype).view(len(received), *before.shape[1:])
            part[torch.cat(come).to(part.device)] = sent.to(part.device)
        rows = {row: before[row - self.first] for row, _ in self.others if 0 <= row - self.first < len(before)}
        known = {row: value for found in gather_objects(rows, self.group) for row, value in found.items()}
        mean = torch.stack([known[row].double() * share for row, share in self.others]).sum(0)
        part[-1] = mean.to(part.dtype)


def _move(weight: str, module: MCHManagedCollisionModule, segments: Sequence[int], group: Group) -> Move:
    size, rank = (1, 0) if group is None else (group.size(), group.rank())
    first = first_row(module)
    places = gather_objects((first, module.output_size()), group)
    total = sum(num for _, num in places)

    def known() -> tuple[KnownIds, Tensor]:
        found = known_ids(module)
        if segments[0] != 0 or segments[-1] != total or bool(((found.rows < 0) | (found.rows >= total)).any()):
            raise RuntimeError(
                f"the checkpoint gives ids of the table {weight} rows outside of its {total} rows. Load another "
                "checkpoint."
            )
        return found, ranks_of(module, found.ids, size)

    found, ranks = together(known, group)
    names = sorted(found.metadata)
    columns = exchange(torch.stack([found.ids, found.rows, *(found.metadata[name] for name in names)], 1), ranks, group)
    ids, rows, *metadata = columns.unbind(1)
    new_rows = together(lambda: give_rows(module, ids, dict(zip(names, metadata, strict=True))), group)
    stays = new_rows >= 0
    numbers = gather_objects((len(ids), int(stays.sum())), group)
    num_known, num_kept = (sum(of_rank) for of_rank in zip(*numbers, strict=True))
    if num_kept < num_known:
        num_rows = ", ".join(str(num - 1) for _, num in places)
        warn_on_rank_zero(
            f"{weight}: {num_known - num_kept} of the checkpoint's {num_known} ids do not fit and are evicted by the "
            f"table's eviction policy. They were saved by {len(segments) - 1} ranks; now {size} ranks have {num_rows} "
            "rows for ids, and ids do not choose their rank. Evicted ids are unknown ids until they come often enough."
        )
    # Whoever has the former rows of the ids is told which of them are wanted.
    starts = torch.tensor([start for start, num in places if num])
    owners = torch.tensor([owner for owner, (_, num) in enumerate(places) if num])
    owner_of = owners[torch.searchsorted(starts, rows[stays], right=True) - 1]
    order = torch.argsort(owner_of, stable=True)
    counts = torch.bincount(owner_of, minlength=size)
    wanted, into = rows[stays][order], new_rows[stays][order]
    asked = _transposed(counts, group)
    leave = wanted if size == 1 else _all_to_all(wanted, counts, asked, group)
    most = max(gather_objects(int(torch.cat([counts, asked]).max()), group))
    return Move(
        weight,
        first,
        (leave - first).split(asked.tolist()),
        into.split(counts.tolist()),
        most,
        _shares(segments, rank, size, by_range=module.input_size() > 0),
        group,
    )


def _shares(segments: Sequence[int], rank: int, size: int, *, by_range: bool) -> list[tuple[int, float]]:
    """Return the rows for unknown ids of the saved shards whose ids come to a rank, and how much of it each is."""
    num = len(segments) - 1
    overlap = [
        max(0.0, min((rank + 1) * num, (shard + 1) * size) - max(rank * num, shard * size)) if by_range else 1.0
        for shard in range(num)
    ]
    return [(segments[shard + 1] - 1, share / sum(overlap)) for shard, share in enumerate(overlap) if share > 0]


def _transposed(counts: Tensor, group: Group) -> Tensor:
    """Return how much each rank sends to this one, from how much this one sends to each."""
    if group is None or group.size() == 1:
        return counts
    others = torch.empty_like(counts)
    dist.all_to_all_single(others, counts, group=group)
    return others


def _all_to_all(values: Tensor, counts: Tensor, others: Tensor, group: Group) -> Tensor:
    received = torch.empty((int(others.sum()), *values.shape[1:]), dtype=values.dtype)
    dist.all_to_all_single(received, values.contiguous(), others.tolist(), counts.tolist(), group=group)
    return received
