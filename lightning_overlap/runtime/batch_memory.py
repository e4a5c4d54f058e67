"""Copy batches of a data loader that may reuse the memory of batches in flight."""

import warnings
import weakref
from collections import deque
from collections.abc import Callable
from typing import Any

import numpy as np
import torch
from torch import Tensor
from torch.multiprocessing.reductions import StorageWeakRef
from torch.utils.data import DataLoader, default_collate, default_convert

from .batch_tree import with_leaves

NUM_SEEN = 3  # a loader is trusted once it has freed the memory of this many batches in a row
NUM_TRIES = 16  # if a loader is not trusted after this many batches of an epoch, watching stops and all are copied
NUM_KEPT = 2  # batches after which a batch's memory must be freed: a generator's variable still holds the last batch


class BatchMemory:
    """Copies the batches of a loader until the loader is seen to allocate memory for each one.

    A loader that reuses buffers overwrites batches in flight, and must keep their memory to do so. The first batches
    of each epoch are copied and then dropped. If their memory is not freed, every batch is copied.
    Arrays, pinned tensors and tensors on `device_type` are copied: a transfer copies the others, but the transfer of
    a pinned tensor goes on while the loader makes the next batch. `is_own`: the loader never reuses memory.
    """

    def __init__(self, device_type: str, *, is_own: bool = False) -> None:
        self._device_type = device_type
        self._is_known = is_own
        self._has_failed = False
        self.begin_epoch()

    def begin_epoch(self) -> None:
        """Stop trusting the loader, unless `is_own`: it may be a new loader."""
        self._is_trusted = self._is_known
        self._gone: deque[list[Callable[[], bool]]] = deque()  # of batches: is each leaf's memory freed?
        self._num_seen = self._num_tries = 0

    @property
    def is_own(self) -> bool:
        """Whether batches from `own` stay valid before their transfer to the device, while the loader makes others."""
        return self._is_trusted or (self._device_type == "cpu" and not self._has_failed)

    def own(self, batch: Any) -> Any:
        """Return a batch just received from the loader, or a copy if the loader may reuse its memory."""
        if self._is_trusted:
            return batch
        if len(self._gone) == NUM_KEPT:
            self._num_seen = self._num_seen + 1 if all(is_gone() for is_gone in self._gone.popleft()) else 0
            if self._num_seen == NUM_SEEN:
                self._is_trusted = True
                self._gone.clear()
                return batch
        found: list[Any] = []

        def copy(leaf: Any) -> Any:
            if not isinstance(leaf, (Tensor, np.ndarray)):
                return leaf
            found.append(leaf)
            return _copy(leaf, self._device_type)

        try:
            copied = with_leaves(batch, copy)
        except Exception as error:
            if not self._has_failed:
                self._has_failed = True
                warnings.warn(
                    f"Batches of the type {type(batch).__name__} cannot be copied ({type(error).__name__}: {error}). "
                    "Several batches are in flight at a time: the data loader must not reuse the memory of a batch.",
                    stacklevel=1,
                )
            return batch
        if found and self._num_tries < NUM_TRIES:
            self._num_tries += 1
            self._gone.append(list(map(_is_gone, found)))
        return copied


def _copy(leaf: Any, device_type: str) -> Any:
    if isinstance(leaf, np.ndarray):
        own: Any = leaf.copy()
    elif leaf.requires_grad:
        return leaf
    elif leaf.device.type == device_type:
        own = leaf.clone()
    elif leaf.layout is torch.strided and leaf.is_pinned():
        own = torch.empty_like(leaf, pin_memory=True).copy_(leaf)
    else:
        return leaf
    for name, value in getattr(leaf, "__dict__", {}).items():
        vars(own).setdefault(name, value)
    return own


def _is_gone(leaf: Any) -> Callable[[], bool]:
    """Return a function that tells whether a leaf's memory was freed; False if PyTorch cannot see its owner."""
    if isinstance(leaf, np.ndarray):
        while isinstance(leaf, np.ndarray) and leaf.base is not None:
            leaf = leaf.base
        if isinstance(leaf, np.ndarray) and leaf.flags.owndata:
            reference = weakref.ref(leaf)
            return lambda: reference() is None
    elif leaf.layout is torch.strided and not leaf.is_meta:
        storage = leaf.untyped_storage()
        # PyTorch cannot see the owner of memory that it did not allocate (an array's). Shared memory, which worker
        # processes send, and pinned memory, which `pin_memory()` makes and cannot resize, belong to the tensor.
        if storage.resizable() or storage.is_shared() or leaf.is_pinned():
            return StorageWeakRef(storage).expired
    return lambda: False


def keeps_its_data(loader: Any) -> bool:
    """Whether a loader yields the samples of a list, or copies of them, whose memory is never reused."""
    if type(loader) is not DataLoader or loader.collate_fn not in (default_collate, default_convert):
        return False
    holders: tuple[type, ...] = (list, tuple)
    return type(loader.dataset) in holders
