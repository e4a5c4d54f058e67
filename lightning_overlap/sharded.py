"""One sharded module: the parts of what TorchRec does for it, so that each can run at a time of its own.

TorchRec's names that start with an underscore occur here, in `kinds.py`, `held.py`, `input_dist.py` and `released.py`
only (`PRIVATE_NAMES`; a test names each).
"""

from __future__ import annotations

import copy
import functools
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import contextmanager, nullcontext
from dataclasses import dataclass, field
from typing import Any, TypeAlias, TypeVar
from weakref import WeakKeyDictionary

import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import SplitTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.autograd.graph import GradientEdge, get_gradient_edge
from torchrec.distributed.embedding_types import EmbeddingComputeKernel, KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardedModule
from torchrec.optim.keyed import CombinedOptimizer, KeyedOptimizer
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from .held import HeldUpdate
from .kinds import KINDS, TABLE_TYPES, kind_of, owners_of, tables_of
from .stages import WeightOwner
from .versions import check_names

R = TypeVar("R")

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "ShardedEmbeddingBagCollection": (
        *("_embedding_bag_configs", "_env", "_input_dists", "_lookups", "_output_dists", "_sharding_types"),
    ),
    "ShardedEmbeddingCollection": (
        *("_embedding_configs", "_env", "_input_dists", "_lookups", "_output_dists", "_sharding_type_to_sharding"),
    ),
    "ShardedFeatureProcessedEmbeddingBagCollection": ("_embedding_bag_collection", "_feature_processors"),
    "ShardedManagedCollisionEmbeddingBagCollection": ("_embedding_module", "_managed_collision_collection"),
    "ShardedManagedCollisionEmbeddingCollection": ("_embedding_module", "_managed_collision_collection"),
    "EmbeddingFusedOptimizer": ("_emb_module",),
    "FusedKJTListSplitsAwaitable": ("_awaitables", "_splits_awaitable"),
    "NoWait": ("_obj",),
    "KJTAllToAll": ("_splits", "_stagger"),
    "SparseFeaturesDist": ("_dist",),
    "KeyedJaggedTensor": ("_length_per_key", "_lengths", "_values", "_weights"),
    "KJTSplitsAllToAllMeta": ("_input",),
    "torchrec.distributed.dist_data": ("_get_recat",),
}
"""Private attributes of TorchRec that this package reads, by the object that has them."""

SetRates: TypeAlias = Callable[[], None]
"""Gives the kernels the learning rates that the schedule has now."""


@dataclass(slots=True)
class ModuleInFlight:
    """One batch on its way through one module."""

    kjt: KeyedJaggedTensor
    context: Any = None
    splits: Any = None
    data: Any = None
    dist_input: KJTList | None = None
    outputs: dict[int, Awaitable[torch.Tensor]] = field(default_factory=dict)
    rows: LazyAwaitable[Any] | None = None
    held: HeldUpdate = field(default_factory=HeldUpdate)
    """What is left of the way to the tables; nothing where the backward goes all the way."""
    rates: list[float] | None = None
    """The learning rate of each kernel that the batch was trained at, while its deferred update is made."""
    sent: Any = None
    """What the input held when its ids were sent (`unchanged.SentInput`)."""
    num_writes: dict[WeightOwner, tuple[int, ...]] = field(default_factory=dict)
    """How often the tables of each owner had been written by somebody else when they were looked up."""
    autocast: Any = None
    """The autocast that its lookup ran under, where that matters."""
    votes: bool = False
    """Whether all ranks are asked when the module is called: another input of the batch might take this one's place."""
    served: bool = False
    served_in: int = -1
    """The forward that it was served in: an optimizer may ask for several in a step."""
    without_graph: bool = False
    """Whether a call without gradients was served."""
    received: Any = None
    """The rows, once waited for, until the backward is over."""
    received_at: Any = None
    """Event after which they are there, on the lookup's stream."""
    num_lookups: list[int] = field(default_factory=list)
    """What this batch added to the iteration count of each kernel."""
    ids: KJTList | None = None
    """What was looked up, where somebody asked to keep it."""


