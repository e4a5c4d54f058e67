"""Python programs as processes that are forked from one which has imported torch, TorchRec and Lightning.

An interpreter that imports them anew takes four seconds of a CPU. `Popen` and `run` are those of `subprocess`: what
they start is a child of its caller, with its own arguments, environment, folder, files and signals. What it starts with
`subprocess` is forked likewise. It differs in what it has imported already, in hash seeds, and in that other modules'
objects are not taken apart at the end. So of each kind of command one test at least takes `subprocess` itself.

How: a server S forks M, M forks the program and ends. The kernel hands a process whose parent ends to its nearest
ancestor that asked for orphans, which is the client of S. A program has a server of its own, forked before it begins.
"""

import atexit
import builtins
import contextlib
import ctypes
import fcntl
import functools
import gc
import importlib
import importlib.metadata
import os
import pickle
import runpy
import signal
import socket
import subprocess
import sys
import threading
import time
import types
import warnings
import weakref
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any, NoReturn

ROOT = Path(__file__).resolve().parents[2]
PRELOADED = (
    *("lightning.pytorch", "torchrec", "lightning_overlap", "lightning_overlap.apps.build", "hydra", "omegaconf"),
    *("torch.distributed.launcher.api", "torch.distributed.elastic.multiprocessing", "tensordict", "numpy"),
    *("lightning_overlap.data", "lightning_overlap.models", "matplotlib.figure"),
    *("pytest", "hypothesis"),
    *("tests.support.fits", "tests.support.reference", "tests.support.traces", "tests.laws.faults"),
)
SERVER = "from tests.support.interpreters import main; main()"
_PR_SET_CHILD_SUBREAPER = 36


