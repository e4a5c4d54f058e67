"""Make sharded modules treat their input as unsharded modules do: features by name, weights of ids, dtypes.

TorchRec notes the positions of features in the first input, and uses them for every later input: with other or
reordered features it would look up ids in wrong tables. It multiplies by weights that an unsharded collection ignores
(`is_weighted=False`), and accepts missing weights.
"""

from __future__ import annotations

import copy
import functools
from typing import Any

import torch
from torch import nn
from torchrec.distributed.embeddingbag import ShardedEmbeddingBagCollection
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..text import some
from .supported_modules import configs_of, hands_out_rows, sharded_modules, spec_of, table_modules, tables_of


def find_features_by_name(model: nn.Module) -> None:
    """Make every sharded module of a model find features by name."""
    for module in table_modules(model).values():
        _find_by_name(module, takes_weights(module), takes_numbers=True)
    for module in sharded_modules(model).values():
        kind = spec_of(module)
        if hands_out_rows(module):
            _find_by_name(module, takes_weights(module), takes_numbers=False)
        elif kind is not None and kind.feature_processors:  # they set weights, and may read the input's weights
            tables_of(module).takes_weights = None


def _find_by_name(module: Any, takes_weights: bool, *, takes_numbers: bool) -> None:
    module.takes_weights, module.takes_numbers = takes_weights, takes_numbers  # whether ids are row numbers
    if not hasattr(module, "known_features"):
        module.__class__ = _by_name(type(module))
        module.known_features = module.known_inverse = None  # of the first input, in its order


@functools.cache
def _by_name(cls: Any) -> type:
    """Return a subclass of the same name that reorders every input like the first input."""

    def input_dist(self: Any, ctx: Any, features: Any) -> Any:
        if isinstance(features, KeyedJaggedTensor):
            _check_ids(self, features)
            features = _with_or_without_weights(self, features)
            if features.keys() != self.known_features:
                features = _as_known(self, features)
        return cls.input_dist(self, ctx, features)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "input_dist": input_dist})


def takes_weights(module: Any) -> bool:
    """Return whether a module needs weights of ids; True for modules of unknown kinds."""
    if spec_of(module) is None:
        return True
    tables = tables_of(module)
    return isinstance(tables, ShardedEmbeddingBagCollection) and bool(tables._is_weighted)


def _check_ids(module: Any, kjt: KeyedJaggedTensor) -> None:
    dtype = kjt.values().dtype
    if dtype not in (torch.int64, torch.int32) and module.takes_numbers:
        raise TypeError(
            f"the ids for a {type(module).__name__} (features {some(kjt.keys())}) must be torch.int64 or torch.int32, "
            f"got {dtype}. Convert them in the dataset or the collate function; torch.tensor([]) is torch.float32."
        )


def _with_or_without_weights(module: Any, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return an input with weights if the module needs them, else an input without weights (a copy)."""
    weights = kjt.weights_or_none()
    if module.takes_weights is None or (weights is not None) == module.takes_weights:
        return kjt
    if weights is None:
        raise ValueError(
            f"a {type(module).__name__} with is_weighted=True got a KeyedJaggedTensor without weights (features "
            f"{some(kjt.keys())}). Pass weights=, one for each id, or make the collection with is_weighted=False."
        )
    if weights.dim() > 1:  # rows that TorchRec writes
        return kjt
    kjt = copy.copy(kjt)
    kjt._weights = kjt._jt_dict = None
    return kjt


def _as_known(module: Any, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    wanted = {feature for config in configs_of(tables_of(module)) for feature in config.feature_names}
    if missing := sorted(wanted.difference(kjt.keys())):
        raise ValueError(
            f"the KeyedJaggedTensor for a {type(module).__name__} lacks {some(missing)}, which its tables look up; it "
            f"has {some(kjt.keys())}. For a feature without ids, pass lengths of zero."
        )
    inverse = kjt.inverse_indices_or_none()
    if module.known_features is None:
        module.known_features = list(kjt.keys())
        module.known_inverse = None if inverse is None else list(inverse[0])
        return kjt
    places = {key: place for place, key in enumerate(kjt.keys())}
    with torch.no_grad():  # as when TorchRec reorders features
        # No table looks up a missing feature: any feature may take its place.
        ordered: KeyedJaggedTensor = kjt.permute([places.get(key, 0) for key in module.known_features])
    if inverse is not None and module.known_inverse is not None:
        rows = [inverse[0].index(key) for key in module.known_inverse]
        ordered._inverse_indices = (module.known_inverse, inverse[1][rows])
    return ordered
