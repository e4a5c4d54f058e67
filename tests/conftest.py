"""What every test gets: seeds and environment put back, no process group left behind, the modes one by one."""

from __future__ import annotations

import os
import random
from collections.abc import Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.schedule import Schedule

settings.register_profile("no_deadline", deadline=None)  # no test asserts a time: a busy machine has none to promise
settings.load_profile("no_deadline")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


@pytest.fixture(autouse=True)
def _restore_seeds() -> Iterator[None]:
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    yield
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)


@pytest.fixture(autouse=True)
def _restore_environment() -> Iterator[None]:
    before = dict(os.environ)
    yield
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)


@pytest.fixture(autouse=True)
def _no_process_group_left() -> Iterator[None]:
    yield
    if dist.is_available() and dist.is_initialized():
        dist.destroy_process_group()  # so that this test fails alone, and not all that follow
        pytest.fail("the test left a process group behind")


@pytest.fixture(params=MODES.values(), ids=MODES.keys())
def mode(request: pytest.FixtureRequest) -> Schedule:
    """Every mode in turn: a new one needs no test code."""
    schedule: Schedule = request.param
    return schedule


@pytest.fixture(scope="session")
def data_path() -> Path:
    """The folder of real data beside the repository."""
    if not DATA.is_dir():
        pytest.skip("no real data: ../shared/data, beside the repository, is not there")
    return DATA


def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Skip tests marked `gpu` where there is no CUDA device."""
    if torch.cuda.is_available():
        return
    for item in items:
        if item.get_closest_marker("gpu"):
            item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
