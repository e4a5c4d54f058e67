"""State of sharded tables in a form that does not depend on the sharding plan, so that it loads under another one.

A *piece* is a plain tensor or a `ShardedTensor`, with a name. State with the shape of its table is one piece,
`ebc.embedding_bags.t1.weight.momentum1`. Row-wise state (one value a row) is one piece for each range of columns that
is a shard, `....momentum1[:, 0:8]`: TorchRec concatenates the column shards' states instead, in a tensor whose size
depends on the plan. Iteration counts and learning rates of the kernels are pieces too.
"""

from __future__ import annotations

import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping
from typing import Any, NamedTuple, TypeAlias

import torch
import torch.distributed as dist
from torch import Tensor, nn
from torchrec.distributed.embedding_types import EmbeddingComputeKernel
from torchrec.distributed.types import (
    ParameterSharding,
    Shard,
    ShardedTensor,
    ShardedTensorMetadata,
    ShardingType,
    ShardMetadata,
    TensorProperties,
)
from torchrec.optim.keyed import CombinedOptimizer

from ..tables import kernel_of, table_modules
from ..text import some

Piece: TypeAlias = Tensor | ShardedTensor
"""A tensor that is the same on all ranks that have it, or one of which each rank has some shards."""

Columns: TypeAlias = tuple[int, int]
"""The first column, and the one after the last."""

ITERATION, LR, APPLIED_LR = "iteration", "lr", "applied_lr"
KERNEL_KINDS = (ITERATION, LR, APPLIED_LR)
_NAME = re.compile(r"(?P<weight>.*)\.(?P<kind>[^.\[]+)(?:\[:, (?P<start>\d+):(?P<stop>\d+)\])?", re.DOTALL)
"""The name of a piece; the weight's name in it may have any characters, but ends in `.weight` or the like."""


class StateKey(NamedTuple):
    """The parts of the name of a piece of fused state; `str` returns the name."""

    weight: str
    """Name of the table's weight."""
    kind: str
    """Kind of the state: `momentum1`, ..., or one of `KERNEL_KINDS`."""
    columns: Columns | None = None
    """The columns that row-wise state belongs to; None for other state."""

    @classmethod
    def parse(cls, name: str) -> StateKey:
        """Return the parts of a name.

        Raises:
            RuntimeError: It is no name of a piece.
        """
        found = _NAME.fullmatch(name)
        if found is None:
            raise RuntimeError(f"the checkpoint has {name!r} among the states of fused optimizers. Load another one.")
        columns = None if found["start"] is None else (int(found["start"]), int(found["stop"]))
        return cls(found["weight"], found["kind"], columns)

    def __str__(self) -> str:
        return f"{self.weight}.{self.kind}" + ("" if self.columns is None else "[:, {}:{}]".format(*self.columns))


class Loading(NamedTuple):
    """How to load fused state: what to fill with saved state, and what to call afterwards."""

    pieces: dict[str, Piece]
    """The pieces to fill, by their saved names."""
    finish: Callable[[], None]
    """Writes the rest into the kernels, once the pieces are filled."""


def fused_state(model: nn.Module) -> dict[StateKey, Piece]:
    """Return this rank's part of the state of all fused optimizers, in the kernels' own tensors.

    Besides the optimizers' state, for every table: updates counted, the optimizer's learning rate, and the one that
    the kernel was last given (a scheduler's change reaches the kernel in `zero_grad` or `step`).
    """
    pieces: dict[StateKey, Piece] = {}
    for name, sharded in table_modules(model).items():
        optimizer = sharded.fused_optimizer
        for parameter, weight in optimizer.params.items():
            for path, value in optimizer.state.get(weight, {}).items():
                if path.endswith(".iter"):  # a kernel's own counter, saved as ITERATION
                    continue
                key = StateKey(f"{name}.{parameter}", path.rpartition(".")[2])
                if value.dim() == 1:
                    pieces |= {key._replace(columns=columns): part for columns, part in _row_wise(weight, value)}
                else:
                    pieces[key] = value
    for weight_name, fused, kernel in fused_kernels(model):
        pieces[StateKey(weight_name, ITERATION)] = kernel.iter_cpu.detach().clone().reshape(1)
        for kind, lr in ((LR, fused.param_groups[0]["lr"]), (APPLIED_LR, kernel.get_learning_rate())):
            pieces[StateKey(weight_name, kind)] = torch.tensor([lr], dtype=torch.float64)
    return pieces