def check_torchrec(module: nn.Module) -> None:
    """Raise if a sharded module lacks a private name that this file uses of it.

    Raises:
        ImportError: With the name, the installed and the supported versions.
    """
    owners = {kind.__name__: module for kind in KINDS if isinstance(module, kind)}
    check_names("torchrec", PRIVATE_NAMES, owners)
    if owners:
        tables = tables_of(module)
        owners = {kind.__name__: tables for kind in TABLE_TYPES if isinstance(tables, kind)}
    check_names("torchrec", PRIVATE_NAMES, owners)


def read_once(read: Callable[[Any], list[R]]) -> Callable[[Any], list[R]]:
    """Remember what was read off a module: its shards do not change, and every step asks."""
    known: WeakKeyDictionary[nn.Module, list[R]] = WeakKeyDictionary()

    @functools.wraps(read)
    def read_or_remember(module: Any) -> list[R]:
        found = known.get(module)
        if found is None:
            found = known[module] = read(module)
        return found

    return read_or_remember


owners_of_parts = read_once(owners_of)


def tables_in_backward(module: ShardedModule[Any, Any, Any, Any]) -> list[str]:
    """Return the names of the tables whose lookups the fused backward owns (`owners_of`), on all ranks alike."""
    plan = module.module_sharding_plan
    dense = {one.sharding_type for one in plan.values() if one.compute_kernel == EmbeddingComputeKernel.DENSE.value}
    return [name for name, one in plan.items() if one.sharding_type not in dense]


@read_once
def keys_in_backward(module: Any) -> list[tuple[int, int, str]]:
    """Return where in the received ids each fused table of this rank is: part, key within it, name of the table.

    A table that is cut by columns has the same ids in each of its shards: the one with the first columns counts.
    """
    found = []
    for part, owner in enumerate(owners_of_parts(module)):
        if owner is not WeightOwner.FUSED_BACKWARD:
            continue
        tables = (table for group in module._lookups[part].grouped_configs for table in group.embedding_tables)
        keys = [table for table in tables for _ in table.feature_names]
        found += [
            (part, key, table.name)
            for key, table in enumerate(keys)
            if table.local_metadata is None or table.local_metadata.shard_offsets[1] == 0
        ]
    return found


def fused_rates(module: ShardedModule[Any, Any, Any, Any]) -> dict[str, float] | None:
    """Return the learning rate that each table trained in backward began with; None if another sharded the module.

    The same on all ranks, and still what it was when a schedule has moved the kernels' own rates.
    """
    rates: dict[str, float] | None = getattr(module, "fused_rates", None)
    return rates


def fused_optimizers(module: ShardedModule[Any, Any, Any, Any]) -> list[KeyedOptimizer]:
    """Return the fused optimizers of a module's kernels on this rank, one each; none where it has no shard."""
    found: list[KeyedOptimizer] = []
    waiting: list[KeyedOptimizer] = [tables_of(module).fused_optimizer]
    for optimizer in waiting:
        if isinstance(optimizer, CombinedOptimizer):
            waiting += [member for _, member in optimizer.optimizers]
        else:
            found.append(optimizer)
    return found


def look_up(
    module: Any,
    state: ModuleInFlight,
    owners: frozenset[WeightOwner],
    set_rates: SetRates | None = None,
    *,
    holds_update: bool = False,
) -> None:
    """Run the part of a module's lookup whose tables belong to `owners`; assemble the rows once all parts ran.

    A module of one owner takes TorchRec's own `compute_and_output_dist`. A mixed one is looked up in two parts,
    each after the last writer of its tables.

    Args:
        module: The sharded module.
        state: The batch on its way through it.
        owners: Whose tables to look up now.
        set_rates: Gives the kernels the present learning rates; None where nothing moves them. With it the update
            of this batch takes place at the rate that holds in its backward.
        holds_update: Whether the backward stops where the rows were received, and the rest waits in `state.held`.
    """
    with _updates_at_present_rate(module, set_rates), _holds_update(module, state) if holds_update else nullcontext():
        _look_up(module, state, owners)


def compute_fused(module: Any, state: ModuleInFlight, set_rates: SetRates | None = None) -> dict[int, Tensor]:
    """Run the kernels of the tables that the fused backward writes, and no collective: any thread may do so.

    `start_fused` goes on with what this returns.
    """
    with _updates_at_present_rate(module, set_rates):
        return _compute(module, state, parts_to_look_up(module, state, frozenset({WeightOwner.FUSED_BACKWARD})))