@dataclass
class _Program:
    arguments: list[str]  # `-m module ...`, `-c code ...` or `script ...`, after `-u`, `-B` and `-W` if any
    environment: dict[str, str]
    folder: str
    numbers: list[int]  # of the files that go along
    group: int  # the process group to join; 0: a session of its own
    ignored: list[int]  # signals
    launches: bool  # whether it gets a server of its own

    def become(self, files: list[int]) -> socket.socket | None:
        """Make this process the program's, short of running it; return the link in the program's server."""
        first = max([*self.numbers, *files]) + 1
        moved = [fcntl.fcntl(file, fcntl.F_DUPFD, first) for file in files]
        for number in {int(name) for name in os.listdir("/proc/self/fd")} - {0, 1, 2, *moved}:
            with contextlib.suppress(OSError):  # the folder itself
                os.close(number)
        for file, number in zip(moved, self.numbers, strict=True):
            os.dup2(file, number)
            os.close(file)
        if self.group:
            os.setpgid(0, self.group)
        else:
            os.setsid()
        if self.launches:
            ours, theirs = socket.socketpair()
            if os.fork() == 0:
                ours.close()
                nothing = os.open(os.devnull, os.O_RDWR)
                for number in self.numbers:  # else who reads what the program writes would wait for the server, too
                    os.dup2(nothing, number)
                os.setpgid(0, 0)
                return theirs
            theirs.close()
            _servers[os.getpid()] = _Server(ours)
            atexit.register(ours.close)
            subprocess.Popen._execute_child = _fork_or_execute  # type: ignore[attr-defined]
        return None

    def run(self) -> None:
        import numpy as np
        import torch

        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        for number in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):
            usual = signal.default_int_handler if number == signal.SIGINT else signal.SIG_DFL
            signal.signal(number, signal.SIG_IGN if number in self.ignored else usual)
        np.random.seed()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        options, (kind, *arguments) = _parse(self.arguments)
        unbuffered = "-u" in options or bool(os.environ.get("PYTHONUNBUFFERED"))
        sys.dont_write_bytecode = "-B" in options or bool(os.environ.get("PYTHONDONTWRITEBYTECODE"))
        sys.stdout.reconfigure(line_buffering=False, write_through=unbuffered)  # type: ignore[union-attr]
        sys.orig_argv[:] = [sys.executable, *self.arguments]
        for option in options:
            if option.startswith("-W"):
                sys.warnoptions.append(option[2:])
                warnings._setoption(option[2:])  # type: ignore[attr-defined]
        module = sys.modules["__main__"] = types.ModuleType("__main__")
        module.__builtins__ = builtins  # type: ignore[attr-defined]
        first = {"-m": self.folder, "-c": ""}.get(kind, str(Path(kind).resolve().parent))
        sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *_INSTALLED]
        importlib.invalidate_caches()
        if kind == "-m":
            sys.argv[:] = ["-m", *arguments[1:]]
            runpy._run_module_as_main(arguments[0])  # type: ignore[attr-defined]
        elif kind == "-c":
            sys.argv[:] = ["-c", *arguments[1:]]
            exec(compile(arguments[0], "<string>", "exec"), vars(module))
        else:
            sys.argv[:] = [kind, *arguments]
            module.__file__ = kind
            exec(compile(Path(kind).read_bytes(), kind, "exec"), vars(module))


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen` of `[sys.executable, ...]`, forked; with `launches` also what it starts with `subprocess`."""

    def __init__(self, arguments: Sequence[Any], *, launches: bool = True, **options: Any) -> None:
        assert arguments[0] == sys.executable, arguments
        self._launches = launches
        super().__init__(arguments, **options)

    def _execute_child(self, args: Any, *rest: Any) -> None:
        _server_of_this_process().start(self, args, rest, self._launches)


def run(arguments: Sequence[Any], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run` of `[sys.executable, ...]`: without an exit code that is checked."""
    if options.pop("capture_output", False):
        options |= {"stdout": subprocess.PIPE, "stderr": subprocess.PIPE}
    with Popen(arguments, **options) as process:
        try:
            out, err = process.communicate(timeout=timeout)
        except BaseException:
            process.kill()
            raise
        return subprocess.CompletedProcess(process.args, process.returncode, out, err)


# -- the client -----------------------------------------------------------------------------------------------------


class _Server:
    def __init__(self, link: socket.socket) -> None:
        self._link = link
        self._lock = threading.Lock()

    def start(self, popen: Any, args: Sequence[Any], rest: Sequence[Any], launches: bool = False) -> None:
        _, preexec, _, pass_fds, cwd, env, _, _, shell, *pipes = rest[:15]
        p2cread, _, _, c2pwrite, _, errwrite = pipes
        *_, new_session, process_group = rest[15:]
        assert preexec is None
        assert not shell
        assert process_group == -1
        standard = [p2cread, c2pwrite, errwrite]
        files = [number if file == -1 else file for number, file in enumerate(standard)] + list(pass_fds)
        program = _Program(
            arguments=[os.fsdecode(arg) for arg in args[1:]],
            environment=dict(os.environ if env is None else env),
            folder=os.getcwd() if cwd is None else os.path.abspath(os.fsdecode(cwd)),
            numbers=[0, 1, 2, *pass_fds],
            group=0 if new_session else os.getpgrp(),
            ignored=[number for number in signal.valid_signals() if signal.getsignal(number) == signal.SIG_IGN],
            launches=launches,
        )
        with self._lock, _taking_orphans():
            _send(self._link, program, files)
            answer = _receive(self._link)
        assert answer is not None, "the server of interpreters has ended"
        popen.pid, _ = answer
        popen._child_created = True
        popen._close_pipe_fds(*pipes)


_execute = subprocess.Popen._execute_child  # type: ignore[attr-defined]


def _fork_or_execute(popen: Any, args: Any, *rest: Any) -> None:
    """Be `subprocess.Popen._execute_child` of a program: fork what it starts of Python."""
    if isinstance(args, list | tuple) and args[0] == sys.executable and _parse(args[1:])[1] and rest[1] is None:
        _servers[os.getpid()].start(popen, args, rest)
    else:
        _execute(popen, args, *rest)


def _parse(arguments: Sequence[Any]) -> tuple[list[str], list[str]]:
    """Return an interpreter's options, and the arguments from `-m`, `-c` or the script on; [] if there are others."""
    options, left = [], [os.fsdecode(os.fspath(arg) if not isinstance(arg, str) else arg) for arg in arguments]
    while left and left[0] in ("-u", "-B", "-W"):
        option = left.pop(0)
        options.append(option + (left.pop(0) if option == "-W" else ""))
    return options, [] if left and left[0][0] == "-" and left[0] not in ("-m", "-c") else left


@contextlib.contextmanager
def _taking_orphans() -> Iterator[None]:
    prctl = ctypes.CDLL(None).prctl
    prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0)
    try:
        yield
    finally:
        prctl(_PR_SET_CHILD_SUBREAPER, 0, 0, 0, 0)


_servers: dict[int, _Server] = {}  # of this process, by its id: a process that was forked from it has none yet


