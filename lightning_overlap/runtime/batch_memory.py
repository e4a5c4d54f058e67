"""Copy batches of a data loader that may reuse the memory of batches in flight."""

import copy
import warnings
from typing import Any

import numpy as np
import torch
from torch import Tensor, nn
from torch.utils.data import DataLoader, Dataset, default_collate, default_convert

from .batch_tree import leaves


class BatchMemory:
    """Copies the batches of a loader, unless the loader is known to allocate memory for each one.

    A loader that reuses buffers would overwrite batches in flight.
    """

    def __init__(self, device_type: str, *, allocates: bool) -> None:
        self._device_type, self._allocates = device_type, allocates
        self._has_failed = False

    @property
    def is_own(self) -> bool:
        """Whether batches from `own` stay valid before their transfer to the device, while the loader makes others."""
        return self._allocates or (self._device_type == "cpu" and not self._has_failed)

    def own(self, batch: Any) -> Any:
        """Return a batch just received from the loader, or a copy if the loader may reuse its memory."""
        if self._allocates:
            return batch
        try:
            return _copy(batch, self._device_type)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(
                    f"Batches of the type {type(batch).__name__} cannot be copied ({type(error).__name__}: {error}). "
                    "Several batches are in flight at a time: the data loader must not reuse the memory of a batch.",
                    stacklevel=1,
                )
            return batch


def _copy(batch: Any, device_type: str) -> Any:
    """Copy a batch, except for what it merely refers to, and for tensors that a transfer to the device copies."""
    known = {id(leaf): _copy_leaf(leaf, device_type) for _, leaf in leaves(batch, _is_array) if _is_leaf(leaf)}
    return copy.deepcopy(batch, known)  # it takes the copies that are known, by `id`


def _is_array(node: Any) -> bool:
    return isinstance(node, np.ndarray)


def _is_leaf(node: Any) -> bool:
    return isinstance(node, (Tensor, np.ndarray, nn.Module, Dataset, DataLoader))


def _copy_leaf(leaf: Any, device_type: str) -> Any:
    if isinstance(leaf, np.ndarray):
        return leaf.copy()
    if not isinstance(leaf, Tensor) or leaf.requires_grad:
        return leaf
    if leaf.device.type == device_type:
        own = leaf.clone()  # `deepcopy` would copy the whole storage of a view
    elif leaf.layout is torch.strided and leaf.is_pinned():
        # Its transfer goes on while the loader makes the next batch.
        own = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
    else:
        return leaf
    for name, value in vars(leaf).items():
        vars(own).setdefault(name, value)
    return own


def allocates_batches(loader: Any) -> bool:
    """Whether a loader is known to allocate memory for each batch, or to yield samples that nobody overwrites."""
    if type(loader) is not DataLoader:
        return False
    if loader.num_workers > 0:
        return True  # worker processes are batches ahead of this one, so they cannot reuse a batch's memory either
    if loader.collate_fn is default_collate:
        return True
    samples: object = loader.dataset
    return loader.collate_fn is default_convert and type(samples) in (list, tuple)
