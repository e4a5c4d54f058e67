"""State of sharded tables in a form that is independent of the sharding plan.

State with the shape of its table is one piece, `ebc.embedding_bags.t1.weight.momentum1`; row-wise state (one value per
row) is one per column shard, `....momentum1[:, 0:8]`, since the size of TorchRec's own form depends on the plan.
"""

from __future__ import annotations

import math
import re
import warnings
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
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

from ..compat.fbgemm import lookup_counts, set_count
from ..compat.torch import sharded_tensor
from ..distributed import warn_on_rank_zero
from ..row_log import Window
from ..tables import Rule, frozen_tables, kernel_of, sharded_modules, table_modules
from ..text import some

Piece: TypeAlias = Tensor | ShardedTensor  # equal on all ranks that have it, or sharded
Columns: TypeAlias = tuple[int, int]  # first column, last column + 1

ITERATION, LR, APPLIED_LR = "iteration", "lr", "applied_lr"
KERNEL_KINDS = (ITERATION, LR, APPLIED_LR)
_NAME = re.compile(r"(?P<weight>.*)\.(?P<kind>[^.\[]+)(?:\[:, (?P<start>\d+):(?P<stop>\d+)\])?", re.DOTALL)
"""The name of a piece; the weight's name may contain any characters."""


class StateKey(NamedTuple):
    """The parts of the name of a piece of fused state; `str()` returns the name."""

    weight: str
    kind: str  # `momentum1`, ..., or one of `KERNEL_KINDS`
    columns: Columns | None = None  # of row-wise state

    @classmethod
    def parse(cls, name: str) -> StateKey:
        """Return the parts of a name; raise a RuntimeError if it is not the name of a piece."""
        found = _NAME.fullmatch(name)
        if found is None:
            raise RuntimeError(
                f"the checkpoint's fused optimizer state has an unknown entry {name!r}. Load another checkpoint."
            )
        columns = None if found["start"] is None else (int(found["start"]), int(found["stop"]))
        return cls(found["weight"], found["kind"], columns)

    def __str__(self) -> str:
        return f"{self.weight}.{self.kind}" + ("" if self.columns is None else "[:, {}:{}]".format(*self.columns))


class FusedTables:
    """The fused tables of a model, found once: to find them takes longer than to read their state."""

    def __init__(self, model: nn.Module) -> None:
        self.classes = fused_classes(model)
        self._kernels = list(fused_kernels(model))
        self._in_memory: dict[StateKey, Piece] = {}
        for name, sharded in table_modules(model).items():
            optimizer = sharded.fused_optimizer
            for parameter, weight in optimizer.params.items():
                for path, value in optimizer.state.get(weight, {}).items():
                    if path.endswith(".iter"):  # saved as ITERATION
                        continue
                    key = StateKey(f"{name}.{parameter}", path.rpartition(".")[2])
                    if value.dim() == 1:
                        parts = _row_wise(weight, value)
                        self._in_memory |= {key._replace(columns=columns): part for columns, part in parts}
                    else:
                        self._in_memory[key] = value

    def state(self) -> dict[StateKey, Piece]:
        """Return this rank's part of the state of all fused optimizers, in the kernels' memory."""
        pieces = dict(self._in_memory)
        for weight_name, fused, kernel in self._kernels:
            # A scheduler's change of the learning rate reaches the kernel only in `zero_grad` or `step`.
            pieces[StateKey(weight_name, ITERATION)] = torch.tensor(lookup_counts([kernel]))
            for kind, lr in ((LR, fused.param_groups[0]["lr"]), (APPLIED_LR, kernel.get_learning_rate())):
                pieces[StateKey(weight_name, kind)] = torch.tensor([lr], dtype=torch.float64)
        return pieces


def fused_state(model: nn.Module) -> dict[StateKey, Piece]:
    """Return this rank's part of the state of all fused optimizers, in the kernels' memory."""
    return FusedTables(model).state()


def fused_classes(model: nn.Module) -> dict[str, str]:
    """Return the weight's name -> class of the fused optimizer, of the tables of all ranks."""
    return {weight: rule.name for weight, rule in rules_by_weight(model).items()}