def _server_of_this_process() -> _Server:
    if os.getpid() not in _servers:
        ours, theirs = socket.socketpair()
        paths = [str(ROOT), os.environ.get("PYTHONPATH", "")]  # packages may be reached through it alone
        environment = os.environ | {"PYTHONPATH": os.pathsep.join(filter(None, paths))}
        with theirs:
            process = subprocess.Popen(
                [sys.executable, "-c", SERVER, str(theirs.fileno())],
                cwd=ROOT,
                env=environment,
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
                pass_fds=[theirs.fileno()],
            )
        _servers[os.getpid()] = _Server(ours)
        atexit.register(_end, os.getpid(), ours, process)
    return _servers[os.getpid()]


def _end(owner: int, link: socket.socket, process: subprocess.Popen[bytes]) -> None:
    if os.getpid() == owner:
        link.shutdown(socket.SHUT_RDWR)  # though a process that was forked here may have it, too
        link.close()
        process.wait()


def _send(link: socket.socket, content: Any, files: Sequence[int] = ()) -> None:
    data = pickle.dumps(content)
    socket.send_fds(link, [len(data).to_bytes(8, "little")], list(files))
    link.sendall(data)


def _receive(link: socket.socket) -> tuple[Any, list[int]] | None:
    head, files, _, _ = socket.recv_fds(link, 8, 250)
    if not head:
        return None
    length, data = int.from_bytes(head, "little"), b""
    while len(data) < length:
        data += link.recv(length - len(data))
    return pickle.loads(data), files


# -- the server -----------------------------------------------------------------------------------------------------

_INSTALLED: list[str] = []  # what `sys.path` has beside a program's own folder and PYTHONPATH


def main() -> None:
    # Lightning asks for each Trainer what is installed.
    importlib.metadata.entry_points = functools.cache(importlib.metadata.entry_points)
    show, warnings.showwarning = warnings.showwarning, lambda *args, **kwargs: None
    for name in PRELOADED:
        importlib.import_module(name)
    warnings.showwarning = show
    own = {"", str(ROOT), *os.environ["PYTHONPATH"].split(os.pathsep)}
    _INSTALLED.extend(path for path in sys.path if path not in own)
    link: socket.socket | None = socket.socket(fileno=int(sys.argv[1]))
    os.setpgid(0, 0)  # Ctrl-C in a terminal is not for it
    for shared in list(weakref.finalize._registry):  # type: ignore[attr-defined]
        shared.atexit = False  # of what all share: tens of milliseconds for each program
    gc.collect()
    gc.set_threshold(20_000)  # from 700: a sixth of the tests' CPU went into looking for cycles after so few objects
    gc.freeze()  # an interpreter that ends, or collects, would copy every page of what it shares with its parent
    while link is not None:
        program, files = _serve(link)
        link = program.become(files)
    _end_after(program.run)


def _end_after(run: Callable[[], None]) -> NoReturn:
    """Run a program and end as an interpreter does, but for freeing what it shares, which takes 0.4 s of a CPU."""
    code, interrupted = 0, False
    try:
        run()
    except SystemExit as end:
        if end.code is not None and not isinstance(end.code, int):
            print(end.code, file=sys.stderr)
        code = end.code if isinstance(end.code, int) else int(end.code is not None)
    except BaseException as error:
        sys.last_value = error
        sys.excepthook(type(error), error, error.__traceback__)
        code, interrupted = 1, isinstance(error, KeyboardInterrupt)
    threading._shutdown()  # type: ignore[attr-defined]
    atexit._run_exitfuncs()
    del sys.modules["__main__"]
    gc.collect()  # its own objects do what they do at their end
    for file in (sys.stdout, sys.stderr):
        with contextlib.suppress(ValueError):  # closed
            file.flush()
    if interrupted:
        signal.signal(signal.SIGINT, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGINT)
    os._exit(code & 0xFF)


def _serve(link: socket.socket) -> tuple[_Program, list[int]]:
    while (received := _receive(link)) is not None:
        program, files = received
        reader, writer = os.pipe()
        if (middle := os.fork()) == 0:
            me = os.getpid()
            if pid := os.fork():
                os.write(writer, pid.to_bytes(8, "little"))
                os._exit(0)
            while os.getppid() == me:
                time.sleep(0.001)
            link.detach()  # closed by number, with all others
            return program, files
        os.waitpid(middle, 0)
        _send(link, int.from_bytes(os.read(reader, 8), "little"))
        for file in (reader, writer, *files):
            os.close(file)
    os._exit(0)
