"""Processes that stay up for a test session and run functions on every rank: gloo on a CPU, NCCL on GPUs."""

import contextlib
import datetime
import inspect
import io
import multiprocessing
import multiprocessing.connection
import os
import pickle
import random
import socket
import traceback
import warnings
from collections.abc import Callable
from multiprocessing.reduction import ForkingPickler
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist

ROOT = Path(__file__).resolve().parents[2]
PROCESS_GROUP_TIMEOUT_S = 60
MOST_THREADS = 100  # above them a rank is worn; a fresh rank has about twenty

_ANSWERS: dict[tuple[int, str, int, bytes], list[Any]] = {}


class RankError(AssertionError):
    """A rank raised; the message holds its traceback."""


class Ranks:
    """Processes with a process group, driven from the test's process: on a "cpu" of gloo, on "cuda" of NCCL."""

    def __init__(self, world_size: int, device_type: str = "cpu", num_nodes: int = 1) -> None:
        self.world_size = world_size
        self._place = (world_size, device_type, num_nodes)
        port = free_port()
        if device_type == "cuda":  # a fork cannot use CUDA, which FBGEMM initializes when it is imported
            context: Any = multiprocessing.get_context("spawn")
        else:
            context = multiprocessing.get_context("forkserver")
            context.set_forkserver_preload(["tests.support.preloaded"])
        self._pipes: list[multiprocessing.connection.Connection] = []
        self._processes: list[Any] = []
        for rank in range(world_size):
            ours, theirs = multiprocessing.Pipe()  # when this end goes, a rank ends
            place = (rank, world_size, num_nodes)
            with theirs, contextlib.chdir(ROOT):  # where the server finds what it imports
                # No daemon: it may start processes of its own.
                process = context.Process(target=serve, args=(place, port, device_type, theirs))
                process.start()
            self._pipes.append(ours)
            self._processes.append(process)

    @property
    def alive(self) -> bool:
        return all(process.is_alive() for process in self._processes)

    @property
    def pids(self) -> list[int]:
        return [process.pid for process in self._processes]

    @property
    def worn(self) -> bool:
        """Whether groups of fits that failed have left many threads: gloo's look for work a hundred times a second."""
        tasks = [Path(f"/proc/{process.pid}/task") for process in self._processes]
        return any(sum(1 for _ in folder.iterdir()) > MOST_THREADS for folder in tasks if folder.is_dir())

    def run(self, function: Callable[..., Any], *args: Any, timeout_s: float = 90, **kwargs: Any) -> list[Any]:
        """Call a module-level function on every rank; return the results by rank.

        Raises a RankError if a rank raised, died, or gave no answer in time. The processes are then gone, as after any
        other error, such as a test's timeout: the answers that are still to come would be the next call's.
        """
        try:
            return self._run(function, args, kwargs, timeout_s)
        except BaseException:
            self.close()  # the process group may be in any state
            raise

    def _run(
        self, function: Callable[..., Any], args: tuple[Any, ...], kwargs: dict[str, Any], timeout_s: float
    ) -> list[Any]:
        for pipe in self._pipes:
            _send(pipe, (function, args, kwargs))
        deadline = datetime.datetime.now() + datetime.timedelta(seconds=timeout_s)
        answers: dict[int, Any] = {}
        waiting = dict(enumerate(self._pipes))
        while waiting and all(ok for ok, _ in answers.values()):  # the first failure is the one to tell
            left_s = (deadline - datetime.datetime.now()).total_seconds()
            ready = multiprocessing.connection.wait(waiting.values(), timeout=max(0.0, left_s))
            if not ready:
                raise RankError(f"ranks {sorted(waiting)} gave no answer within {timeout_s} s")
            for rank in [rank for rank, pipe in waiting.items() if pipe in ready]:
                try:
                    answers[rank] = waiting.pop(rank).recv()
                except (EOFError, ConnectionResetError):
                    raise RankError(f"rank {rank} died") from None
        if failures := [f"rank {rank}:\n{answer}" for rank, (ok, answer) in answers.items() if not ok]:
            raise RankError("\n".join(failures))
        return [answers[rank][1] for rank in range(self.world_size)]

    def run_once(self, function: Callable[..., Any], *args: Any, **kwargs: Any) -> list[Any]:
        """`run`, but what the same call gave before in this session; what comes back is not to be changed."""
        call = inspect.signature(function).bind(*args, **kwargs)
        call.apply_defaults()
        key = (*self._place, pickle.dumps((function, list(call.arguments.items()))))
        if key not in _ANSWERS:
            _ANSWERS[key] = self.run(function, *args, **kwargs)
        return _ANSWERS[key]

    def close(self) -> None:
        for process in self._processes:
            process.kill()
        for process in self._processes:
            process.join()


