"""Let a sharded module find the features of its input by name in every batch, as the unsharded module does.

TorchRec notes where they stand in the first input, and takes every later one to be alike: of one with other features
next to them, or in another order, it would look up the ids of one feature in the table of another.
"""

from __future__ import annotations

import functools
from typing import Any

import torch
from torch import nn
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..text import some
from .supported_modules import configs_of, hands_out_rows, sharded_modules, table_modules, tables_of


def find_features_by_name(model: nn.Module) -> None:
    """Let every sharded module of a model do so from now on."""
    managed = [module for module in sharded_modules(model).values() if hands_out_rows(module)]
    for module in [*table_modules(model).values(), *managed]:
        if not hasattr(module, "known_features"):
            cls: Any = type(module)
            module.__class__ = _by_name(cls)
            module.known_features = module.known_inverse = None  # those of the first input, in their order


@functools.cache
def _by_name(cls: Any) -> type:
    """Return a class of the same name to which all inputs look like the first one; one for all modules of a class."""

    def input_dist(self: Any, ctx: Any, features: Any) -> Any:
        if isinstance(features, KeyedJaggedTensor) and features.keys() != self.known_features:
            features = _as_known(self, features)
        return cls.input_dist(self, ctx, features)

    return type(cls.__name__, (cls,), {"__module__": cls.__module__, "input_dist": input_dist})


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
