"""Make sharded modules go by names as unsharded modules do: columns and means of their output, features of their input.

TorchRec orders columns by the sharding plan, and finds features of every input at their places in the first input.

Kernels of tables that are sharded by rows sum (`pooling_type_to_pooling_mode`, TorchRec 1.8). TorchRec divides means by
position. That divides columns of other tables if tables share features or the plan has another order. It divides by the
sum of the weights where other kernels divide by the number of ids, and leaves out `grid_shard`.
"""

from __future__ import annotations

from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import Awaitable, LazyAwaitable, ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from ..compat.torch import tree_map_only
from ..compat.torchrec import (
    divide_no_means,
    input_dist_unordered,
    is_weighted,
    set_inverse_indices,
    without_weights,
)
from ..text import some
from .columns import ColumnOrder, ConfigOrderKeyedTensor
from .supported_modules import configs_of, hands_out_rows, sharded_modules, spec_of, table_modules, tables_of

_BY_ROWS = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
"""Sharding types whose kernels sum where a mean is asked for."""


def without_graph(answer: Any) -> Any:
    """Return a collection's output (nested tensors, KeyedTensors or JaggedTensors) detached from its graph."""
    return tree_map_only(Tensor, Tensor.detach, answer)


def answer_in_config_order(model: nn.Module) -> None:
    """Make every sharded collection of a model return embeddings in the order of its configs."""
    for module in table_modules(model).values():
        if not isinstance(module.output_dist, OutputInOrder):
            names_by_table = get_embedding_names_by_table(configs_of(module))
            names = [name for names in names_by_table for name in names]
            module.output_dist = OutputInOrder(module.output_dist, names, module.summed_means)
            module.compute_and_output_dist = OutputInOrder(module.compute_and_output_dist, names, module.summed_means)


def table_by_name(module: Any) -> dict[str, str]:
    """Return name of an embedding in a module's output -> its table; of a module of unknown kind nothing."""
    if spec_of(module) is None:
        return {}
    configs = configs_of(tables_of(module))
    by_table = zip(configs, get_embedding_names_by_table(configs), strict=True)
    return {name: config.name for config, names in by_table for name in names}


class OutputInOrder:
    """Stands in for a method of a sharded collection that sends embeddings; the output is divided and put in order."""

    def __init__(self, method: Callable[..., Any], names: list[str], means: SummedMeans | None) -> None:
        self._method = method  # `output_dist` or `compute_and_output_dist`
        self._names = names  # of embeddings, in the order of the configs
        self._means = means
        self._order: ColumnOrder | None = None  # of the last output

    def __call__(self, ctx: Any, *args: Any, **kwargs: Any) -> Any:
        """Return the awaitable of the method, finished."""
        return self.finish(ctx, self._method(ctx, *args, **kwargs))

    def finish(self, ctx: Any, awaitable: LazyAwaitable[Any]) -> LazyAwaitable[Any]:
        """Return an awaitable of embeddings, with what is still to be done to them when they arrive."""
        if self._means is not None:
            awaitable.callbacks.append(partial(self._means.divide, ctx.divisor))
        awaitable.callbacks.append(self._put_in_order)
        return awaitable

    def _put_in_order(self, columns: Any) -> Any:
        if not isinstance(columns, KeyedTensor):
            return columns if list(columns) == self._names else {name: columns[name] for name in self._names}
        if columns.keys() == self._names:
            return columns
        if self._order is None or not self._order.fits(columns):
            self._order = ColumnOrder(columns, self._names)
        return ConfigOrderKeyedTensor(columns, self._order)


def by_config(module: Any, ctx: Any, awaitable: LazyAwaitable[Any]) -> LazyAwaitable[Any]:
    """Finish an awaitable as the `output_dist` of a sharded collection does: divided, in the order of the configs."""
    in_order: OutputInOrder = module.output_dist
    return in_order.finish(ctx, awaitable)


