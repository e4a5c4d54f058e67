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
    state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    loggers = [logging.getLogger(name) for name in ("lightning.pytorch", "lightning.fabric", "torchrec")]
    levels = [logger.level for logger in loggers]
    made = not dist.is_initialized()
    if made:
        store = dist.HashStore()  # type: ignore[attr-defined]
        dist.init_process_group("gloo" if accelerator == "cpu" else "nccl", store=store, rank=0, world_size=1)
    for logger in loggers:
        logger.setLevel(logging.ERROR)
    try:
        with mock.patch.dict(os.environ):  # Lightning sets OMP_NUM_THREADS
            yield
    finally:
        for logger, level in zip(loggers, levels, strict=True):
            logger.setLevel(level)
        if made:
            dist.destroy_process_group()
        random.setstate(state[0])
        np.random.set_state(state[1])
        torch.set_rng_state(state[2])


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