def plan_loading(model: nn.Module, saved: Iterable[str], told: Collection[str] = ()) -> Loading:
    """Match the fused state of this run to the names of saved pieces.

    Row-wise state saved for other ranges of columns is averaged over the saved ranges that a shard overlaps, each
    weighted by the columns they share. A part of one saved range thus gets that range's state. For RowWiseAdagrad,
    whose state sums up mean squares of gradients, the average over column shards is what the whole row would have
    summed up from the same gradients; for a part of a range that cannot be known.

    Args:
        model: The sharded model.
        saved: Names of the saved pieces.
        told: Tables of whose state the user was warned already.

    Raises:
        RuntimeError: A table was saved with the state of another fused optimizer.
    """
    keys = set(map(StateKey.parse, saved))
    kinds = kinds_by_weight(keys)
    pieces: dict[str, Piece] = {}
    averages: list[tuple[Piece, dict[str, int]]] = []
    averaged = set()
    mine = fused_state(model)
    for weight, wanted in kinds_by_weight(mine).items():
        if kinds.get(weight, wanted) != wanted:
            there, here = (some(sorted(each)) or "no state" for each in (kinds[weight], wanted))
            raise RuntimeError(
                f"the fused optimizer of {weight} was saved with {there}, this run's has {here}: load with the fused "
                "optimizer that the checkpoint was saved with."
            )
    for key, piece in mine.items():
        if key in keys:
            pieces[str(key)] = piece
            continue
        sources = overlapping(key, keys) if local_parts(piece) else {}
        if sources:
            # Whole rows for all columns that a rank has: small against the shards, which have as many rows.
            for source in sources:
                pieces.setdefault(source, torch.zeros(piece.size()[0], dtype=piece.dtype))
            averages.append((piece, sources))
            if len(sources) > 1:
                averaged.add(key.weight)
    _warn_of_states_left_out(model, set(kinds), averaged, set(told))

    def finish() -> None:
        for piece, sources in averages:
            total = sum(sources.values())
            for rows, shard in local_parts(piece):
                parts = [pieces[source][rows].double() * (share / total) for source, share in sources.items()]
                shard.copy_(torch.stack(parts).sum(0))
        for weight, fused, kernel in fused_kernels(model):
            numbers = [pieces.get(f"{weight}.{kind}") for kind in KERNEL_KINDS]
            iteration, lr, applied_lr = (None if number is None else number.item() for number in numbers)
            if iteration is not None:
                kernel.iter.fill_(iteration)
                kernel.iter_cpu.fill_(iteration)
            if lr is not None:  # a run without this strategy had none
                kernel.set_learning_rate(applied_lr)
                for group in fused.param_groups:
                    group["lr"] = lr

    return Loading(pieces, finish)


def check_tables(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Check that whole weights have the shapes of this model's tables: TorchRec would load a part of larger ones.

    Raises:
        RuntimeError: A weight has another shape.
    """
    tables = {name: value for name, value, _ in _tables(model) if isinstance(weights.get(name), Tensor)}
    _check_shapes(tables, weights)


def _check_shapes(pieces: Mapping[str, Piece], whole: Mapping[str, Tensor]) -> None:
    for key, piece in pieces.items():
        if tuple(piece.size()) != tuple(whole[key].shape):
            raise RuntimeError(
                f"{key} was saved with shape {tuple(whole[key].shape)}, this model has {tuple(piece.size())}. "
                "Was the checkpoint saved from other tables?"
            )


def fill_from_whole(pieces: Mapping[str, Piece], whole: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of whole tensors into pieces of the same shape as a whole, in place."""
    _check_shapes(pieces, whole)
    for key, piece in pieces.items():
        for window, part in local_parts(piece):
            part.copy_(whole[key][window])


def local_parts(piece: Piece) -> list[tuple[tuple[slice, ...], Tensor]]:
    """Return what this rank has of a piece, by shard: the slices of the whole tensor, and the tensor that is there."""
    if isinstance(piece, ShardedTensor):
        placed = [(shard.metadata.shard_offsets, shard.tensor.detach()) for shard in piece.local_shards()]
    else:
        placed = [([0] * piece.dim(), piece.detach())]
    return [
        (tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True)), part)
        for starts, part in placed
    ]


def on_host(piece: Piece) -> Piece:
    """Return a copy on the host that shares no memory with the piece."""
    if not isinstance(piece, ShardedTensor):
        return piece.detach().to("cpu", copy=True)
    return map_shards(piece, lambda shard: shard.to("cpu", copy=True))


def split_like(weight: ShardedTensor, stacked: Tensor) -> ShardedTensor:
    """Return a tensor that is sharded as a weight is.

    Args:
        weight: The weight.
        stacked: This rank's shards, concatenated along dimension 0 in the weight's order.
    """
    parts = iter(stacked.detach().split([len(shard.tensor) for shard in weight.local_shards()]))
    return map_shards(weight, lambda _: next(parts))


def dense_kernel_tables(model: nn.Module) -> dict[str, ShardedTensor]:
    """Return by name the weights of sharded tables with a dense kernel, whose shards the dense optimizer trains."""
    return {
        name: value
        for name, value, how in _tables(model)
        if isinstance(value, ShardedTensor)
        and how.compute_kernel == EmbeddingComputeKernel.DENSE.value
        and how.sharding_type != ShardingType.DATA_PARALLEL.value
    }


def table_weights(model: nn.Module) -> set[str]:
    """Return the parameter names of all tables of sharded modules."""
    return {name for name, _, _ in _tables(model)}


def _tables(model: nn.Module) -> Iterator[tuple[str, Any, ParameterSharding]]:
    """Yield each table of sharded modules: its parameter's name, its weight, how it is sharded."""
    for name, sharded in table_modules(model).items():
        for key, value in sharded.state_dict().items():
            how = sharded.module_sharding_plan.get(key.split(".")[-2])
            if how is not None:
                yield f"{name}.{key}", value, how


