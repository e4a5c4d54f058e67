"""Mean pooling of tables that are sharded by rows: their outputs are divided by the number of ids, by name.

Kernels of such tables sum (`pooling_type_to_pooling_mode`, TorchRec 1.8). TorchRec then divides by position.
That divides columns of other tables where tables share features or the plan has another order; it divides by the sum of
the weights where other kernels divide by the number of ids, and leaves out `grid_shard`.
"""

from __future__ import annotations

from typing import Any

import torch
from torch import Tensor, nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.distributed.types import ShardingType
from torchrec.modules.embedding_configs import PoolingType
from torchrec.modules.embedding_modules import get_embedding_names_by_table
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor, KeyedTensor

from .supported_modules import configs_of, table_modules

_SUMMED = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)


def divide_means_by_name(model: nn.Module) -> None:
    """Let every sharded collection of a model divide its own means (`SummedMeans`), and TorchRec none."""
    for module in table_modules(model).values():
        if not hasattr(module, "summed_means"):
            means = _features_of_means(module)
            module.summed_means = SummedMeans(means) if means else None
            module._has_mean_pooling_callback = False


def _features_of_means(module: Any) -> dict[str, str]:
    """Return output name -> feature of the outputs that have to be means, and that kernels sum."""
    if not isinstance(module, ShardedEmbeddingBagCollection):
        return {}
    configs, plan = configs_of(module), module.module_sharding_plan
    return {
        name: feature
        for config, names in zip(configs, get_embedding_names_by_table(configs), strict=True)
        if config.pooling is PoolingType.MEAN and plan[config.name].sharding_type in _SUMMED
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
