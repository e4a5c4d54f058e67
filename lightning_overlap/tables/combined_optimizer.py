"""One optimizer for a module's dense part and the learning rates of its fused tables: one schedule moves both."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from torch import nn
from torch.optim import Optimizer
from torchrec.optim.keyed import KeyedOptimizer
from typing_extensions import override

from .sharded_module import SetRates, fused_optimizers
from .supported_modules import sharded_modules
from .table import Rule

_EXPECTED = ("momentum", "betas", "weight_decay")
"""Entries other than `lr` that schedulers (cycled momentum) and monitors look for in every group."""


class DenseAndFused(Optimizer):
    """A dense optimizer, with parameter groups of its own for the learning rates of fused tables.

    Its parameter groups are those of the dense optimizer and then one for each learning rate that fused tables began
    with. Such a group has no parameters: the tables are updated inside backward, and `step` is the dense
    optimizer's. Learning-rate schedulers, monitors and checkpoints see all of them alike, on all ranks the same.
    Of a fused group's entries only `lr` has an effect.

    Args:
        dense: The optimizer of the dense part.
        fused: Fused optimizers of this rank's kernels by the learning rate that their tables began with. Every rate of
            the model has an entry, an empty one on a rank without such tables.
    """

    def __init__(self, dense: Optimizer, fused: dict[float, list[KeyedOptimizer]]) -> None:
        self.dense = dense
        self.fused_groups: list[dict[str, Any]] = [
            {
                "params": [],
                **{key: value for key, value in dense.defaults.items() if key in _EXPECTED},
                "lr": rate,
                "name": "fused" if len(fused) == 1 else f"fused_{rate}",
            }
            for rate in fused
        ]
        self._fused_optimizers = list(fused.values())
        self.defaults = dense.defaults
        # In the place of the base class's constructor, which makes groups and state of its own.
        self.__setstate__({})

    @property
    def param_groups(self) -> list[dict[str, Any]]:  # type: ignore[override]
        """The dense optimizer's own groups, then the fused ones."""
        return [*self.dense.param_groups, *self.fused_groups]

    @property
    def state(self) -> Any:  # type: ignore[override]
        """The dense optimizer's state; that of fused tables is sharded and lives in their kernels."""
        return self.dense.state

    @override
    def step(self, closure: Callable[[], float] | None = None) -> Any:
        return self.dense.step(closure)

    @override
    def zero_grad(self, set_to_none: bool = True) -> None:
        self.dense.zero_grad(set_to_none)

    def set_fused_rates(self) -> None:
        """Give the kernels of this rank the learning rates of the fused groups. Cheap where nothing has changed."""
        for group, optimizers in zip(self.fused_groups, self._fused_optimizers, strict=True):
            rate = float(group["lr"])
            for optimizer in optimizers:
                [kernel_group] = optimizer.param_groups
                if kernel_group["lr"] != rate:
                    kernel_group["lr"] = rate
                    optimizer.zero_grad()  # TorchRec: hands the rate to the kernel, and does nothing else

    @override
    def add_param_group(self, param_group: dict[str, Any]) -> None:
        raise RuntimeError(
            "combined_optimizer takes no parameter group later on: schedulers and checkpoints know its groups by "
            "their positions. Add it to the dense optimizer before that."
        )

    @override
    def state_dict(self) -> dict[str, Any]:
        """Return state and groups in the form of every optimizer: whole tensors of the dense part, and numbers."""
        state_dict = self.dense.state_dict()
        return {**state_dict, "param_groups": [*state_dict["param_groups"], *map(dict, self.fused_groups)]}

    @override
    def load_state_dict(self, state_dict: dict[str, Any]) -> None:
        """Load what `state_dict` returned.

        Raises:
            ValueError: It has another number of parameter groups.
        """
        groups = state_dict["param_groups"]
        if len(groups) != len(self.param_groups):
            raise ValueError(
                f"the saved optimizer has {len(groups)} parameter groups, this one has {len(self.dense.param_groups)} "
                f"dense and {len(self.fused_groups)} fused ones (one for each learning rate of fused tables). Was it "
                "saved without combined_optimizer, or from tables with other learning rates?"
            )
        num_dense = len(self.dense.param_groups)
        self.dense.load_state_dict({**state_dict, "param_groups": groups[:num_dense]})
        for group, saved in zip(self.fused_groups, groups[num_dense:], strict=True):
            group.update({key: value for key, value in saved.items() if key not in ("params", "name")})

    def __getstate__(self) -> dict[str, Any]:
        return vars(self)


def combined_optimizer(module: nn.Module, dense: Optimizer) -> DenseAndFused:
    """Return an optimizer that steps as `dense` does and holds the learning rates of `module`'s fused tables too.

    For `configure_optimizers`: a scheduler of the result moves the rates of both, and the fused update of a batch
    takes the rate that the schedule has for that batch's step, in every mode.

        def configure_optimizers(self):
            dense = torch.optim.Adam(p for _, p in in_backward_optimizer_filter(self.named_parameters()))
            optimizer = combined_optimizer(self, dense)
            scheduler = torch.optim.lr_scheduler.LambdaLR(optimizer, warmup)
            return [optimizer], [{"scheduler": scheduler, "interval": "step"}]

    Args:
        module: The module with the tables. Where none is sharded (another strategy) there are only dense groups.
        dense: Trains everything but the fused tables. If there are several dense optimizers, any one of them.

    Raises:
        TypeError: `dense` is no `torch.optim.Optimizer`, or a combined or keyed one.
        ValueError: A module with tables was not sharded by the strategy.
    """
    if not isinstance(dense, Optimizer) or isinstance(dense, (KeyedOptimizer, DenseAndFused)):
        raise TypeError(
            "combined_optimizer takes a torch.optim.Optimizer of the dense part, which it completes by the fused "
            f"tables on its own; got {type(dense).__name__}."
        )
    by_rate: dict[float, list[KeyedOptimizer]] = {}
    for name, sharded in sharded_modules(module).items():
        trained: dict[str, Rule] | None = getattr(sharded, "trained_in_backward", None)
        if trained is None:
            raise ValueError(
                f"{name} was not sharded by OverlapEmbeddingStrategy: its fused tables' rates are unknown."
            )
        for rule in trained.values():
            by_rate.setdefault(rule.rate, [])
        for optimizer in fused_optimizers(sharded):
            # All tables of one kernel have one rate; frozen tables are not in `trained`.
            table = next(iter(optimizer.params)).split(".")[-2]
            if table in trained:
                by_rate[trained[table].rate].append(optimizer)
    return DenseAndFused(dense, dict(sorted(by_rate.items())))


def rate_setter(optimizers: Iterable[Optimizer]) -> SetRates | None:
    """Return a function that gives the kernels the present rates of the combined optimizer; None if there is none.

    Args:
        optimizers: Those of `configure_optimizers`.

    Raises:
        ValueError: Several of them are combined optimizers with fused groups.
    """
    moving = [optimizer for optimizer in optimizers if isinstance(optimizer, DenseAndFused) and optimizer.fused_groups]
    if len(moving) > 1:
        raise ValueError(
            f"{len(moving)} optimizers of configure_optimizers come from combined_optimizer: both would set the "
            "learning rates of the same fused tables. Combine one of them."
        )
    return moving[0].set_fused_rates if moving else None
