"""Python programs as processes forked from one that has imported torch, TorchRec and Lightning: a forkserver.

An interpreter that imports them anew takes eight seconds of a CPU. `Popen` and `run` are those of `subprocess`: a
program has arguments, environment, folder, files and signals of its own, and what it starts with `subprocess` is forked
likewise. It differs in what it has imported already, in that it is its server's child, and in that the modules' objects
are not taken apart at the end. So of each kind of command one test at least takes `subprocess` itself.
"""

import atexit
import contextlib
import gc
import os
import pickle
import runpy
import subprocess
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass
from multiprocessing import connection, forkserver
from pathlib import Path
from typing import Any
from unittest import mock

ROOT = Path(__file__).resolve().parents[2]
forkserver.set_forkserver_preload(["tests.support.preloaded"])


@dataclass
class _Program:
    arguments: list[str]  # `-m module ...` or `script ...`
    environment: dict[str, str]
    folder: str
    group: int  # the process group to join; 0: one of its own
    parent: int

    def _bootstrap(self, parent_sentinel: int) -> int:
        """Be a program, and return its exit code: what the server calls, as it would a `multiprocessing.Process`'s."""
        os.close(parent_sentinel)
        for number, file in enumerate(forkserver.get_inherited_fds()):  # type: ignore[arg-type]
            os.dup2(file, number)
            os.close(file)
        os.setpgid(0, self.group)
        code, names = 0, {}
        try:
            names = self._run()
        except SystemExit as end:
            code = end.code if isinstance(end.code, int) else int(end.code is not None)
            if code != end.code and end.code is not None:
                print(end.code, file=sys.stderr)
        except BaseException as error:
            sys.last_value, code = error, 1
            sys.excepthook(type(error), error, error.__traceback__)
        threading._shutdown()  # type: ignore[attr-defined]
        atexit._run_exitfuncs()
        names.clear()
        sys.last_value = None
        gc.collect()  # its objects do what they do at their end
        sys.stdout.flush()
        sys.stderr.flush()
        return code & 0xFF

    def _run(self) -> dict[str, Any]:
        import numpy as np
        import torch

        os.chdir(self.folder)
        os.environ.clear()
        os.environ.update(self.environment)
        own, of_server = os.getpid(), os.getppid  # ranks of `overlap-train` end if who started them has gone
        os.getppid = lambda: self.parent if os.getpid() == own else of_server()
        np.random.seed()
        torch.set_num_threads(int(os.environ.get("OMP_NUM_THREADS") or os.cpu_count() or 1))
        sys.stdout.reconfigure(line_buffering=False, write_through=True)  # type: ignore[union-attr]
        is_module = self.arguments[0] == "-m"
        sys.argv[:] = self.arguments[is_module:]
        first = self.folder if is_module else str(Path(sys.argv[0]).resolve().parent)
        sys.path[:] = [first, *filter(None, os.environ.get("PYTHONPATH", "").split(os.pathsep)), *sys.path[1:]]
        if is_module:
            return runpy.run_module(sys.argv[0], run_name="__main__", alter_sys=True)
        return runpy.run_path(sys.argv[0], run_name="__main__")


class Popen(subprocess.Popen):  # type: ignore[type-arg]
    """`subprocess.Popen`, which forks `[sys.executable, "-m", module, ...]` and `[sys.executable, script, ...]`."""

    _status: int | None = None  # the pipe of a forked program's exit code

    def _execute_child(self, args: Any, executable: Any, preexec_fn: Any, close_fds: bool, *rest: Any) -> None:
        pass_fds, cwd, env, _, _, shell, *pipes = rest[:12]
        arguments = [] if isinstance(args, str | bytes | os.PathLike) or shell else [os.fsdecode(arg) for arg in args]
        if arguments[1:2] == ["-u"]:
            del arguments[1]
        is_python = arguments[:1] == [sys.executable] and (arguments[1] == "-m" or arguments[1][:1] != "-")
        if not is_python or pass_fds or preexec_fn:
            super()._execute_child(args, executable, preexec_fn, close_fds, *rest)  # type: ignore[misc]
            return
        standard = [number if file == -1 else file for number, file in enumerate((pipes[0], pipes[3], pipes[5]))]
        folder, environment = os.path.abspath(cwd or os.curdir), dict(os.environ if env is None else env)
        group = 0 if rest[-2] else os.getpgrp()  # start_new_session
        program = _Program(arguments[1:], environment, os.fsdecode(folder), group, os.getpid())
        with contextlib.chdir(ROOT):  # where the server finds what it imports
            self._status, link = forkserver.connect_to_new_process(standard)
        with open(link, "wb") as file:
            pickle.dump({}, file)
            pickle.dump(program, file)
        self.pid = forkserver.read_signed(self._status)
        self._child_created = True
        self._close_pipe_fds(*pipes)  # type: ignore[attr-defined]

    def _internal_poll(self, *args: Any, **kwargs: Any) -> int | None:
        if self._status is None:
            return super()._internal_poll(*args, **kwargs)  # type: ignore[misc,no-any-return]
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._wait(0)
        return self.returncode

    def _wait(self, timeout: float | None) -> int:
        if self._status is None:
            return super()._wait(timeout)  # type: ignore[misc,no-any-return]
        if self.returncode is None:
            if not connection.wait([self._status], timeout):
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            self.returncode = forkserver.read_signed(self._status)
            os.close(self._status)
        return self.returncode


def run(arguments: Sequence[Any], *, timeout: float, **options: Any) -> subprocess.CompletedProcess[Any]:
    """`subprocess.run`, forked as `Popen`."""
    with mock.patch.object(subprocess, "Popen", Popen):
        return subprocess.run(arguments, timeout=timeout, **options)
