"""Fits in this process without a launcher."""

from __future__ import annotations

import contextlib
import logging
import os
import random
from collections.abc import Iterator
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist


@contextlib.contextmanager
def process_group(accelerator: str) -> Iterator[None]:
    """Use the existing process group, or a temporary group: of all ranks under torchrun, else of one rank."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))  # Lightning sets OMP_NUM_THREADS
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if not dist.is_initialized():
            alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
            place = {} if dist.is_torchelastic_launched() else alone
            dist.init_process_group("gloo" if accelerator == "cpu" else "nccl", **place)
            stack.callback(dist.destroy_process_group)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        node, local_rank = divmod(rank, per_node := int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        of_torchrun = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
        of_torchrun |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": per_node}
        os.environ.update({name: str(number) for name, number in of_torchrun.items()})
        for logger in map(logging.getLogger, ("lightning.pytorch", "lightning.fabric", "torchrec")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield
