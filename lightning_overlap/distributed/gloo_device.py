"""Share one gloo device among several process groups: one thread receives for all of them, and not one for each.

torch makes a device for every group. As the groups of a step take turns, each message then wakes an idle thread; one
thread for all groups finds several messages at once.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager, suppress
from datetime import timedelta
from typing import Any

import torch
import torch.distributed as dist
from torch.distributed import distributed_c10d as c10d

PRIVATE_NAMES = ("_Options", "_devices", "_timeout")
"""Undocumented names of torch that this needs; if torch lacks one, each group has a device of its own."""


@contextmanager
def shared_with(group: dist.ProcessGroup) -> Iterator[None]:
    """Within this context new gloo groups share the device of `group`, or, if that has none, of the first new one."""
    own = dist.ProcessGroupGloo
    options: Any = getattr(own, "_Options", None)
    if options is None or not all(hasattr(options, name) for name in PRIVATE_NAMES[1:]):
        yield
        return
    devices: list[Any] = []
    with suppress(AttributeError, RuntimeError):  # another backend, or a wrapper that checks collectives
        devices.extend(group._get_backend(torch.device("cpu")).options._devices)  # type: ignore[attr-defined]

    class OnDevice(own):  # type: ignore[misc, valid-type]
        def __init__(self, store: Any, rank: int, size: int, timeout: timedelta) -> None:
            if not devices:  # the first one makes it as torch does, which goes by the environment
                super().__init__(store, rank, size, timeout=timeout)
                devices.extend(self.options._devices)
                return
            chosen: Any = options()
            chosen._devices, chosen._timeout = devices, timeout
            super().__init__(store, rank, size, chosen)

    c10d.ProcessGroupGloo = OnDevice  # type: ignore[misc]
    try:
        yield
    finally:
        c10d.ProcessGroupGloo = own  # type: ignore[misc]
