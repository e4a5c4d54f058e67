"""What every test gets: seeds, environment, handlers put back, no process group left behind, the modes one by one."""

import gc
import os
import random
import signal
from collections.abc import Callable, Iterator
from pathlib import Path

import numpy as np
import pytest
import torch
import torch.distributed as dist
from hypothesis import settings

from lightning_overlap.schedules.modes import MODES
from lightning_overlap.schedules.schedule import Schedule

from .support.ranks import Ranks, free_port
from .support.stores import redis_url, store  # noqa: F401  # fixtures

settings.register_profile("no_deadline", deadline=None)  # no test asserts a time: a busy machine has none to promise
settings.load_profile("no_deadline")

DATA = Path(__file__).resolve().parents[2] / "shared" / "data"


def pytest_collection_finish() -> None:
    """Spare collections the million objects of imports: TorchRec's planner collects each time, which takes 0.2 s."""
    gc.collect()
    gc.freeze()
    gc.set_threshold(20_000)  # from 700, as in rank processes


@pytest.fixture(autouse=True)
def _leave_nothing_behind() -> Iterator[None]:
    python_state, numpy_state, torch_state = random.getstate(), np.random.get_state(), torch.get_rng_state()
    before = dict(os.environ)
    os.environ["MASTER_PORT"] = str(free_port())  # a port that Lightning chooses may be taken before it is used
    handlers = {signum: signal.getsignal(signum) for signum in (signal.SIGTERM, signal.SIGINT, signal.SIGUSR1)}
    yield
    for signum, handler in handlers.items():
        signal.signal(signum, handler)  # Lightning leaves its handlers if its teardown fails
    random.setstate(python_state)
    np.random.set_state(numpy_state)
    torch.set_rng_state(torch_state)
    for name in os.environ.keys() - before.keys():
        del os.environ[name]
    os.environ.update(before)
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
    if not DATA.is_dir():
        pytest.skip("no real data: ../shared/data, beside the repository, is not there")
    return DATA


# Rank processes are kept for the session: starting them is most of such a test's time.
@pytest.fixture(scope="session")
def _pools() -> Iterator[dict[tuple[int, str, int], Ranks]]:
    pools: dict[tuple[int, str, int], Ranks] = {}
    yield pools
    for pool in pools.values():
        pool.close()


@pytest.fixture
def get_ranks(_pools: dict[tuple[int, str, int], Ranks]) -> Callable[..., Ranks]:
    """Return the rank processes of a world size, started again if an earlier test ended them or they are worn."""

    def get(world_size: int, device_type: str = "cpu", num_nodes: int = 1) -> Ranks:
        key = (world_size, device_type, num_nodes)
        if key in _pools and _pools[key].alive and _pools[key].worn:
            _pools[key].close()
        if key not in _pools or not _pools[key].alive:
            _pools[key] = Ranks(world_size, device_type, num_nodes)
        return _pools[key]

    return get


@pytest.fixture(params=[1, 2], ids=["1rank", "2ranks"])
def ranks(request: pytest.FixtureRequest, get_ranks: Callable[..., Ranks]) -> Ranks:
    return get_ranks(request.param)


@pytest.fixture
def two_ranks(get_ranks: Callable[..., Ranks]) -> Ranks:
    return get_ranks(2)


def pytest_ignore_collect(collection_path: Path, config: pytest.Config) -> bool | None:
    """Read no other folders for `-m gpu`: a machine with a GPU may lack the packages that they import."""
    folder = collection_path.name if collection_path.is_dir() else collection_path.parent.name
    return True if config.option.markexpr in ("gpu", "gpu_first") and folder not in ("tests", "gpu") else None


@pytest.hookimpl(trylast=True)  # after pytest has put tests with the same parameters together
def pytest_collection_modifyitems(items: list[pytest.Item]) -> None:
    """Begin with the files that take longest: a long one that begins last keeps one worker busy, and no other."""
    seconds: dict[Path, float] = {}
    for item in items:
        seconds[item.path] = seconds.get(item.path, 0.0) + seconds_of(item)
    items.sort(key=lambda item: (-seconds[item.path], str(item.path)))


def seconds_of(item: pytest.Item) -> float:
    """Return about how long a test takes, as far as its marks tell."""
    if item.get_closest_marker("skip"):
        return 0.0
    if item.get_closest_marker("slow"):
        timeout = item.get_closest_marker("timeout")
        assert timeout is not None
        return float(timeout.args[0]) / 10
    return 1.0 if item.get_closest_marker("ranks") else 0.1


def pytest_itemcollected(item: pytest.Item) -> None:
    """Mark a test that has rank processes; give programs time for their imports; skip `gpu` tests without a device."""
    if "get_ranks" in getattr(item, "fixturenames", ()):
        item.add_marker(pytest.mark.ranks)
    if item.get_closest_marker("slow") and not item.get_closest_marker("timeout"):
        item.add_marker(pytest.mark.timeout(400))
    if item.get_closest_marker("gpu") and not torch.cuda.is_available():
        item.add_marker(pytest.mark.skip(reason="needs a CUDA device"))
