"""An optimizer for the dense part and the fused tables' learning rates, so that a scheduler changes both."""

import math
from collections.abc import Callable, Iterable, Mapping, Sequence
from typing import Any

from torch import Tensor, nn
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer
from typing_extensions import override

from ..compat.torch import never_compile_methods
from ..distributed import warn_on_rank_zero
from ..text import some
from .sharded_module import SetRates
from .supported_modules import sharded_modules, tables_of
from .table import Rule

_EXPECTED = ("momentum", "betas", "weight_decay")  # schedulers (cycled momentum) and monitors expect them in each group

TABLES = "tables"  # entry of a fused group


@never_compile_methods
class DenseAndFused(Optimizer):
    """A dense optimizer, with additional parameter groups for the learning rates of fused tables.

    `fused` has initial learning rate -> this rank's fused optimizers, none for rates of other ranks' tables: all ranks
    have the same groups. The fused groups come last, without parameters, since the backward updates the tables.
    `tables` has the full names of the tables by rate, for messages and for checkpoints: a group keeps them as TABLES.
    With `rates` each table has a group: it has table -> initial learning rate, and the keys of `fused` and `tables` are
    tables.
    """

    def __init__(
        self,
        dense: Optimizer,
        fused: Mapping[Any, list[KeyedOptimizer]],
        tables: Mapping[Any, Iterable[str]] | None = None,
        rates: Mapping[str, float] | None = None,
    ) -> None:
        self.dense, tables = dense, tables or {}
        first = [float(key if rates is None else rates[key]) for key in fused]
        self.fused_groups: list[dict[str, Any]] = [
            {
                "params": [],
                **{key: value for key, value in dense.defaults.items() if key in _EXPECTED},
                "lr": rate,
                "name": "fused" if len(fused) == 1 and rates is None else f"fused_{key}",
                TABLES: sorted(tables.get(key, ())),
            }
            for key, rate in zip(fused, first, strict=True)
        ]
        self._fused_optimizers = list(fused.values())
        self._tables = [some(name.rpartition(".")[2] for name in group[TABLES]) for group in self.fused_groups]
        self.defaults = dense.defaults
        self.first_rates = [float(group["lr"]) for group in self.param_groups]
        """The rate of each group before a scheduler sets it."""
        self._rates = first  # of the fused groups when they were set last
        self.has_warned = False  # that fused tables take the dense part's rate
        # Instead of the base class's constructor, which makes groups and state.
        self.__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The dense optimizer's groups, then the fused groups."""
        return [*self.dense.param_groups, *self.fused_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The dense optimizer's state; kernels keep the state of fused tables."""
        return self.dense.state

    @override
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return self.dense.step(closure)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.dense.zero_grad(set_to_none)

    def set_fused_rates(self) -> None:
        """Pass the learning rates of the fused groups to this rank's kernels; cheap without changes."""
        rates = [float(group["lr"]) for group in self.fused_groups]
        if rates != self._rates:
            self._rates = rates
            self._warn_if_overwritten()
        for rate, optimizers in zip(rates, self._fused_optimizers, strict=True):
            for optimizer in optimizers:
                [kernel_group] = optimizer.param_groups
                if kernel_group["lr"] != rate:
                    kernel_group["lr"] = rate
                    optimizer.zero_grad()  # in TorchRec, only passes the rate to the kernel

    def is_overwritten(self, rates: Sequence[float]) -> bool:
        """Whether one number became the rate of a fused and of a dense group that began at different rates."""
        num_dense = len(rates) - len(self.fused_groups)
        return any(
            rates[fused] == rates[dense] != 0 and self.first_rates[fused] != self.first_rates[dense]
            for fused in range(max(0, num_dense), len(rates))
            for dense in range(num_dense)
        )

    def described(self) -> str:
        """Return the groups in their order, with their first rates."""
        num_dense = len(self.first_rates) - len(self.fused_groups)
        whose = ["dense"] * num_dense + [f"fused{tables and f' ({tables})'}" for tables in self._tables]
        return ", ".join(f"{one} lr={rate:g}" for one, rate in zip(whose, self.first_rates, strict=True))

    def _warn_if_overwritten(self) -> None:
        now = [_on_host(group["lr"]) for group in self.param_groups]
        if not self.has_warned and self.is_overwritten(now):
            self.has_warned = True
            warn_on_rank_zero(
                "fused tables have got the learning rate of the dense part: a scheduler, or a loop over param_groups, "
                f"gives all groups of combined_optimizer one rate.\n  groups: {self.described()}, now at "
                f"{some(f'{rate:g}' for rate in now)}\nSet a rate for each group, or scale what each group has."
            )

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError(
            "combined_optimizer cannot add a parameter group: schedulers and checkpoints identify its groups by "
            "position. Add the group to the dense optimizer before combined_optimizer."
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        state_dict = self.dense.state_dict()
        return {**state_dict, "param_groups": [*state_dict["param_groups"], *map(dict, self.fused_groups)]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load a result of `state_dict`; raise a ValueError if it has another number of parameter groups."""
        groups, num_dense = state_dict["param_groups"], len(self.dense.param_groups)
        if len(groups) != len(self.param_groups):
            why = "Was it saved without combined_optimizer, with other learning rates, or another rate_per_table?"
            if not self.fused_groups:
                why = (
                    "This run has no fused tables, as under another strategy. To go on from the weights alone, load "
                    "them with module.load_state_dict, and fit without ckpt_path."
                )
            raise ValueError(
                f"the saved optimizer has {len(groups)} parameter groups, this optimizer has "
                f"{num_dense} dense and {len(self.fused_groups)} fused groups (one for each learning rate of fused "
                f"tables, with rate_per_table for each table). {why}"
            )
        self.dense.load_state_dict({**state_dict, "param_groups": groups[:num_dense]})
        for group, saved in zip(self.fused_groups, groups[num_dense:], strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "name", TABLES)})

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


def _on_host(rate: Any) -> float:
    return math.nan if isinstance(rate, Tensor) and rate.device.type != "cpu" else float(rate)


def combined_optimizer(module: nn.Module, dense: Optimizer) -> DenseAndFused:
    """Return an optimizer that steps like `dense` and also has the learning rates of `module`'s fused tables.

    For `configure_optimizers`: a scheduler of the result changes the rates of both. In every mode the fused update of
    a batch uses the rate that the scheduler sets for that batch's step. Tables that begin at one rate share a group;
    with `OverlapEmbeddingStrategy(rate_per_table=True)` each table has a group, named `fused_COLLECTION.TABLE`, in the
    order of these names.

        def configure_optimizers(self):
            dense = torch.optim.Adam(p for _, p in in_backward_optimizer_filter(self.named_parameters()))
            optimizer = combined_optimizer(self, dense)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    Args:
        module: The module with the tables. Under another strategy, which does not shard them, no groups are added.
        dense: The optimizer of everything except fused tables. Of several dense optimizers, pass any.

    Raises:
        TypeError: `dense` is not a `torch.optim.Optimizer`, or it is a combined or keyed optimizer.
        ValueError: The strategy has not sharded a module with tables.
    """
    if not isinstance(dense, Optimizer) or isinstance(dense, (KeyedOptimizer, DenseAndFused)):
        raise TypeError(
            "combined_optimizer takes a torch.optim.Optimizer of the dense part, and adds the fused tables itself; got "
            f"{type(dense).__name__}."
        )
    optimizers: dict[Any, list[KeyedOptimizer]] = {}  # of a group
    tables: dict[Any, set[str]] = {}
    rates: dict[Any, float] = {}
    modules = sharded_modules(module)
    per_table = any(getattr(sharded, "rate_per_table", False) for sharded in modules.values())
    for name, sharded in modules.items():
        trained: dict[str, Rule] | None = getattr(sharded, "trained_in_backward", None)
        if trained is None:
            raise ValueError(
                f"{name} was not sharded by OverlapEmbeddingStrategy: its fused tables' rates are unknown."
            )
        alone = getattr(sharded, "rate_per_table", False)
        # Keys of one kind, as they are sorted: numbers, or with `per_table` names, also for modules without it.
        shared = {table: str(rule.rate) if per_table else rule.rate for table, rule in trained.items()}
        group_of = {table: f"{name}.{table}" for table in trained} if alone else shared
        for table, rule in trained.items():
            optimizers.setdefault(group_of[table], [])
            tables.setdefault(group_of[table], set()).add(f"{name}.{table}")
            rates[group_of[table]] = rule.rate
        for _, optimizer in tables_of(sharded).fused_optimizer.optimizers:  # of the kernels on this rank
            # All tables of a kernel have the same group; frozen tables are not in `trained`.
            table = next(iter(optimizer.params)).split(".")[-2]
            if table in trained:
                optimizers[group_of[table]].append(optimizer)
    return DenseAndFused(dense, dict(sorted(optimizers.items())), tables, rates if per_table else None)


def optimizer_name(optimizer: Optimizer) -> str:
    """Return the name of an optimizer's class for a message; for a combined optimizer the class of its dense one."""
    if isinstance(optimizer, DenseAndFused):
        return f"{type(optimizer.dense).__name__} (in combined_optimizer)"
    return type(optimizer).__name__


def rate_setter(optimizers: Iterable[Optimizer]) -> SetRates | None:
    """Return the function that sets a combined optimizer's rates, or None; raise a ValueError for several of them."""
    moving = [optimizer for optimizer in optimizers if isinstance(optimizer, DenseAndFused) and optimizer.fused_groups]
    if len(moving) > 1:
        raise ValueError(
            f"{len(moving)} optimizers of configure_optimizers come from combined_optimizer, so they would set the "
            "learning rates of the same fused tables. Use combined_optimizer for one optimizer."
        )
    return moving[0].set_fused_rates if moving else None
