"""Start the ranks of a run on this host, and end all of them."""

import atexit
import ctypes
import json
import logging
import os
import signal
import sys
import time
import traceback
import uuid
from contextlib import ExitStack
from importlib import import_module
from pathlib import Path
from tempfile import TemporaryDirectory

from omegaconf import OmegaConf
from torch.distributed.elastic.multiprocessing import DefaultLogsSpecs, SignalException
from torch.distributed.elastic.multiprocessing.errors import ChildFailedError
from torch.distributed.launcher.api import LaunchConfig, elastic_launch

from ..distributed import PEER_LOST


class RunEndedError(RuntimeError):
    """A rank failed, or a signal ended the run; `exit_code` is for the shell."""

    def __init__(self, message: str, exit_code: int = 1) -> None:
        super().__init__(message)
        self.exit_code = exit_code


def under_launcher() -> bool:
    """Return whether torchrun or SLURM's `srun` started this process as a rank."""
    return "LOCAL_RANK" in os.environ or "SLURM_PROCID" in os.environ


def rank() -> int:
    """Return this process's global rank from the launcher's environment variables; 0 without a launcher."""
    return int(os.environ.get("RANK", os.environ.get("SLURM_PROCID", "0")))


def run_ranks(num_ranks: int, worker: str, folder: Path) -> None:
    """Run the worker, a file of `apps`, on `num_ranks` ranks of this host, as torchrun does, and wait for their end."""
    with ExitStack() as stack:
        for signum in (signal.SIGINT, signal.SIGTERM, signal.SIGHUP, signal.SIGQUIT):  # the launcher replaces handlers
            stack.callback(signal.signal, signum, signal.getsignal(signum))
        stack.callback(logging.disable, logging.root.manager.disable)
        logging.disable(logging.CRITICAL)  # of the launcher: the ranks and the caller report errors themselves
        config = LaunchConfig(
            min_nodes=1,
            max_nodes=1,
            nproc_per_node=num_ranks,
            run_id=uuid.uuid4().hex,
            rdzv_backend="c10d",
            rdzv_endpoint="localhost:0",
            local_addr="localhost",
            max_restarts=0,
            logs_specs=DefaultLogsSpecs(stack.enter_context(TemporaryDirectory(prefix="overlap_train_"))),
        )
        config.shutdown_timeout = 5  # seconds from asking the other ranks to stop to killing them; torch 2.11 has none
        try:
            elastic_launch(config, sys.executable)("-m", __name__, worker, str(folder), os.getpid())
        except ChildFailedError as err:
            raise RunEndedError(_first_failure(folder, err)) from None
        except SignalException as err:
            raise RunEndedError(f"stopped by {signal.Signals(err.sigval).name}", 128 + err.sigval) from None


def main() -> None:
    """Run a rank's work until it ends or its parent process dies; write a failure for `run_ranks`."""
    worker, folder, parent = sys.argv[1], Path(sys.argv[2]), int(sys.argv[3])
    if sys.platform == "linux":  # where the kernel ends a process when its parent dies, even of SIGKILL
        pr_set_pdeathsig = 1
        ctypes.CDLL(None).prctl(pr_set_pdeathsig, signal.SIGKILL)
        if os.getppid() != parent:  # it died while this process was starting
            os.kill(os.getpid(), signal.SIGKILL)
    atexit.register(_leave)  # runs after everything registered later, for example by loggers
    try:
        config = OmegaConf.to_container(OmegaConf.load(folder / "config.yaml"))
        import_module(f".{worker}", __package__).run(config, folder)
    except BaseException as err:  # also SystemExit: Lightning turns Ctrl-C into it
        write_failure(folder, err)
        # Leave at once: the other ranks wait in a collective that this one never joins, and so would a clean exit.
        sys.stdout.flush()
        os._exit(1)


def _leave() -> None:
    """End the process without C++ clean-up, during which a gloo thread sometimes aborts (SIGABRT)."""
    logging.shutdown()
    sys.stdout.flush()
    sys.stderr.flush()
    os._exit(0)


def write_failure(folder: Path, error: BaseException) -> None:
    """Write this rank's error into the files that `run_ranks` reads."""
    errors, failure = folder / "errors", {"time": time.time(), "message": f"{type(error).__name__}: {error}"}
    errors.mkdir(exist_ok=True, parents=True)
    (errors / f"rank_{rank()}.json").write_text(json.dumps(failure), encoding="utf-8")
    (errors / f"rank_{rank()}.txt").write_text("".join(traceback.format_exception(error)), encoding="utf-8")


def _first_failure(folder: Path, err: ChildFailedError) -> str:
    """Describe the failure that came first; later failures follow from it."""
    written = {
        int(path.stem.removeprefix("rank_")): json.loads(path.read_text(encoding="utf-8"))
        for path in (folder / "errors").glob("rank_*.json")
    }
    silent = {number: failure for number, failure in err.failures.items() if number not in written}
    # After a failure the launcher sends SIGTERM to the other ranks, and gloo may abort a rank that waits for this one.
    has_cause = any(not any(said in one["message"] for said in PEER_LOST) for one in written.values())
    follow = (-signal.SIGTERM, -signal.SIGABRT) if has_cause else (-signal.SIGTERM,)
    unasked = {number: failure for number, failure in silent.items() if failure.exitcode not in follow}
    silent = unasked if written or unasked else silent
    if silent:  # killed, or ended in the middle of native code: the others' errors follow from it
        number, failure = min(silent.items(), key=lambda item: item[1].exitcode)
        how = f"killed by {failure.signal_name()}" if failure.exitcode < 0 else f"exit code {failure.exitcode}"
        return f"rank {number}: {how}"
    first = min(written, key=lambda number: float(written[number]["time"]))
    return f"rank {first}: {written[first]['message']}\n  traceback: {folder / 'errors'}/rank_{first}.txt"


if __name__ == "__main__":
    main()