def fused_kernels(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield this rank's fused tables: the weight's name, its kernel's optimizer, its kernel."""
    for name, sharded in table_modules(model).items():
        for key, fused in sharded.fused_optimizer.optimizers:
            kernel = kernel_of(fused)
            for parameter in fused.params if kernel is not None else ():
                yield f"{name}.{CombinedOptimizer.prepend_opt_key(parameter, key)}", fused, kernel


def _row_wise(weight: Piece, state: Piece) -> list[tuple[Columns, Piece]]:
    """Split row-wise state by the columns that its shards belong to; each part has a value for every row."""
    if not isinstance(weight, ShardedTensor):  # replicated
        return [((0, weight.shape[1]), state)]
    assert isinstance(state, ShardedTensor)
    metadata = weight.metadata()
    parts: list[tuple[Columns, Piece]] = []
    for columns in sorted({_columns(shard) for shard in metadata.shards_metadata}):
        shards = [shard for shard in metadata.shards_metadata if _columns(shard) == columns]
        local = {  # TorchRec lists a weight's shards and its states' shards in the same order
            tuple(of_weight.metadata.shard_offsets[:1]): of_state.tensor.detach()
            for of_weight, of_state in zip(weight.local_shards(), state.local_shards(), strict=True)
            if _columns(of_weight.metadata) == columns
        }
        rows = [ShardMetadata(shard.shard_offsets[:1], shard.shard_sizes[:1], shard.placement) for shard in shards]
        properties = state.metadata().tensor_properties
        parts.append((columns, _sharded(ShardedTensorMetadata(rows, metadata.size[:1], properties), local)))
    return parts


def _columns(shard: ShardMetadata) -> Columns:
    return shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1]


def _sharded(metadata: ShardedTensorMetadata, local: Mapping[tuple[int, ...], Tensor]) -> ShardedTensor:
    """Make a ShardedTensor of local shards, given by their offsets, without asking other ranks."""
    rank = dist.get_rank()
    shards, mine = [], []
    for shard in metadata.shards_metadata:
        owner = shard.placement.rank()
        tensor = local[tuple(shard.shard_offsets)] if owner == rank else None
        place = f"rank:{owner}/{'cpu' if tensor is None else tensor.device}"
        shards.append(ShardMetadata(list(shard.shard_offsets), list(shard.shard_sizes), place))
        if tensor is not None:
            mine.append(Shard(tensor, shards[-1]))
    dtype = mine[0].tensor.dtype if mine else metadata.tensor_properties.dtype
    return ShardedTensor._init_from_local_shards_and_global_metadata(
        mine, sharded_tensor_metadata=ShardedTensorMetadata(shards, metadata.size, TensorProperties(dtype=dtype))
    )


def map_shards(piece: ShardedTensor, change: Callable[[Tensor], Tensor]) -> ShardedTensor:
    """Return what a function makes of each of this rank's shards, sharded alike."""
    local = {tuple(shard.metadata.shard_offsets): change(shard.tensor.detach()) for shard in piece.local_shards()}
    return _sharded(piece.metadata(), local)


def kinds_by_weight(keys: Iterable[StateKey]) -> dict[str, set[str]]:
    """Return the kinds of state of each weight; row-wise kinds are marked, whatever their columns."""
    kinds: dict[str, set[str]] = {}
    for key in keys:
        of_weight = kinds.setdefault(key.weight, set())
        if key.kind not in KERNEL_KINDS:
            of_weight.add(key.kind if key.columns is None else f"{key.kind} (row-wise)")
    return kinds


def overlapping(key: StateKey, saved: Iterable[StateKey]) -> dict[str, int]:
    """Return the names of saved row-wise pieces that overlap with the columns of `key`, with the number of columns."""
    found = {}
    for other in sorted((other for other in saved if other[:2] == key[:2]), key=str):
        if key.columns and other.columns:
            common = min(other.columns[1], key.columns[1]) - max(other.columns[0], key.columns[0])
            if common > 0:
                found[str(other)] = common
    return found


def _warn_of_states_left_out(model: nn.Module, saved: set[str], averaged: set[str], told: set[str]) -> None:
    """Warn of fused state that has no exact counterpart under this plan."""
    dense = EmbeddingComputeKernel.DENSE.value
    replicas = {name for name, _, _ in fused_kernels(model)}
    fused = {name for name, _, how in _tables(model) if how.compute_kernel != dense or name in replicas}

    def warn(names: set[str], what: str) -> None:
        if names:
            warnings.warn(f"{', '.join(sorted(names))}: {what}.", UserWarning, stacklevel=3)

    if dist.get_rank() == 0:  # every rank knows of these
        warn(fused - saved - told, "the checkpoint has no fused optimizer state of these tables; theirs starts anew")
        warn(saved - fused, "the dense optimizer trains these tables now; the fused state saved for them is not used")
    warn(
        averaged,
        "saved in other column shards; each row's fused optimizer state is the average over them, so that training "
        "goes on close to, and not exactly as without the change",
    )