def start_fused(
    module: Any,
    state: ModuleInFlight,
    rows: Mapping[int, Tensor],
    before_update: Callable[[Tensor], None],
    *,
    holds_update: bool = False,
) -> None:
    """Start the all-to-alls of rows that `compute_fused` returned.

    Args:
        module: The sharded module.
        state: The batch on its way through it.
        rows: By part.
        before_update: Called in the backward with the gradient of the rows, right before the tables are written.
        holds_update: As of `look_up`.
    """
    for rows_of_part in rows.values():
        if rows_of_part.requires_grad:
            rows_of_part.register_hook(before_update)
    with _holds_update(module, state) if holds_update else nullcontext():
        _start_rows(module, state, rows)


@contextmanager
def _holds_update(module: Any, state: ModuleInFlight) -> Iterator[None]:
    """Cut the graph of the rows of fused tables, of the lookups made meanwhile."""
    owners = owners_of_parts(module)
    if WeightOwner.FUSED_BACKWARD not in owners:
        yield
        return
    dists = module._output_dists
    module._output_dists = [
        state.held.holding(dist) if owner is WeightOwner.FUSED_BACKWARD else dist
        for dist, owner in zip(dists, owners, strict=True)
    ]
    try:
        yield
    finally:
        module._output_dists = dists


def kernel_rates(module: Any) -> list[float]:
    """Return the learning rate of each kernel, which is kept on the host."""
    return [tbe.get_learning_rate() for tbe in tbes(module)]


def set_kernel_rates(module: Any, rates: list[float]) -> None:
    """Give each kernel its learning rate."""
    for tbe, rate in zip(tbes(module), rates, strict=True):
        tbe.set_learning_rate(rate)


def _look_up(module: Any, state: ModuleInFlight, owners: frozenset[WeightOwner]) -> None:
    assert state.dist_input is not None
    parts = parts_to_look_up(module, state, owners)
    num_parts = len(owners_of_parts(module))
    if not parts:
        return
    if len(parts) == num_parts:
        state.rows = module.compute_and_output_dist(state.context, state.dist_input)
        state.dist_input = None
        return
    _start_rows(module, state, _compute(module, state, parts))


def _compute(module: Any, state: ModuleInFlight, parts: list[int]) -> dict[int, Tensor]:
    """Run the kernels of some parts."""
    lookups = module._lookups
    module._lookups = [lookup if part in parts else _NOTHING for part, lookup in enumerate(lookups)]
    try:
        rows = module.compute(state.context, state.dist_input)
    finally:
        module._lookups = lookups
    return {part: rows[part] for part in parts}


def _start_rows(module: Any, state: ModuleInFlight, rows: Mapping[int, Tensor]) -> None:
    """Start the all-to-alls of some parts' rows; assemble what is under way once all parts have been looked up."""
    num_parts = len(owners_of_parts(module))
    for part, rows_of_part in rows.items():
        state.outputs[part] = module._output_dists[part](rows_of_part, state.context.sharding_contexts[part])
    if len(state.outputs) == num_parts:
        output_dists = module._output_dists
        module._output_dists = [_already_started] * num_parts
        try:
            state.rows = module.output_dist(state.context, [state.outputs[part] for part in range(num_parts)])
        finally:
            module._output_dists = output_dists
        state.outputs = {}
        state.dist_input = None


@read_once
def tbes(module: Any) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """The table-batched kernels of a module's own shards."""
    return [] if kind_of(module) is None else _tbes_of(tables_of(module)._lookups)


def _tbes_of(lookups: Iterable[nn.Module]) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    parts = [part for lookup in lookups for part in lookup.modules()]
    return [part for part in parts if isinstance(part, SplitTableBatchedEmbeddingBagsCodegen)]


@read_once
def caching_tbes(module: Any) -> list[SplitTableBatchedEmbeddingBagsCodegen]:
    """The kernels whose tables are in UVM, with a cache on the device."""
    return [tbe for tbe in tbes(module) if tbe.lxu_cache_weights.numel()]


