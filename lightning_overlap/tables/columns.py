"""Make sharded collections return embeddings in the order of their configs, as unsharded collections do.

TorchRec's order depends on the sharding plan. So a model trained on `ebc(kjt).values()` would read other columns under
another plan, on another number of ranks, or with the unsharded module.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node, tree_leaves, tree_map_only
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedTensor
from typing_extensions import override

from .supported_modules import configs_of, table_modules


class ConfigOrderKeyedTensor(KeyedTensor):  # type: ignore[misc]
    """A KeyedTensor, `(B, sum of dims)`, with the columns of another one in the order of `keys`.

    Reads by name do not copy; the first call of `values()` copies the columns into order.
    """

    def __init__(self, in_plan_order: KeyedTensor, keys: list[str]) -> None:
        lengths = dict(zip(in_plan_order.keys(), in_plan_order.length_per_key(), strict=True))
        # The base class's methods use `_values` only for its device and memory, not for its order.
        super().__init__(
            keys=keys,
            length_per_key=[lengths[key] for key in keys],
            values=in_plan_order.values(),
            key_dim=in_plan_order.key_dim(),
        )
        self._in_plan_order = in_plan_order
        self._in_order: Tensor | None = None

    @override
    def values(self) -> Tensor:
        if self._in_order is None:
            columns = self.to_dict()
            # The caller may first read the values under no_grad, and train on them afterwards.
            unordered = self._values
            with torch.inference_mode(unordered.is_inference()), torch.set_grad_enabled(unordered.requires_grad):
                self._in_order = torch.cat([columns[key] for key in self.keys()], dim=self.key_dim())
        return self._in_order

    def __getitem__(self, key: str) -> Tensor:
        return self._in_plan_order[key]  # type: ignore[no-any-return]

    @override
    def to_dict(self) -> dict[str, Tensor]:
        columns = self._in_plan_order.to_dict()
        return {key: columns[key] for key in self.keys()}

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
    lambda columns: ([columns.values()], (columns.keys(), columns.length_per_key())),
    lambda values, context: KeyedTensor(*context, *values),
)


def without_graph(answer: Any) -> Any:
    """Return a collection's output (nested tensors, KeyedTensors or JaggedTensors) detached from its graph."""
    return tree_map_only(Tensor, Tensor.detach, answer)


def call_in_backward(answer: Any, call: Callable[[], None]) -> None:
    """Call a function at least once in every backward that reaches a collection's answer."""
    # Gradients of single columns do not reach the `values()` of a ConfigOrderKeyedTensor.
    parts = tree_leaves(answer, is_leaf=lambda part: isinstance(part, KeyedTensor))
    for tensor in (part._values if isinstance(part, KeyedTensor) else part for part in parts):
        if isinstance(tensor, Tensor) and tensor.requires_grad:
            tensor.register_hook(lambda _: call())


def answer_in_config_order(model: nn.Module) -> None:
    """Make every sharded collection of a model return embeddings in the order of its configs."""
    for module in table_modules(model).values():
        if hasattr(module, "names_in_order"):
            continue
        cls: Any = type(module)
        module.__class__ = _in_order(cls)
        names_by_table = get_embedding_names_by_table(configs_of(module))
        module.names_in_order = [name for names in names_by_table for name in names]


@functools.cache
def _in_order(cls: Any) -> type:
    def ordered(method: Callable[..., Any]) -> Callable[..., Any]:
        def call(self: Any, *args: Any, **kwargs: Any) -> Any:
            answer = method(self, *args, **kwargs)
            answer.callbacks.append(partial(_put_in_order, self.names_in_order))
            return answer

        return call

    methods = {name: ordered(getattr(cls, name)) for name in ("output_dist", "compute_and_output_dist")}
    return type(cls.__name__, (cls,), {"__module__": cls.__module__, **methods})


def _put_in_order(names: list[str], columns: Any) -> Any:
    if isinstance(columns, KeyedTensor):
        return columns if columns.keys() == names else ConfigOrderKeyedTensor(columns, names)
    return columns if list(columns) == names else {name: columns[name] for name in names}