def rules_by_weight(model: nn.Module) -> dict[str, Rule]:
    """Return the weight's name -> rule of the tables that a backward trains, of all ranks."""
    rules = {
        path: getattr(module, "trained_in_backward", None) or {} for path, module in sharded_modules(model).items()
    }
    return {
        name: trained[table]
        for name in table_weights(model)
        for path, trained in rules.items()
        if name.startswith(f"{path}.") and (table := name.split(".")[-2]) in trained
    }


def frozen_weights(model: nn.Module) -> set[str]:
    """Return the names of the weights of tables that were frozen when the strategy sharded them."""
    frozen = {path: frozen_tables(module) for path, module in sharded_modules(model).items()}
    return {
        name
        for name in table_weights(model)
        for path, tables in frozen.items()
        if name.startswith(f"{path}.") and name.split(".")[-2] in tables
    }


class Loading:
    """Loads fused state; raises a RuntimeError for a table with another optimizer.

    Row-wise state of other column shards is averaged, weighted by the number of common columns. RowWiseAdagrad's state
    sums mean squares of gradients: for the same gradients the average equals the state of the whole row.

    The state of a table that is frozen now is not needed. One that was frozen has a rate of 0 and no state: it begins
    with this run's rate and a new state. Both are said.

    `classes` are the saved `fused_classes`, `warned` the tables about whose state the user has been warned;
    `moves_rates`: a combined optimizer sets the rates.
    """

    def __init__(
        self,
        model: nn.Module,
        saved: Iterable[str],
        classes: Mapping[str, str],
        warned: Collection[str] = (),
        *,
        moves_rates: bool = False,
    ) -> None:
        self.pieces: dict[str, Piece] = {}  # to fill before `finish`; by their saved names
        self._model, self._moves_rates = model, moves_rates
        self._averages: list[tuple[Piece, dict[str, int]]] = []
        keys = set(map(StateKey.parse, saved))
        kinds = kinds_by_weight(keys)
        self._frozen = frozen_weights(model)
        self._rules = rules_by_weight(model)
        # What of the tables that are trained now was saved without a class of fused optimizer, and without its state;
        # `finish` sees whether the rate is 0.
        self._perhaps_frozen = {
            weight
            for weight in self._rules.keys() - classes.keys()
            if StateKey(weight, LR) in keys and not kinds[weight]
        }
        mine = {
            key: piece
            for key, piece in fused_state(model).items()
            if key.weight not in self._frozen or key.kind == ITERATION
        }
        for weight, wanted in kinds_by_weight(mine).items():
            if kinds.get(weight, wanted) != wanted and weight not in self._frozen | self._perhaps_frozen:
                there, here = (some(sorted(of_weight)) or "no state" for of_weight in (kinds[weight], wanted))
                was, now = classes.get(weight), fused_classes(model).get(weight)
                known = f" (saved with {was}, this run has {now})" if was and now else ""
                raise RuntimeError(
                    f"the fused optimizer of {weight} was saved with {there}, this run's has {here}{known}: load with "
                    "the fused optimizer that the checkpoint was saved with"
                    f"{f', fused_optimizer=({was}, ...)' if was else ''}. Or keep only the weights: load them with "
                    "trainer.validate(ckpt_path=...), then fit without ckpt_path."
                )
        averaged = set()
        for key, piece in mine.items():
            if key in keys:
                self.pieces[str(key)] = piece
            elif local_parts(piece) and (sources := overlapping(key, keys)):
                # A value for each of the table's rows, on every rank.
                for source in sources:
                    self.pieces.setdefault(source, torch.zeros(piece.size()[0], dtype=piece.dtype))
                self._averages.append((piece, sources))
                if len(sources) > 1:
                    averaged.add(key.weight)
        if self._perhaps_frozen:  # every rank has to know all of the rates
            for weight in self._rules:
                if (key := StateKey(weight, LR)) in keys:
                    self.pieces.setdefault(str(key), torch.zeros(1, dtype=torch.float64))
        if frozen := some(sorted(weight for weight in self._frozen & classes.keys() if weight in kinds)):
            warn_on_rank_zero(
                f"{frozen}: trained in the checkpoint's run and frozen now (requires_grad=False). The weights are "
                "loaded; the fused optimizer's state is not needed, and the next checkpoint is without it."
            )
        _warn_of_states_left_out(model, set(kinds), averaged, set(warned))

    def finish(self) -> None:
        """Write the rest of the loaded state into the kernels."""
        for piece, sources in self._averages:
            total = sum(sources.values())
            for rows, shard in local_parts(piece):
                parts = [self.pieces[source][rows].double() * (share / total) for source, share in sources.items()]
                shard.copy_(torch.stack(parts).sum(0))
        unfrozen = self._unfrozen()
        for weight, fused, kernel in fused_kernels(self._model):
            if weight in unfrozen:
                continue
            numbers = [self.pieces.get(f"{weight}.{kind}") for kind in KERNEL_KINDS]
            iteration, lr, applied_lr = (None if number is None else number.item() for number in numbers)
            if iteration is not None:
                set_count(kernel, iteration)
            if lr is not None:  # None for runs without this strategy
                kernel.set_learning_rate(applied_lr)
                for group in fused.param_groups:
                    group["lr"] = lr
        self._begin_anew(unfrozen)

    def _unfrozen(self) -> set[str]:
        """Return the tables that were frozen in the saved run and are trained now; raise a RuntimeError as below."""
        unfrozen = {weight for weight in self._perhaps_frozen if not self._saved_rate(weight)}
        for weight in sorted(unfrozen):
            rule = self._rules[weight]
            module = weight.rpartition(".")[0].rpartition(".")[0]
            # Tables of one rule may share a kernel, which has one rate; not with `rate_per_table`.
            shares = not any(
                getattr(one, "rate_per_table", False) and weight.startswith(f"{path}.")
                for path, one in sharded_modules(self._model).items()
            )
            peers = [
                other
                for other, own in self._rules.items()
                if shares and own == rule and other not in unfrozen and other.startswith(f"{module}.")
            ]
            other = next((one for one in sorted(peers) if self._differs(self._saved_rate(one), rule.rate)), None)
            if other is not None and not self._moves_rates:
                raise RuntimeError(
                    f"{weight} was frozen in the checkpoint's run, and this run's rate for it is {rule.rate:g}. "
                    f"{other}, of the same fused optimizer, goes on at the checkpoint's rate of "
                    f"{self._saved_rate(other):g}; tables of one fused optimizer have one rate. Give both the "
                    f"checkpoint's rate (lr={self._saved_rate(other):g}), or {weight} an optimizer of its own: "
                    "apply_optimizer_in_backward with another lr."
                )
        return unfrozen

    @staticmethod
    def _differs(saved: float | None, rate: float) -> bool:
        return saved is not None and not math.isclose(saved, rate, rel_tol=1e-6)  # kernels have it in float32

    def _saved_rate(self, weight: str) -> float | None:
        rate = self.pieces.get(str(StateKey(weight, LR)))
        return None if rate is None else float(rate.item())

    def _begin_anew(self, unfrozen: set[str]) -> None:
        """Give tables that were frozen this run's rates and new states."""
        if not unfrozen:
            return
        for key, piece in fused_state(self._model).items():
            for _, part in local_parts(piece) if key.weight in unfrozen else ():
                part.zero_()
        kernels: dict[int, list[tuple[str, Any, Any]]] = {}
        for found in fused_kernels(self._model):
            kernels.setdefault(id(found[2]), []).append(found)
        for of_kernel in kernels.values():
            if all(weight in unfrozen for weight, _, _ in of_kernel):
                weight, fused, kernel = of_kernel[0]
                set_count(kernel, 0)
                kernel.set_learning_rate(self._rules[weight].rate)
                for group in fused.param_groups:
                    group["lr"] = self._rules[weight].rate
        said = some(
            f"{weight} ({self._rules[weight].name}, lr {self._rules[weight].rate:g})" for weight in sorted(unfrozen)
        )
        moved = " The scheduler of combined_optimizer moves it." if self._moves_rates else ""
        warn_on_rank_zero(
            f"{said}: frozen in the checkpoint's run (requires_grad=False) and trained now. The rate is that of this "
            f"run's configuration, and the fused optimizer's state begins as new.{moved}"
        )


