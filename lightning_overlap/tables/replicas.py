"""Replicas: data-parallel tables that every rank updates in the backward, with the summed gradient."""

import itertools
import operator
from collections.abc import Callable, Collection, Iterable, Iterator, Mapping, Sequence
from functools import partial
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec import EmbeddingBagCollection, EmbeddingCollection
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.distributed.types import ShardingPlan
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer
from typing_extensions import override

from ..compat.fbgemm import SharingKernel
from ..compat.torch import call_after_backward, mark_in_backward, never_compiled
from ..compat.torchrec import group_of, kernels_in, lookups_of, replace_kernel
from ..text import check_known, some
from .fused_arguments import KERNEL_EPS, ONLY_BY_GRADIENTS, kind_of
from .supported_modules import DATA_PARALLEL, table_modules
from .table import Rule, Table

ReplicateTables: TypeAlias = bool | int | Sequence[str] | None
"""A number n for tables with fewer than n rows (False or 0: none), table names, or None: n is a rank's batch size."""


def check_replicate_tables(replicate: ReplicateTables) -> None:
    """Check the strategy's argument as far as possible without the tables; raise a TypeError or ValueError."""
    is_names = isinstance(replicate, Sequence) and not isinstance(replicate, str)
    if is_names and all(isinstance(name, str) for name in replicate):  # type: ignore[union-attr]
        return
    if replicate is True or not (replicate is None or isinstance(replicate, int)):
        raise TypeError(
            "replicate_tables must be None (tables with fewer rows than a rank's batch), False, a number of rows, or "
            f"names of tables, got {replicate!r}."
        )
    if isinstance(replicate, int) and replicate < 0:
        raise ValueError(f"replicate_tables must be a number of rows >= 0, got {replicate}. False replicates no table.")


def tables_to_replicate(
    replicate: ReplicateTables,
    tables: list[Table],
    sharding: Mapping[str, str] | None,
    *,
    batch_size: int | None,
    fused: tuple[type, Mapping[str, Any]] | None,
    world_size: int,
) -> frozenset[str]:
    """Return the names of the tables to replicate: those that the user names, or else, on several ranks, small tables.

    `sharding` has table -> the user's type; with None, a user's plan or planner, no small tables are chosen. If a
    module has data-parallel tables of the dense optimizer, its other tables are not chosen, since TorchRec looks up all
    of them together. A planner knows only names: tables of one name are all replicated, or none is.
    Raise a ValueError if a table that the user names does not exist, has another type, or cannot be replicated.
    """
    given = frozenset() if replicate is None or isinstance(replicate, int) else frozenset(replicate)
    kinds = sharding or {}
    known: dict[str, list[Table]] = {}
    for table in tables:
        known.setdefault(table.name, []).append(table)
    for name in sorted(given):
        check_known("table", name, known, "replicate_tables: ")
        if kinds.get(name, DATA_PARALLEL) != DATA_PARALLEL:
            raise ValueError(f"replicate_tables has {name!r}, but sharding makes it {kinds[name]!r}: remove one.")
        for table in known[name]:
            reason = _why_not(table, fused)
            if reason is not None:
                raise ValueError(f"replicate_tables: {table.path} cannot be replicated: {reason}.")
    if given or world_size == 1 or sharding is None:
        return given
    most = int(replicate) if isinstance(replicate, int) else batch_size or 0
    mixed = {table.module for table in tables if kinds.get(table.name) == DATA_PARALLEL}

    def is_small(table: Table) -> bool:
        return table.parameter.shape[0] < most and table.module not in mixed and _why_not(table, fused) is None

    return frozenset(name for name, alike in known.items() if name not in kinds and all(map(is_small, alike)))


def replicas_in(plan: ShardingPlan, tables: list[Table], names: Collection[str], world_size: int) -> list[Table]:
    """Return the data-parallel tables of a plan that are in `names`; raise a ValueError if plan and names disagree."""
    whole = []
    for table in tables:
        kind = getattr(table.planned(plan), "sharding_type", None)
        if kind == DATA_PARALLEL:
            whole.append(table)
        elif table.name in names and world_size > 1:
            raise ValueError(
                f"table {table.path} is in replicate_tables, but the plan makes it {kind}: make it data_parallel."
            )
    replicas = [table for table in whole if table.name in names]
    modules = {table.module for table in replicas}
    if mixed := [table.path for table in whole if table.module in modules and table not in replicas]:
        raise ValueError(
            f"the dense optimizer would train the data-parallel tables {some(mixed)}, but replicate_tables has other "
            f"tables of the same module ({some(table.path for table in replicas)}). TorchRec looks up all "
            "data-parallel tables of a module together: replicate all of them, or none."
        )
    return replicas