def serve(place: tuple[int, int, int], port: int, device_type: str, pipe: Any) -> None:
    """Be a rank: call what comes through the pipe, until it ends."""
    os.environ.update(torchrun_variables(*place, port))
    # Of data loaders' workers. A server would be left behind; a fork may die before the loader looks at it.
    multiprocessing.set_start_method("spawn", force=True)
    warnings.simplefilter("ignore")
    torch.set_num_threads(1)
    if device_type == "cuda":
        os.environ["CUBLAS_WORKSPACE_CONFIG"] = ":4096:8"  # for deterministic kernels
        if place[2] > 1:  # for NCCL hosts that share a GPU are several
            os.environ.update(NCCL_HOSTID=f"r{place[0]}", NCCL_SOCKET_IFNAME="lo")
        torch.cuda.set_device(int(os.environ["LOCAL_RANK"]))
    timeout = datetime.timedelta(seconds=PROCESS_GROUP_TIMEOUT_S)
    dist.init_process_group("nccl" if device_type == "cuda" else "gloo", timeout=timeout)
    while True:
        try:
            function, args, kwargs = pipe.recv()
        except EOFError:
            os._exit(0)
        try:
            answer = (True, function(*args, **kwargs))
        except BaseException:
            answer = (False, traceback.format_exc())
        _send(pipe, answer)


def _send(pipe: multiprocessing.connection.Connection, what: Any) -> None:
    """Send an object; tensors of a host by their values: by shared memory each would take half a millisecond."""
    buffer = io.BytesIO()
    _Pickler(buffer, pickle.HIGHEST_PROTOCOL).dump(what)
    pipe.send_bytes(buffer.getbuffer())


class _Pickler(ForkingPickler):
    def reducer_override(self, given: Any) -> Any:
        is_plain = type(given) is torch.Tensor and given.is_cpu and given.layout is torch.strided
        if not is_plain or given.dtype is torch.bfloat16:
            return NotImplemented
        return _tensor, (given.detach().numpy(), given.requires_grad)


def _tensor(values: Any, requires_grad: bool) -> torch.Tensor:
    return torch.from_numpy(values).requires_grad_(requires_grad)


def torchrun_variables(rank: int, world_size: int, num_nodes: int, port: int) -> dict[str, str]:
    """The environment of a rank as torchrun makes it: Lightning then starts no processes of its own."""
    node, local_rank = divmod(rank, world_size // num_nodes)
    numbers = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node, "MASTER_PORT": port}
    numbers |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": world_size // num_nodes}
    texts = {name: str(number) for name, number in numbers.items()}
    return {**texts, "MASTER_ADDR": "127.0.0.1", "TORCHELASTIC_RUN_ID": "tests"}


def free_port() -> int:
    """Return a port that nothing listens on, below those (32768 on) that the kernel gives out until it is used."""
    while True:
        port = random.SystemRandom().randrange(15_000, 32_000)  # seeded, two processes of tests would take the same
        with socket.socket() as probe, contextlib.suppress(OSError):
            probe.bind(("127.0.0.1", port))
            return port