def check_tables(model: nn.Module, weights: Mapping[str, Any]) -> None:
    """Raise a RuntimeError if unsharded weights have other shapes than the tables: TorchRec may load a part of them."""
    _check_shapes({name: value for name, value, _ in _tables(model) if isinstance(weights.get(name), Tensor)}, weights)


def _check_shapes(pieces: Mapping[str, Piece], whole: Mapping[str, Tensor]) -> None:
    check_sizes(pieces, {key: whole[key].shape for key in pieces})


def check_sizes(pieces: Mapping[str, Piece], saved: Mapping[str, torch.Size]) -> None:
    """Raise a RuntimeError if a piece was saved with another size."""
    for key, piece in pieces.items():
        if tuple(piece.size()) != tuple(saved[key]):
            raise RuntimeError(
                f"{key} was saved with shape {tuple(saved[key])}, this model has {tuple(piece.size())}. "
                "Was the checkpoint saved from other tables?"
            )


def fill_from_whole(pieces: Mapping[str, Piece], whole: Mapping[str, Tensor]) -> None:
    """Copy this rank's part of unsharded tensors into pieces of the same full shape."""
    _check_shapes(pieces, whole)
    for key, piece in pieces.items():
        for window, part in local_parts(piece):
            part.copy_(whole[key][window])


