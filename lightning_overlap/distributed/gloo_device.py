"""A gloo backend whose groups share the device of the default group: one thread receives for all of them."""

from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist

BACKEND = "gloo_on_shared_device"  # the name for `torch.distributed.new_group`


def register() -> str:
    """Register the backend, once, and return its name; or "gloo" if the default group has no device to share."""
    try:
        _options()
    except (AttributeError, RuntimeError):  # a wrapper of gloo that checks collectives, or another torch
        return "gloo"
    if BACKEND not in dist.Backend.backend_list:
        dist.Backend.register_backend(BACKEND, _create, devices=["cpu"])
    return BACKEND


def _options() -> Any:
    options: Any = dist.ProcessGroupGloo._Options()  # type: ignore[attr-defined]
    options._devices = dist.group.WORLD._get_backend(torch.device("cpu")).options._devices  # type: ignore[union-attr]
    return options


def _create(store: Any, rank: int, size: int, timeout: timedelta) -> dist.ProcessGroup:
    options, group = _options(), dist.ProcessGroup(store, rank, size)
    options._timeout, gloo = timeout, dist.ProcessGroup.BackendType.GLOO
    group._set_default_backend(gloo)  # else TorchRec takes it for a "custom" backend
    group._register_backend(torch.device("cpu"), gloo, dist.ProcessGroupGloo(store, rank, size, options))
    return group
