"""Let a sharded module take its input as the unsharded module does: features by name, weights of ids, types.

TorchRec notes where they stand in the first input, and takes every later one to be alike: of one with other features
next to them, or in another order, it would look up the ids of one feature in the table of another. It multiplies by
weights that an unsharded collection ignores (`is_weighted=False`), and does without those that it asks for.
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
    """Let every sharded module of a model do so from now on."""
    managed = [module for module in sharded_modules(model).values() if hands_out_rows(module)]
    kinds = [(module, spec_of(module)) for module in sharded_modules(model).values()]
    # Processors of ids give them weights, and may read those that the input has.
    processed = [tables_of(module) for module, kind in kinds if kind is not None and kind.feature_processors]
    for module in [*table_modules(model).values(), *managed]:
        module.takes_weights = None if any(module is one for one in processed) else takes_weights(module)
        module.takes_numbers = not any(module is one for one in managed)  # of rows, and not ids of any kind
        if not hasattr(module, "known_features"):
            cls: Any = type(module)
            module.__class__ = _by_name(cls)
            module.known_features = module.known_inverse = None  # those of the first input, in their order


@functools.cache
def _by_name(cls: Any) -> type:
    """Return a class of the same name to which all inputs look like the first one; one for all modules of a class."""

    def input_dist(self: Any, ctx: Any, features: Any) -> Any:
        if isinstance(features, KeyedJaggedTensor):
            _check_ids(self, features)
            features = _with_or_without_weights(self, features)
            if features.keys() != self.known_features:
                features = _as_known(self, features)
        return cls.input_dist(self, ctx, features)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "input_dist": input_dist})


def takes_weights(module: Any) -> bool:
    """Whether a module multiplies by the weights of ids, and so asks for them; yes for a module of unknown kind."""
    if spec_of(module) is None:
        return True
    tables = tables_of(module)
    return isinstance(tables, ShardedEmbeddingBagCollection) and bool(tables._is_weighted)


def _check_ids(module: Any, kjt: KeyedJaggedTensor) -> None:
    dtype = kjt.values().dtype
    if dtype not in (torch.int64, torch.int32) and module.takes_numbers:
        raise TypeError(
            f"the ids given to a {type(module).__name__} (features {some(kjt.keys())}) are of {dtype}. They number "
            "rows: give them as torch.int64 or torch.int32. torch.tensor([]) is of torch.float32."
        )


def _with_or_without_weights(module: Any, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return an input with the weights that the unsharded module would read, on another object if it reads none."""
    weights = kjt.weights_or_none()
    if module.takes_weights is None or (weights is not None) == module.takes_weights:
        return kjt
    if weights is None:
        raise ValueError(
            f"a {type(module).__name__} with is_weighted=True was given a KeyedJaggedTensor without weights (features "
            f"{some(kjt.keys())}). Give it weights=, one for each id, or make the collection with is_weighted=False."
        )
    if weights.dim() > 1:  # rows for TorchRec to write
        return kjt
    kjt = copy.copy(kjt)
    kjt._weights = kjt._jt_dict = None
    return kjt


def _as_known(module: Any, kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return an input with its features where those of the first one stood."""
    wanted = {feature for config in configs_of(tables_of(module)) for feature in config.feature_names}
    if missing := sorted(wanted.difference(kjt.keys())):
        raise ValueError(
            f"the KeyedJaggedTensor given to a {type(module).__name__} lacks {some(missing)}, which its tables look "
            f"up; it has {some(kjt.keys())}. Where there are no ids, give the feature lengths of zero."
        )
    inverse = kjt.inverse_indices_or_none()
    if module.known_features is None:
        module.known_features = list(kjt.keys())
        module.known_inverse = None if inverse is None else list(inverse[0])
        return kjt
    places = {key: place for place, key in enumerate(kjt.keys())}
    with torch.no_grad():  # as TorchRec puts them in the order of its shards
        # No table looks up one that is missing: anything may stand there.
        ordered: KeyedJaggedTensor = kjt.permute([places.get(key, 0) for key in module.known_features])
    if inverse is not None and module.known_inverse is not None:
        rows = [inverse[0].index(key) for key in module.known_inverse]
        ordered._inverse_indices = (module.known_inverse, inverse[1][rows])
    return ordered