def find_features_by_name(model: nn.Module) -> None:
    """Make every sharded module of a model find features by name."""
    managed: dict[str, Any] = {name: one for name, one in sharded_modules(model).items() if hands_out_rows(one)}
    for name, module in (*table_modules(model).items(), *managed.items()):
        module.takes_weights = takes_weights(module)
        if not isinstance(module.input_dist, InputByName):
            module.input_dist = InputByName(name, module, takes_numbers=name not in managed)
    for module in sharded_modules(model).values():
        kind = spec_of(module)
        if kind is not None and kind.feature_processors:  # they set weights, and may read the input's weights
            tables_of(module).takes_weights = None


_HALF = torch.float16, torch.bfloat16


class InputByName:
    """Stands in for the `input_dist` of a sharded module; it checks every input, and reorders it like the first one."""

    def __init__(self, name: str, module: Any, *, takes_numbers: bool) -> None:
        self._name, self._module = name, module
        self._input_dist = module.input_dist
        self._takes_numbers = takes_numbers  # whether ids are row numbers
        self._means: SummedMeans | None = tables_of(module).summed_means  # of `divide_means_by_name`
        self._known_features: list[str] | None = None  # of the first input, in its order
        self._known_inverse: list[str] | None = None  # the same of its `inverse_indices`

    def __call__(self, ctx: Any, features: Any) -> Awaitable[Any]:
        """Return the awaitable of the method; raise a TypeError or ValueError for an input that does not fit."""
        return self._input_dist(ctx, self._fitted(ctx, features))

    def unordered(self, ctx: Any, features: Any) -> Awaitable[Any]:
        """Return the same, except that features are not put in the order of their ranks (`features_order`)."""
        return input_dist_unordered(self._module, ctx, self._fitted(ctx, features))

    def _fitted(self, ctx: Any, features: Any) -> Any:
        if isinstance(features, KeyedJaggedTensor):
            features = self._checked(features)
            if features.keys() != self._known_features:
                features = self._as_known(features)
            if self._means is not None:
                ctx.divisor = self._means.divisors(features)
        return features

    def _checked(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return an input with weights if the module needs them, else a copy without: TorchRec would use them."""
        dtype, kind = kjt.values().dtype, type(self._module).__name__
        if dtype not in (torch.int64, torch.int32) and self._takes_numbers:
            raise TypeError(
                f"the ids for a {kind} (features {some(kjt.keys())}) must be torch.int64 or torch.int32, got {dtype}. "
                "Convert them in the dataset or the collate function; torch.tensor([]) is torch.float32."
            )
        weights, takes_weights = kjt.weights_or_none(), self._module.takes_weights
        if takes_weights and weights is not None and weights.dtype in _HALF and weights.device.type == "cpu":
            self._refuse_half_weights(kjt.keys(), weights.dtype)
        if takes_weights is None or (weights is not None) == takes_weights:
            return kjt
        if weights is None:
            raise ValueError(
                f"a {kind} with is_weighted=True got a KeyedJaggedTensor without weights (features "
                f"{some(kjt.keys())}). Pass weights=, one for each id, or make the collection with is_weighted=False."
            )
        if weights.dim() == 1:  # else rows that TorchRec writes
            kjt = without_weights(kjt)
        return kjt

    def _refuse_half_weights(self, features: list[str], dtype: torch.dtype) -> None:
        """Raise a TypeError for weights of 16 bits of a module whose row-wise tables a CPU cannot send them to."""
        plan = tables_of(self._module).module_sharding_plan
        by_rows = [table for table, one in plan.items() if one.sharding_type in _BY_ROWS]
        if by_rows:
            raise TypeError(
                f"the weights of the ids for {self._name!r} (features {some(features)}) are {dtype}, and a CPU cannot "
                f"send such weights to row-wise tables: {some(by_rows)}. Convert them in the dataset, the collate "
                "function or on_after_batch_transfer, by .float(), or shard these tables table_wise or column_wise."
            )

    def _as_known(self, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
        """Return an input with the features of the first one, in their order; the first is returned as it is."""
        configs = configs_of(tables_of(self._module))
        wanted = {feature for config in configs for feature in config.feature_names}
        if missing := sorted(wanted.difference(kjt.keys())):
            raise ValueError(
                f"the KeyedJaggedTensor for a {type(self._module).__name__} lacks {some(missing)}, which its tables "
                f"look up; it has {some(kjt.keys())}. For a feature without ids, pass lengths of zero."
            )
        inverse = kjt.inverse_indices_or_none()
        if self._known_features is None:
            self._known_features = list(kjt.keys())
            self._known_inverse = None if inverse is None else list(inverse[0])
            return kjt
        places = {key: place for place, key in enumerate(kjt.keys())}
        with torch.no_grad():  # as when TorchRec reorders features
            # No table looks up a missing feature: any feature may take its place.
            ordered: KeyedJaggedTensor = kjt.permute([places.get(key, 0) for key in self._known_features])
        if inverse is not None and self._known_inverse is not None:
            rows = [inverse[0].index(key) for key in self._known_inverse]
            set_inverse_indices(ordered, self._known_inverse, inverse[1][rows])
        return ordered


def takes_weights(module: Any) -> bool:
    """Return whether a module needs weights of ids; True for modules of unknown kinds."""
    if spec_of(module) is None:
        return True
    tables = tables_of(module)
    return isinstance(tables, ShardedEmbeddingBagCollection) and is_weighted(tables)


def divide_means_by_name(model: nn.Module) -> None:
    """Let every sharded collection of a model divide its own means (`SummedMeans`), and TorchRec none."""
    for module in table_modules(model).values():
        if not hasattr(module, "summed_means"):
            means = _features_of_means(module)
            module.summed_means = SummedMeans(means) if means else None
            divide_no_means(module)


def _features_of_means(module: Any) -> dict[str, str]:
    """Return output name -> feature of the outputs that have to be means, and that kernels sum."""
    if not isinstance(module, ShardedEmbeddingBagCollection):
        return {}
    configs, plan = configs_of(module), module.module_sharding_plan
    return {
        name: feature
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        if config.pooling is PoolingType.MEAN and plan[config.name].sharding_type in _BY_ROWS
        for name, feature in zip(names, config.feature_names, strict=True)
    }


class SummedMeans:
    """The outputs of a collection that are divided by the number of ids of their feature."""

    def __init__(self, features: dict[str, str]) -> None:
        self._features = features  # output name -> feature
        self._keys: list[str] = []  # of the last input
        self._rows: Tensor | None = None  # where these features are among the keys, on the input's device
        self._places: Tensor | None = None  # for each column of the answer, its divisor's column

    def divisors(self, kjt: KeyedJaggedTensor) -> Tensor:
        """Return `(B, 1 + outputs)`, float32: ones, and for each of these outputs the number of ids, at least 1."""
        if kjt.variable_stride_per_key():
            lengths = self._lengths_of_samples(kjt)
        else:
            if self._rows is None or self._keys != kjt.keys():
                self._keys = list(kjt.keys())
                rows = [*map(self._keys.index, self._features.values())]
                self._rows = torch.tensor(rows, device=kjt.device())
            lengths = kjt.lengths().view(len(self._keys), kjt.stride()).index_select(0, self._rows)
        divisors = torch.ones(lengths.shape[1], 1 + lengths.shape[0], device=lengths.device)
        divisors[:, 1:] = lengths.clamp(min=1).T
        return divisors

    def _lengths_of_samples(self, kjt: KeyedJaggedTensor) -> Tensor:
        """Return the lengths `(outputs, B)` where features have batch sizes of their own (`inverse_indices`)."""
        names, inverse = kjt.inverse_indices()
        lengths = dict(zip(kjt.keys(), kjt.lengths().split(kjt.stride_per_key()), strict=True))
        return torch.stack([lengths[one][inverse[names.index(one)]] for one in self._features.values()])

    def divide(self, divisors: Tensor, columns: KeyedTensor) -> KeyedTensor:
        """Return a collection's answer with these outputs divided; the others stay as they are, bit for bit."""
        values, names, dims = columns.values(), columns.keys(), columns.length_per_key()
        if self._places is None:
            numbers = {name: number for number, name in enumerate(self._features, start=1)}
            places = [numbers.get(name, 0) for name, dim in zip(names, dims, strict=True) for _ in range(dim)]
            self._places = torch.tensor(places, device=values.device)
        divided = (values / divisors.index_select(1, self._places)).to(values.dtype)
        return KeyedTensor(names, dims, divided, columns.key_dim())