def _why_not(table: Table, fused: tuple[type, Mapping[str, Any]] | None) -> str | None:
    kind = table.sharder.module_type
    if kind is EmbeddingCollection:
        return "it belongs to an EmbeddingCollection, whose data-parallel tables TorchRec pools on a CPU"
    if kind is not EmbeddingBagCollection:
        return f"it belongs to a {kind.__name__}"
    if table.parameter.dtype != torch.float32:
        return f"its weights are {table.parameter.dtype}, which only the fused kernel rounds correctly"
    if not table.parameter.requires_grad:
        return "it is not trained"
    optimizer = table.fused_optimizer or fused
    if optimizer is None:
        return "it has no fused optimizer; set for example fused_optimizer=(torch.optim.SGD, {'lr': 0.1})"
    optimizer_class, kwargs = optimizer
    update = kind_of(optimizer_class)
    if update not in ONLY_BY_GRADIENTS:  # else a dense update equals a sparse one
        return f"{optimizer_class.__name__} changes rows without a gradient; SGD, Adagrad and RowWiseAdagrad do not"
    known = ("lr", "learning_rate", "eps", "optimizer")
    other = sorted(name for name, value in kwargs.items() if name not in known and value)
    if other:
        return f"replicas do not support {optimizer_class.__name__} with {', '.join(other)}"
    if update is not EmbOptimType.EXACT_SGD and not kwargs.get("eps", KERNEL_EPS) > 0:
        return f"{optimizer_class.__name__} with eps=0 divides 0 by 0 in rows without a gradient"
    return None


class ReplicaOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The optimizer of replicas, with the interface of TorchRec's fused optimizers and FBGEMM's kernels.

    `weights` has name -> table, all of one width, consecutive from index `start` in a kernel's flat weights.
    """

    def __init__(self, rule: Rule, weights: Mapping[str, Tensor], start: int) -> None:
        tables = list(weights.values())
        rows_of, dim = [len(weight) for weight in tables], tables[0].shape[1]
        self._part, self._dim = slice(start, start + sum(rows_of) * dim), dim
        width = {EmbOptimType.EXACT_SGD: (0,), EmbOptimType.EXACT_ADAGRAD: (dim,)}.get(rule.kind, ())
        self._state = torch.zeros(sum(rows_of), *width, dtype=tables[0].dtype, device=tables[0].device)
        states = {
            weight: {f"{name.split('.')[-2]}.momentum1": state} if state.numel() else {}
            for (name, weight), state in zip(weights.items(), self._state.split(rows_of), strict=True)
        }
        super().__init__(weights, states, [{"params": tables, "lr": rule.rate}])
        self._rate, self._eps = rule.rate, rule.eps
        self.optimizer = rule.kind  # the kind of optimizer, as in FBGEMM's kernels
        self.iter = self.iter_cpu = torch.zeros(1, dtype=torch.int64)  # number of updates

    def get_learning_rate(self) -> float:
        """Return the rate of the next update."""
        return self._rate

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next update."""
        self._rate = rate

    @override
    def step(self, closure: Any = None) -> None:
        """Only read the rate of the parameter group, like TorchRec's: the backward has updated the tables."""
        [group] = self.param_groups
        self._rate = float(group["lr"])

    @override
    def zero_grad(self, set_to_none: bool = False) -> None:
        self.step()

    def update(self, weights: Tensor, gradient: Tensor) -> None:
        """Update this optimizer's tables in place; both arguments are those of the whole kernel, `(num_weights,)`."""
        self.iter += 1
        part, of_part = weights[self._part].view(-1, self._dim), gradient[self._part].view(-1, self._dim)
        if self.optimizer is EmbOptimType.EXACT_SGD:
            part.add_(of_part, alpha=-self._rate)
        elif self.optimizer is EmbOptimType.EXACT_ADAGRAD:
            self._state.addcmul_(of_part, of_part)
            part.addcdiv_(of_part, self._state.sqrt().add_(self._eps), value=-self._rate)
        else:
            self._state.add_(of_part.square().mean(1))
            factor = self._rate / self._state.sqrt().add_(self._eps)
            part.addcmul_(of_part, factor.unsqueeze(1), value=-1.0)


