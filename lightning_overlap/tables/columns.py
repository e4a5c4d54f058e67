"""Let a sharded collection answer in the order of its configs, as the unsharded collection does.

TorchRec puts the embeddings of a sharded collection in the order of its sharding plan, so the same columns stand
elsewhere under another plan or on another number of ranks. A model that was trained on `ebc(kjt).values()` would then
read other columns after a resume, or where the unsharded module runs.

TorchRec's private names that this file uses are listed in `sharded_module.PRIVATE_NAMES`.
"""

from __future__ import annotations

import functools
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.utils._pytree import register_pytree_node
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedTensor

from .supported_modules import table_modules


class ConfigOrderKeyedTensor(KeyedTensor):  # type: ignore[misc]
    """A KeyedTensor that shows the columns of another one in an order of its own.

    Columns are looked up by name where they are; `values()` moves them, when it is first called.

    Args:
        in_plan_order: Holds the columns, `(B, sum of dims)`.
        keys: The keys of `in_plan_order`, in the order to show.
    """

    def __init__(self, in_plan_order: KeyedTensor, keys: list[str]) -> None:
        lengths = dict(zip(in_plan_order.keys(), in_plan_order.length_per_key(), strict=True))
        # The base class's own methods read `_values` for its device and memory, and for nothing that has an order.
        super().__init__(
            keys=keys,
            length_per_key=[lengths[key] for key in keys],
            values=in_plan_order.values(),
            key_dim=in_plan_order.key_dim(),
        )
        self._in_plan_order = in_plan_order
        self._in_order: Tensor | None = None

    def values(self) -> Tensor:
        """Return the columns in the order of `keys()`, `(B, sum of dims)`."""
        if self._in_order is None:
            columns = self.to_dict()
            # The caller may look at the values without a gradient first, and train on them afterwards.
            unordered = self._values
            with torch.inference_mode(unordered.is_inference()), torch.set_grad_enabled(unordered.requires_grad):
                self._in_order = torch.cat([columns[key] for key in self.keys()], dim=self.key_dim())
        return self._in_order

    def __getitem__(self, key: str) -> Tensor:
        column: Tensor = self._in_plan_order[key]
        return column

    def to_dict(self) -> dict[str, Tensor]:
        """Return the columns by key, each `(B, dim)`, in the order of `keys()`."""
        columns = self._in_plan_order.to_dict()
        return {key: columns[key] for key in self.keys()}

    def detach(self) -> ConfigOrderKeyedTensor:
        """Return the same columns, `(B, sum of dims)`, without a graph."""
        return ConfigOrderKeyedTensor(_detached(self._in_plan_order), self.keys())

    def record_stream(self, stream: torch.cuda.streams.Stream) -> None:
        """Tell the caching allocator that a stream reads the columns."""
        self._in_plan_order.record_stream(stream)
        if self._in_order is not None:
            self._in_order.record_stream(stream)

    def to(self, device: torch.device, non_blocking: bool = False) -> KeyedTensor:
        """Return a copy of the columns on a device, `(B, sum of dims)`, in the order of `keys()`."""
        return KeyedTensor(
            keys=self.keys(),
            length_per_key=self.length_per_key(),
            values=self.values().to(device, non_blocking=non_blocking),
            key_dim=self.key_dim(),
        )


def _flatten(columns: ConfigOrderKeyedTensor) -> tuple[list[Tensor], tuple[list[str], list[int]]]:
    return [columns.values()], (columns.keys(), columns.length_per_key())


def _unflatten(values: Any, context: Any) -> KeyedTensor:
    [ordered] = values
    return KeyedTensor(*context, ordered)


register_pytree_node(ConfigOrderKeyedTensor, _flatten, _unflatten)


def _detached(columns: KeyedTensor) -> KeyedTensor:
    return KeyedTensor(columns.keys(), columns.length_per_key(), columns.values().detach(), columns.key_dim())


def without_graph(answer: Any) -> Any:
    """Return a collection's answer detached from its graph.

    Args:
        answer: Tensors, KeyedTensors and JaggedTensors of any shape, nested in dicts and tuples or not; anything else
            is returned as it is.
    """
    if isinstance(answer, ConfigOrderKeyedTensor):
        return answer.detach()
    if isinstance(answer, KeyedTensor):
        return _detached(answer)
    if isinstance(answer, dict):
        return {key: without_graph(value) for key, value in answer.items()}
    if isinstance(answer, tuple):
        return tuple(without_graph(value) for value in answer)
    if isinstance(answer, Tensor):
        return answer.detach()
    if hasattr(answer, "weights_or_none") and hasattr(answer, "lengths"):  # a JaggedTensor
        weights = answer.weights_or_none()
        return type(answer)(
            values=answer.values().detach(),
            lengths=answer.lengths_or_none(),
            offsets=answer.offsets_or_none(),
            weights=None if weights is None else weights.detach(),
        )
    return answer


def answer_in_config_order(model: nn.Module) -> None:
    """Let every sharded collection of a model answer in the order of its configs, from now on."""
    for module in table_modules(model).values():
        if hasattr(module, "names_in_order"):
            continue
        bags = isinstance(module, ShardedEmbeddingBagCollection)
        configs = module._embedding_bag_configs if bags else module._embedding_configs
        cls: Any = type(module)
        module.__class__ = _in_order(cls, _BagsInOrder if bags else _SequencesInOrder)
        module.names_in_order = [name for names in get_embedding_names_by_table(configs) for name in names]


@functools.cache
def _in_order(cls: Any, mixin: type) -> type:
    """Return a class of the same name that answers in order; one for all modules of a class."""
    return type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})


class _BagsInOrder(ShardedEmbeddingBagCollection):  # type: ignore[misc]
    names_in_order: list[str]

    def output_dist(self, *args: Any, **kwargs: Any) -> Any:
        return _ordered(super().output_dist(*args, **kwargs), _order_bags, self.names_in_order)

    def compute_and_output_dist(self, *args: Any, **kwargs: Any) -> Any:
        return _ordered(super().compute_and_output_dist(*args, **kwargs), _order_bags, self.names_in_order)


class _SequencesInOrder(ShardedEmbeddingCollection):  # type: ignore[misc]
    names_in_order: list[str]

    def output_dist(self, *args: Any, **kwargs: Any) -> Any:
        return _ordered(super().output_dist(*args, **kwargs), _order_sequences, self.names_in_order)

    def compute_and_output_dist(self, *args: Any, **kwargs: Any) -> Any:
        return _ordered(super().compute_and_output_dist(*args, **kwargs), _order_sequences, self.names_in_order)


def _ordered(answer: Any, put_in_order: Callable[[list[str], Any], Any], names: list[str]) -> Any:
    answer.callbacks.append(partial(put_in_order, names))
    return answer


def _order_bags(names: list[str], columns: KeyedTensor) -> KeyedTensor:
    return columns if columns.keys() == names else ConfigOrderKeyedTensor(columns, names)


def _order_sequences(names: list[str], sequences: dict[str, Any]) -> dict[str, Any]:
    return sequences if list(sequences) == names else {name: sequences[name] for name in names}
