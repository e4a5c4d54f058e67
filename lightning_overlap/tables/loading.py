"""What `load_state_dict` of a sharded module accepts: any of its tables, each whole."""

from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.tensor import DTensor
from torchrec.distributed.embedding import ShardedEmbeddingCollection
from torchrec.distributed.types import ShardedTensor

from ..compat.torch import LoadOwn, load_around
from .sharded_module import caching_tbes
from .supported_modules import configs_of, table_modules


def accept_some_tables(model: nn.Module) -> None:
    """Let `load_state_dict(..., strict=False)` leave out tables of sharded collections, and refuse other shapes."""
    for module in table_modules(model).values():
        load_around(module, partial(_load, module))


def _load(module: Any, state_dict: dict[str, Any], prefix: str, load_own: LoadOwn) -> None:
    """Load the tables that a `state_dict` has; torch reports the others as missing keys.

    TorchRec's hook takes this rank's part of each table out of the `state_dict`. The one of an EmbeddingCollection
    expects every table there, so a table that is missing has a substitute while the hook runs.
    """
    attribute = "embeddings" if isinstance(module, ShardedEmbeddingCollection) else "embedding_bags"
    missing = []
    for config in configs_of(module):
        key, shape = f"{prefix}{attribute}.{config.name}.weight", (config.num_embeddings, config.embedding_dim)
        if key not in state_dict:
            missing.append(key)
            state_dict[key] = torch.empty(shape, device="meta")
        elif _is_whole(state_dict[key]) and state_dict[key].shape != shape:
            raise RuntimeError(
                f"{key}: load_state_dict got a tensor of shape {tuple(state_dict[key].shape)}, and the table has the "
                f"shape {shape}. Give every rank the whole table; each takes its part."
            )
    if missing:  # the hook drops what the caches of tables have, of those that are not loaded, too
        for kernel in caching_tbes(module):
            kernel.flush()
    load_own(state_dict, prefix)
    for key in missing:
        state_dict.pop(key, None)


def _is_whole(value: Any) -> bool:
    return isinstance(value, Tensor) and not isinstance(value, (ShardedTensor, DTensor))