def local_parts(piece: Piece) -> list[tuple[Window, Tensor]]:
    """Return this rank's shards of a piece, each as slices of the unsharded tensor and the shard's tensor."""
    if isinstance(piece, ShardedTensor):
        placed = [(shard.metadata.shard_offsets, shard.tensor.detach()) for shard in piece.local_shards()]
    else:
        placed = [([0] * piece.dim(), piece.detach())]
    return [
        (tuple(slice(start, start + size) for start, size in zip(starts, part.shape, strict=True)), part)
        for starts, part in placed
    ]


def first_owners(windows: Sequence[Iterable[Window]]) -> list[tuple[int, Window]]:
    """Return each nonempty part of a tensor with the first rank that has it, from the windows of every rank."""
    owners: list[tuple[int, Window]] = []
    for rank, of_rank in enumerate(windows):
        for window in of_rank:
            is_empty = any(part.start == part.stop for part in window)
            if not is_empty and all(window != known for _, known in owners):
                owners.append((rank, window))
    return owners


def on_host(piece: Piece) -> Piece:
    """Return a copy on the host."""
    if not isinstance(piece, ShardedTensor):
        return piece.detach().to("cpu", copy=True)
    return map_shards(piece, lambda shard: shard.tensor.detach().to("cpu", copy=True))


def split_like(weight: ShardedTensor, stacked: Tensor) -> ShardedTensor:
    """Return a tensor with a weight's sharding; `stacked` has this rank's shards, concatenated along dimension 0."""
    parts = iter(stacked.detach().split([len(shard.tensor) for shard in weight.local_shards()]))
    return map_shards(weight, lambda _: next(parts))


def dense_kernel_tables(model: nn.Module) -> dict[str, ShardedTensor]:
    """Return name -> weight of sharded tables with a dense kernel, which the dense optimizer trains."""
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
    for name, sharded in table_modules(model).items():
        for key, value in sharded.state_dict().items():
            how = sharded.module_sharding_plan.get(key.split(".")[-2])
            if how is not None:
                yield f"{name}.{key}", value, how


def fused_kernels(model: nn.Module) -> Iterator[tuple[str, Any, Any]]:
    """Yield the weight's name, the fused optimizer and the kernel of each of this rank's fused tables."""
    for name, sharded in table_modules(model).items():
        for key, fused in sharded.fused_optimizer.optimizers:
            kernel = kernel_of(fused)
            for parameter in fused.params if kernel is not None else ():
                yield f"{name}.{CombinedOptimizer.prepend_opt_key(parameter, key)}", fused, kernel


