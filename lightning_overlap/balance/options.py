"""`Balance`: how the samples of a batch are weighed, and which batches are balanced."""

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any


@dataclass(frozen=True, slots=True)
class Balance:
    """Balances batches across ranks: before a batch is copied, ranks exchange samples until their costs are alike.

    Each rank keeps its number of samples, and the global batch stays the same. All of it happens on the host, on a
    thread, while earlier batches train. The functions are called on that thread, with the data loader's batch, before
    any batch-transfer hook.

    Args:
        cost: Called with a batch; returns the cost of each sample: a tensor or array `(B,)` or B numbers, on the host,
            finite and not negative, for example the square of a sequence's length.
        split: Called with a batch; returns a list with one object for each sample, which `pickle` can send. Only for
            batches that the package cannot split itself.
        join: Called with a list of such objects; returns their batch. Goes with `split`.
        evaluation: Balance the batches of validations and tests too; predictions stay in the data loader's order.

    Raises:
        TypeError: An argument is not of its kind.
        ValueError: `split` without `join`, or `join` without `split`.
    """

    cost: Callable[[Any], Any]
    split: Callable[[Any], Sequence[Any]] | None = None
    join: Callable[[list[Any]], Any] | None = None
    evaluation: bool = False

    def __post_init__(self) -> None:
        for name in ("cost", "split", "join"):
            function = getattr(self, name)
            if not (callable(function) or (function is None and name != "cost")):
                raise TypeError(f"Balance: {name} is a function, got {function!r}.")
        if (self.split is None) is not (self.join is None):
            given, missing = ("join", "split") if self.split is None else ("split", "join")
            raise ValueError(f"Balance: {given} needs {missing} as well: one undoes the other.")
        if not isinstance(self.evaluation, bool):
            raise TypeError(f"Balance: evaluation is True or False, got {self.evaluation!r}.")


def check_balance(balance: object) -> None:
    """Raise a TypeError unless this is a `Balance` or None."""
    if not isinstance(balance, Balance | None):
        raise TypeError(
            f"balance is a lightning_overlap.Balance, or None, got {balance!r}. For example: "
            "balance=Balance(cost=lambda batch: batch['lengths'] ** 2)."
        )