def forget_prefetched(module: Any) -> None:
    """Unlock and drop what kernels have prefetched and not looked up, on the current stream."""
    for tbe in tbes(module) if caching_tbes(module) else []:  # a kernel without a cache counts prefetches, too
        for locations in tbe.lxu_cache_locations_list:
            torch.ops.fbgemm.lxu_cache_locking_counter_decrement(tbe.lxu_cache_locking_counter, locations)
        tbe.lxu_cache_locations_list.clear()
        tbe.timesteps_prefetched.clear()
        tbe.prefetched_info_list.clear()


_LAST_LOOKUP = ("lxu_cache_locations", "_indices", "_offsets", "_vbe_B_offsets", "_vbe_max_B")
"""What a kernel keeps of its last lookup, and takes for what its next backward is of (FBGEMM 1.8)."""


@contextmanager
def without_backward(module: Any) -> Iterator[None]:
    """Let a lookup that no backward follows lock no rows, and leave the last lookup that one does follow in place."""
    kernels = [tbe for tbe in caching_tbes(module) if tbe.prefetch_pipeline]
    kept = [[getattr(tbe, name) for name in _LAST_LOOKUP] for tbe in kernels]
    try:
        yield
    finally:
        for tbe, values in zip(kernels, kept, strict=True):
            torch.ops.fbgemm.lxu_cache_locking_counter_decrement(tbe.lxu_cache_locking_counter, tbe.lxu_cache_locations)
            for name, value in zip(_LAST_LOOKUP, values, strict=True):
                setattr(tbe, name, value)


def kernel_of(fused_optimizer: Any) -> SplitTableBatchedEmbeddingBagsCodegen | None:
    """The table-batched kernel whose state a fused optimizer shows; None for kernels of other kinds."""
    kernel = getattr(fused_optimizer, "_emb_module", None)
    return kernel if isinstance(kernel, SplitTableBatchedEmbeddingBagsCodegen) else None


def lookup_counts(module: Any) -> list[int]:
    """Return the iteration count of each kernel, from its copy on the host: no sync."""
    return _counts(tbes(module))


def _counts(kernels: list[SplitTableBatchedEmbeddingBagsCodegen]) -> list[int]:
    return [int(tbe.iter_cpu) for tbe in kernels]


def lookups_since(module: Any, counts: list[int]) -> list[int]:
    """Return what each kernel has counted since."""
    return _differences(lookup_counts(module), counts)


def _differences(now: list[int], before: list[int]) -> list[int]:
    return [a - b for a, b in zip(now, before, strict=True)]


def parts_to_look_up(module: Any, state: ModuleInFlight, owners: frozenset[WeightOwner]) -> list[int]:
    """Return the parts of a module whose tables belong to `owners` and are still to be looked up."""
    return [part for part, owner in enumerate(owners_of_parts(module)) if owner in owners and part not in state.outputs]


# -- learning rates that move ------------------------------------------------------------------------------------


@contextmanager
def _updates_at_present_rate(module: Any, set_rates: SetRates | None) -> Iterator[None]:
    """Let the lookups of fused tables give rows whose backward updates at the rate that holds then."""
    if set_rates is None or not torch.is_grad_enabled():
        yield
        return
    set_rates()
    # By kernel, not by owner: a part with one table of a dense kernel counts as the dense optimizer's altogether.
    patched = [lookup for lookup in tables_of(module)._lookups if lookup is not _NOTHING and _tbes_of([lookup])]
    for lookup in patched:
        lookup.forward = _FusedLookup(lookup.forward, _tbes_of([lookup]), set_rates)
    try:
        yield
    finally:
        for lookup in patched:
            del lookup.forward