def _row_wise(weight: Piece, state: Piece) -> list[tuple[Columns, Piece]]:
    """Split row-wise state by column shards; each part has a value for every row."""
    if not isinstance(weight, ShardedTensor):  # replicated
        return [((0, weight.shape[1]), state)]
    assert isinstance(state, ShardedTensor)
    # TorchRec lists shards of a weight and of its state in the same order.
    state_of = dict(zip(map(id, weight.local_shards()), state.local_shards(), strict=True))
    ranges = sorted({_columns(shard) for shard in weight.metadata().shards_metadata})
    return [
        (of, map_shards(weight, lambda shard: state_of[id(shard)].tensor.detach(), of, state.dtype)) for of in ranges
    ]


def _columns(shard: ShardMetadata) -> Columns:
    return shard.shard_offsets[1], shard.shard_offsets[1] + shard.shard_sizes[1]


def map_shards(
    piece: ShardedTensor,
    change: Callable[[Shard], Tensor],
    columns: Columns | None = None,
    dtype: torch.dtype | None = None,
) -> ShardedTensor:
    """Apply a function to each of this rank's shards, with `columns` of these columns alone; keep the sharding."""
    num_dims = None if columns is None else 1
    metadata = piece.metadata()
    local = {tuple(shard.metadata.shard_offsets): shard for shard in piece.local_shards()}
    shards, mine = [], []
    for shard in metadata.shards_metadata:
        if columns is None or columns == _columns(shard):
            owner = shard.placement.rank()  # empty shards of several ranks have the same offsets
            tensor = change(local[tuple(shard.shard_offsets)]) if owner == dist.get_rank() else None
            place = f"rank:{owner}/{'cpu' if tensor is None else tensor.device}"
            shards.append(ShardMetadata(shard.shard_offsets[:num_dims], shard.shard_sizes[:num_dims], place))
            if tensor is not None:
                mine.append(Shard(tensor, shards[-1]))
    dtype = mine[0].tensor.dtype if mine else dtype or piece.dtype
    whole = ShardedTensorMetadata(shards, metadata.size[:num_dims], TensorProperties(dtype=dtype))
    return sharded_tensor(mine, whole)


def kinds_by_weight(keys: Iterable[StateKey]) -> dict[str, set[str]]:
    """Return weight -> kinds of its state; row-wise kinds are marked."""
    kinds: dict[str, set[str]] = {}
    for key in keys:
        of_weight = kinds.setdefault(key.weight, set())
        if key.kind not in KERNEL_KINDS:
            of_weight.add(key.kind if key.columns is None else f"{key.kind} (row-wise)")
    return kinds


def overlapping(key: StateKey, saved: Iterable[StateKey]) -> dict[str, int]:
    """Return name of a saved row-wise piece -> number of columns in common with `key`, if any."""
    found = {}
    for other in saved:
        if other[:2] == key[:2] and key.columns and other.columns:
            common = min(other.columns[1], key.columns[1]) - max(other.columns[0], key.columns[0])
            if common > 0:
                found[str(other)] = common
    return dict(sorted(found.items()))


def _warn_of_states_left_out(model: nn.Module, saved: set[str], averaged: set[str], warned: set[str]) -> None:
    dense = EmbeddingComputeKernel.DENSE.value
    replicas = {name for name, _, _ in fused_kernels(model)}
    fused = {name for name, _, how in _tables(model) if how.compute_kernel != dense or name in replicas}
    if reset := ", ".join(sorted(fused - saved - warned)):
        warn_on_rank_zero(f"{reset}: the checkpoint has no fused optimizer state for these tables; it is reset.")
    if unused := ", ".join(sorted(saved - fused)):
        warn_on_rank_zero(
            f"{unused}: the dense optimizer trains these tables now; their saved fused state is not used."
        )
    if averaged:  # other tables on each rank
        warnings.warn(
            f"{', '.join(sorted(averaged))}: saved in other column shards; each row's fused optimizer state is "
            "averaged over them, so training continues similarly, but not exactly as without the change.",
            stacklevel=3,
        )
