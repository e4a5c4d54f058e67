"""Replicas: data-parallel tables that are updated in the backward, like fused tables.

Each backward sums the gradient of a lookup over the ranks, and then every rank makes the same update. The update equals
the fused kernel's: rows without a gradient do not change. `replicated_tables.py` chooses the tables.
"""

from __future__ import annotations

import itertools
import operator
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor, nn
from torch.nn.parallel import DistributedDataParallel
from torchrec.distributed.comm_ops import get_gradient_division
from torchrec.optim.fused import EmptyFusedOptimizer, FusedOptimizer
from typing_extensions import override

from .supported_modules import table_modules
from .table import Rule

_IN_BACKWARD = "_in_backward_optimizers"
"""The attribute that `in_backward_optimizer_filter` uses."""


class ReplicaOptimizer(FusedOptimizer):  # type: ignore[misc]
    """The optimizer of replicas, with the interface of TorchRec's fused optimizers: `step` does not update tables.

    Iteration count and learning rate have the names of FBGEMM's kernels.

    Args:
        rule: The fused optimizer.
        weights: Name -> table, `(num_embeddings, embedding_dim)`, all of one width and consecutive in a kernel's flat
            weights.
        start: Index of the first table in the flat weights.
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
        self.optimizer = rule.kind
        """The kind of optimizer, as in FBGEMM's kernels."""
        self.iter = self.iter_cpu = torch.zeros(1, dtype=torch.int64)
        """Number of updates."""

    def get_learning_rate(self) -> float:
        """Return the rate of the next update."""
        return self._rate

    def set_learning_rate(self, rate: float) -> None:
        """Set the rate of the next update."""
        self._rate = rate

    @override
    def step(self, closure: Any = None) -> None:
        """Only read the rate of the parameter group: the backward has updated the tables."""
        [group] = self.param_groups
        self._rate = float(group["lr"])

    @override
    def zero_grad(self, set_to_none: bool = False) -> None:
        """Read the rate of the parameter group, like TorchRec's fused optimizers."""
        self.step()

    def update(self, weights: Tensor, gradient: Tensor) -> None:
        """Update this optimizer's tables in place.

        Args:
            weights: All weights of the kernel, flat, `(num_weights,)`.
            gradient: Their gradient, summed over the ranks, of the same shape and dtype.
        """
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


class ReplicaKernel(DenseTableBatchedEmbeddingBagsCodegen):  # type: ignore[misc]
    """A dense kernel that updates its tables in the backward, identically on all ranks.

    Every call uses a new leaf instead of the kernel's parameter, so that two calls in a step make two updates, like a
    fused kernel. The all-reduce of a gradient starts as soon as the gradient is computed. The update waits for it at
    the end of the backward, when all other collectives have started, or at the optimizer step. Like FBGEMM's kernels
    it does not change `Tensor._version` (`write_counts.py`).
    """

    optimizers: list[ReplicaOptimizer]
    """The optimizers, in the order of their tables."""
    group: dist.ProcessGroup
    """The ranks to sum gradients over."""
    set_rates: Callable[[], None] | None
    """Passes the scheduler's rates to the optimizers; None: no scheduler changes them."""
    held: list[tuple[Tensor, Any]] | None
    """(gradient, all-reduce) of updates that wait for an optimizer step; None: updates do not wait."""

    @override
    def forward(self, *args: Any, **kwargs: Any) -> Tensor:
        if kwargs.get("batch_size_per_feature_per_rank"):
            raise RuntimeError(
                "replicated tables got a KeyedJaggedTensor whose batch size varies by feature, which TorchRec does not "
                "support where a module has data-parallel and other tables. Train with replicate_tables=False."
            )
        if torch.is_grad_enabled():
            leaf = self.weights.data.requires_grad_()
            leaf.register_post_accumulate_grad_hook(self._sum_gradient)
            self.__dict__["weights"] = leaf  # hides the module's parameter
        try:
            return super().forward(*args, **kwargs)  # type: ignore[no-any-return]
        finally:
            self.__dict__.pop("weights", None)

    def _sum_gradient(self, leaf: Tensor) -> None:
        """Start to sum the gradient of one call over the ranks, with TorchRec's scale for sharded tables."""
        gradient, leaf.grad = leaf.grad, None
        assert gradient is not None
        if get_gradient_division():
            gradient.div_(self.group.size())
        work = dist.all_reduce(gradient, group=self.group, async_op=True)
        if self.held is not None:
            self.held.append((gradient, work))
            return
        torch.autograd.Variable._execution_engine.queue_callback(partial(self._update, gradient, work))

    def hold(self) -> None:
        """Let updates wait for `update_held`; drop waiting updates."""
        self.held = []

    def update_held(self) -> None:
        """Make the waiting updates, in order, on the current stream."""
        if self.held:
            held, self.held = self.held, []
            for gradient, work in held:
                self._update(gradient, work)

    def release(self) -> None:
        """Let each backward make its update; drop waiting updates."""
        self.held = None

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


def make_replicas(model: nn.Module, modules: Iterable[str], trained: Mapping[str, Mapping[str, Rule]]) -> None:
    """Turn the kernels of the data-parallel tables of `modules` into replica kernels, in place.

    `trained` has module -> table -> rule.
    """
    for name in modules:
        module: Any = model.get_submodule(name)
        weights = {key.split(".")[-2]: (key, weight) for key, weight in module.named_parameters()}
        for number, lookup in enumerate(module._lookups):
            if not isinstance(lookup, DistributedDataParallel):
                continue
            module._lookups[number] = lookup.module  # without DDP, which also sums gradients
            for group, part in zip(lookup.module.grouped_configs, lookup.module._emb_modules, strict=True):
                kernel = part.emb_module
                assert isinstance(kernel, DenseTableBatchedEmbeddingBagsCodegen)
                kernel.__class__ = ReplicaKernel
                kernel.group, kernel.set_rates, kernel.held = module._env.process_group, None, None
                tables = [
                    (trained[name][one.name], one.embedding_dim, *weights[one.name]) for one in group.embedding_tables
                ]
                kernel.optimizers = list(_optimizers(tables))
                module.fused_optimizer.optimizers.extend(("", optimizer) for optimizer in kernel.optimizers)


def _optimizers(tables: list[tuple[Rule, int, str, nn.Parameter]]) -> Iterator[ReplicaOptimizer]:
    """Yield an optimizer for each run of tables, (rule, width, name, weight), of the same rule and width."""
    start = 0
    for (rule, _), run in itertools.groupby(tables, key=operator.itemgetter(0, 1)):
        weights = {name: weight for _, _, name, weight in run}
        yield ReplicaOptimizer(rule, weights, start)
        for weight in weights.values():
            start += weight.numel()
            setattr(weight, _IN_BACKWARD, [EmptyFusedOptimizer()])


def replica_kernels(module: Any) -> list[ReplicaKernel]:
    """Return the kernels of the replicas within a module."""
    lookups = [lookup for own in table_modules(module).values() for lookup in own._lookups]
    return [part for lookup in lookups for part in lookup.modules() if isinstance(part, ReplicaKernel)]


def follow_rates(model: nn.Module, set_rates: Callable[[], None] | None) -> None:
    """Make replicas call `set_rates` before each update; None: no scheduler changes their rates."""
    for kernel in replica_kernels(model):
        kernel.set_rates = set_rates