@dataclass(frozen=True, slots=True)
class _FusedLookup:
    """One lookup of fused tables, that can be repeated."""

    forward: Callable[[KeyedJaggedTensor], Tensor]
    kernels: list[SplitTableBatchedEmbeddingBagsCodegen]
    set_rates: SetRates

    def __call__(self, features: KeyedJaggedTensor) -> Tensor:
        # Without an input that needs a gradient there would be no backward; feature processors' weights need one.
        weights = features.weights_or_none()
        anchor = weights if weights is not None and weights.requires_grad else torch.zeros((), requires_grad=True)
        rows: Tensor = _AtPresentRate.apply(anchor, self, features)  # type: ignore[no-untyped-call]
        return rows

    def rates(self) -> list[float]:
        """The rates that the kernels have; they are kept on the host."""
        return [tbe.get_learning_rate() for tbe in self.kernels]

    def run(self, features: KeyedJaggedTensor) -> tuple[Tensor, GradientEdge]:
        # TorchRec puts weights that scale their gradients in the place of those it is given: not twice.
        with torch.enable_grad():
            rows = self.forward(copy.copy(features))
        return rows.detach(), get_gradient_edge(rows)

    def run_again(self, features: KeyedJaggedTensor, counts: list[int]) -> GradientEdge:
        """Look up once more as when the iteration counts were `counts`; leave them as they are."""
        ahead = _differences(_counts(self.kernels), counts)  # this lookup, and those of later batches
        _uncount(self.kernels, ahead)
        _, edge = self.run(features)
        repeated = _differences(_counts(self.kernels), counts)
        _uncount(self.kernels, _differences(repeated, ahead))
        return edge


def _with_own_weights(features: KeyedJaggedTensor) -> tuple[KeyedJaggedTensor, Tensor | None]:
    """Return the same ids with weights that a graph can begin at, and these; None where weights need no gradient."""
    weights = features.weights_or_none()
    if weights is None or not weights.requires_grad:
        return features, None
    leaf = weights.detach().requires_grad_()
    own = copy.copy(features)
    own._weights = leaf
    return own, leaf


def _uncount(kernels: list[SplitTableBatchedEmbeddingBagsCodegen], num_lookups: list[int]) -> None:
    """Take lookups back from the iteration count of each kernel, on the current stream."""
    with torch.no_grad():
        for tbe, num in zip(kernels, num_lookups, strict=True):
            if num:
                tbe.iter.sub_(num)
                tbe.iter_cpu.sub_(num)


class _AtPresentRate(torch.autograd.Function):
    """Rows of fused tables whose backward, and so their update, takes the learning rate of its own time.

    FBGEMM 1.8 reads the rate in the forward and keeps it for the backward. But batch N is looked up before the
    schedule has moved on to step N. So the graph is cut behind the rows: where the rate has changed by the time of
    the backward, the kernels' forward runs once more on the same ids and its graph takes the gradient. The rows of
    that are thrown away (in a stale mode they may be newer ones); the gradient by a row does not depend on them.

    On CUDA autograd runs a backward on the stream of its forward, this one too: on the lookup stream, where the
    repeated forward and the inner backward then run in turn, behind the last update and before the next lookup.
    The inner graph has the kernels' weights for its only leaves, which accumulate nothing, so no stream is joined
    but this one. DistributedDataParallel ignores these weights, its hooks see nothing of the inner backward.
    """

    @staticmethod
    def forward(ctx: Any, anchor: Tensor, lookup: _FusedLookup, features: KeyedJaggedTensor) -> Tensor:
        features, ctx.weights = _with_own_weights(features)
        ctx.lookup, ctx.features = lookup, features
        ctx.counts, ctx.rates = _counts(lookup.kernels), lookup.rates()
        rows, ctx.edge = lookup.run(features)
        return rows

    @staticmethod
    def backward(ctx: Any, grad: Tensor) -> tuple[Tensor | None, None, None]:
        lookup: _FusedLookup = ctx.lookup
        edge, ctx.edge = ctx.edge, None  # a second backward (retain_graph=True) finds the first one's graph used up
        lookup.set_rates()
        if edge is None or lookup.rates() != ctx.rates:
            edge = lookup.run_again(ctx.features, ctx.counts)
        torch.autograd.backward(edge, grad)
        if ctx.weights is None:
            return None, None, None
        of_weights, ctx.weights.grad = ctx.weights.grad, None
        return of_weights, None, None


class _Nothing:
    """In the place of a lookup that is not run now, and of its rows."""

    def __call__(self, features: KeyedJaggedTensor) -> _Nothing:
        return self

    def view(self, *shape: int) -> _Nothing:
        return self


_NOTHING = _Nothing()


def _already_started(output: Awaitable[torch.Tensor], context: Any) -> Awaitable[torch.Tensor]:
    return output
