"""The columns of a collection's output in the order of its configs; TorchRec orders them by the sharding plan."""

from __future__ import annotations

from itertools import accumulate
from math import gcd
from typing import Any

import torch
from torch import Tensor
from torchrec.sparse.jagged_tensor import KeyedTensor
from typing_extensions import override

from ..compat.torch import (
    never_compile_methods,
    never_compiled,
    outside_function_transforms,
    register_pytree_node,
)


class ColumnOrder:
    """Where the columns of KeyedTensors, all with the keys of `example`, stand in the order of other `keys`."""

    def __init__(self, example: KeyedTensor, keys: list[str]) -> None:
        self.former_keys, dims = list(example.keys()), example.length_per_key()
        number_of = {key: number for number, key in enumerate(self.former_keys)}
        self.keys = keys
        self.numbers = [number_of[key] for key in keys]  # of the former keys, in the new order
        self.dims = [dims[number] for number in self.numbers]
        self.run = gcd(*dims) or 1  # so many columns at least stay together
        ends = [*accumulate(dim // self.run for dim in dims)]
        runs = [run for number in self.numbers for run in range(ends[number] - dims[number] // self.run, ends[number])]
        with torch.inference_mode(False):  # training uses them even if an evaluation has made them
            places = torch.tensor(runs, dtype=torch.int64)
            device = example.values().device
            self.places, self.former_places = places.to(device), places.argsort().to(device)

    def fits(self, columns: KeyedTensor) -> bool:
        """Whether it is the order for these columns."""
        return bool(columns.keys() == self.former_keys and columns.values().device == self.places.device)

    def put(self, values: Tensor, dim: int) -> Tensor:
        """Return values, `(.., columns, ..)` with the columns in this dimension, in the order."""
        moved: Tensor = _MovedRuns.apply(  # type: ignore[no-untyped-call]
            values, dim, self.run, self.places, self.former_places
        )
        return moved


class _MovedRuns(torch.autograd.Function):
    """Runs of columns in another order, `(.., columns, ..)`; by autograd of `split` and `cat` each run has a node."""

    @staticmethod
    def forward(ctx: Any, values: Tensor, dim: int, run: int, places: Tensor, former_places: Tensor) -> Tensor:
        ctx.order = dim, run, former_places, places
        moved: Tensor = values.unflatten(dim, (-1, run)).index_select(dim, places)
        return moved.flatten(dim, dim + 1)

    @staticmethod
    def backward(ctx: Any, gradient: Tensor) -> tuple[Tensor | None, ...]:
        return _MovedRuns.apply(gradient, *ctx.order), None, None, None, None  # type: ignore[no-untyped-call]


@never_compile_methods
class ConfigOrderKeyedTensor(KeyedTensor):  # type: ignore[misc]
    """A KeyedTensor, `(B, sum of dims)`, with another's columns in another order; only `values()` copies them."""

    def __init__(self, in_plan_order: KeyedTensor, order: ColumnOrder) -> None:
        # The base class's methods use its own values only for their device and memory, not for their order.
        super().__init__(order.keys, order.dims, in_plan_order.values(), in_plan_order.key_dim())
        self._in_plan_order, self._numbers = in_plan_order, order.numbers
        self._put = order.put  # not the order, whose tensors stay, so that nobody records streams for them
        self._in_order: Tensor | None = None

    @override
    def values(self) -> Tensor:
        if self._in_order is None:
            # The caller may first read the values under no_grad, and train on them afterwards.
            values = self._in_plan_order.values()
            with (
                outside_function_transforms(),
                torch.inference_mode(values.is_inference()),
                torch.set_grad_enabled(values.requires_grad),
            ):
                self._in_order = self._put(values, self.key_dim())
        return self._in_order

    @never_compiled
    def __getitem__(self, key: str) -> Tensor:
        return self._in_plan_order[key]  # type: ignore[no-any-return]

    @override
    def to_dict(self) -> dict[str, Tensor]:
        plan = self._in_plan_order
        columns = plan.values().split(plan.length_per_key(), dim=plan.key_dim())
        return {key: columns[number] for key, number in zip(self.keys(), self._numbers, strict=True)}

    @override
    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        self._in_plan_order.record_stream(stream)
        if self._in_order is not None:
            self._in_order.record_stream(stream)

    @override
    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        values = self.values().to(device, non_blocking=non_blocking)
        return KeyedTensor(self.keys(), self.length_per_key(), values, self.key_dim())


register_pytree_node(
    ConfigOrderKeyedTensor,
    never_compiled(lambda columns: ([columns.values()], (columns.keys(), columns.length_per_key()))),
    never_compiled(lambda values, context: KeyedTensor(*context, *values)),
)