class ReplicaKernel(SharingKernel):
    """A dense kernel that updates its tables in the backward, identically on all ranks.

    Every call uses a new leaf, so that two calls in a step make two updates, like a fused kernel. An update waits for
    its all-reduce at the end of the backward, when all other collectives have started. Like FBGEMM's kernels it does
    not change `Tensor._version` (`write_counts.py`).

    It has the state of the kernel `dense`, whose place it takes, and sums gradients over the ranks of `group`.
    `optimizers` are in the order of the kernel's tables.
    """

    def __init__(
        self,
        dense: DenseTableBatchedEmbeddingBagsCodegen,
        optimizers: Sequence[ReplicaOptimizer],
        group: dist.ProcessGroup,
    ) -> None:
        super().__init__(dense)
        self.optimizers, self.group = optimizers, group
        # Passes the scheduler's rates to the optimizers before an update; None without a scheduler.
        self.set_rates: Callable[[], None] | None = None
        # What a gradient becomes before it is sent; None: it stays.
        self.pass_on: Callable[[Tensor | None], Tensor | None] | None = None

    @override
    @never_compiled
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("batch_size_per_feature_per_rank"):
            raise RuntimeError(
                "replicated tables got a KeyedJaggedTensor whose batch size varies by feature, which TorchRec does not "
                "support where a module has data-parallel and other tables. Train with replicate_tables=False."
            )
        if not torch.is_grad_enabled():
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        leaf = self.weights.data.requires_grad_()
        leaf.register_post_accumulate_grad_hook(self._sum_gradient)
        return self.look_up_in(leaf, *args, **kwargs)

    def _sum_gradient(self, leaf: Tensor) -> None:
        """Start to sum the gradient of one call over the ranks, with TorchRec's scale for sharded tables."""
        gradient, leaf.grad = leaf.grad, None
        if self.pass_on is not None:
            gradient = self.pass_on(gradient)
        assert gradient is not None
        if get_gradient_division():
            gradient.div_(self.group.size())
        work = dist.all_reduce(gradient, group=self.group, async_op=True)
        call_after_backward(partial(self._update, gradient, work))

    @torch.no_grad()
    def _update(self, gradient: Tensor, work: Any) -> None:
        """Wait for the sum and update the tables, on the current stream (after a backward, its caller's stream)."""
        work.wait()
        if gradient.is_cuda:
            gradient.record_stream(torch.cuda.current_stream())  # it was allocated on the lookup stream
        if self.set_rates is not None:
            self.set_rates()
        for optimizer in self.optimizers:
            optimizer.update(self.weights.data, gradient)


def make_replicas(
    model: nn.Module,
    modules: Iterable[str],
    trained: Mapping[str, Mapping[str, Rule]],
    *,
    rate_per_table: bool = False,
) -> None:
    """Put replica kernels into the place of the dense ones of `modules`; `trained`: module -> table -> rule.

    With `rate_per_table` each table has an optimizer of its own.
    """
    for name in modules:
        module: Any = model.get_submodule(name)
        weights = {key.split(".")[-2]: (key, weight) for key, weight in module.named_parameters()}
        lookups, ranks = lookups_of(module), group_of(module)
        for number, lookup in enumerate(lookups):
            if not isinstance(lookup, DistributedDataParallel):
                continue
            assert ranks is not None
            lookups[number] = lookup.module  # without DDP, which also sums gradients
            for at, (tables, dense) in enumerate(kernels_in(lookup)):
                assert isinstance(dense, DenseTableBatchedEmbeddingBagsCodegen)
                optimizers = list(
                    _optimizers(
                        [(trained[name][one.name], one.embedding_dim, *weights[one.name]) for one in tables],
                        rate_per_table,
                    )
                )
                replace_kernel(lookup.module, at, ReplicaKernel(dense, optimizers, ranks))
                module.fused_optimizer.optimizers.extend(("", optimizer) for optimizer in optimizers)


def _optimizers(tables: list[tuple[Rule, int, str, nn.Parameter]], rate_per_table: bool) -> Iterator[ReplicaOptimizer]:
    """Yield an optimizer for each run of tables, (rule, width, name, weight), of the same rule and width."""
    start = 0
    alike = operator.itemgetter(0, 1, 2) if rate_per_table else operator.itemgetter(0, 1)
    for (rule, *_), run in itertools.groupby(tables, key=alike):
        weights = {name: weight for _, _, name, weight in run}
        yield ReplicaOptimizer(rule, weights, start)
        for weight in weights.values():
            start += weight.numel()
            mark_in_backward(weight, [EmptyFusedOptimizer()])


def replica_kernels(module: Any) -> list[ReplicaKernel]:
    """Return the kernels of the replicas within a module."""
    lookups = [lookup for own in table_modules(module).values() for lookup in lookups_of(own)]
    return [part for lookup in lookups for part in lookup.modules() if isinstance(part, ReplicaKernel)]
