"""Run fits in this process, without a launcher: in the process group that is there, or in one of one rank."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Iterator
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.lightning import LightningEnvironment
from typing_extensions import override


@contextlib.contextmanager
def process_group(accelerator: str) -> Iterator[None]:
    """Use the process group that is there, or make one of one rank for the time being.

    Random state, log levels and the environment are put back.
    """
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))  # Lightning sets OMP_NUM_THREADS
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if not dist.is_initialized():
            store = dist.HashStore()  # type: ignore[attr-defined]
            dist.init_process_group("gloo" if accelerator == "cpu" else "nccl", store=store, rank=0, world_size=1)
            stack.callback(dist.destroy_process_group)
        for logger in map(logging.getLogger, ("lightning.pytorch", "lightning.fabric", "torchrec")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield


class ThisGroup(LightningEnvironment):
    """The processes of the default group; nothing is started, no variable of the environment is set."""

    def __init__(self, per_node: int) -> None:
        super().__init__()
        self._per_node = per_node

    @property
    @override
    def creates_processes_externally(self) -> bool:
        return True

    @override
    def world_size(self) -> int:
        return dist.get_world_size()

    @override
    def global_rank(self) -> int:
        return dist.get_rank()

    @override
    def local_rank(self) -> int:
        return dist.get_rank() % self._per_node

    @override
    def node_rank(self) -> int:
        return dist.get_rank() // self._per_node

    @override
    def teardown(self) -> None:
        pass  # the parent's deletes a variable of the environment
