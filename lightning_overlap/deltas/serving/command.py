"""`overlap-replica`: follow a sink, say how far it has come, and write the tables into a file or serve them."""

from __future__ import annotations

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .http_server import ReplicaServer
from .replica import Replica, ReplicaError, save_whole

BAD_INPUT = 2
"""Exit code for a sink or a file that cannot be used."""

_WAIT_S = 0.1


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `overlap-replica` with some arguments, or those of this process; return 0, or 2 after a message on stderr."""
    options = _parser().parse_args(arguments)
    try:
        start = options.state if options.state is not None and options.state.exists() else None
        with Replica(None, options.sink, start=start) as replica, _until_signal() as stopped:
            try:
                if options.once:
                    replica.update()
                    if replica.position is None:
                        raise ReplicaError(f"{replica.sink!r} has no whole cut: is it where the training writes?")
                else:
                    _follow(replica, options, stopped)
            finally:
                _write(replica, options)
    except (ValueError, OSError, ImportError, ReplicaError) as err:
        print(f"overlap-replica: {err}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _follow(replica: Replica, options: argparse.Namespace, stopped: threading.Event) -> None:
    """Follow until a signal or `--until`, and print each new step."""
    with ExitStack() as stack:
        if options.serve is not None:
            host, port = options.serve
            server = stack.enter_context(ReplicaServer(replica, host, port))
            print(f"http://{server.host}:{server.port}/step", flush=True)
        told = None
        print(f"following {replica.sink!r}", flush=True)
        replica.follow(options.every)
        while not stopped.wait(_WAIT_S):
            position = replica.position
            if position is None:
                replica.check()
                continue
            lag = replica.lag
            if position.cut != told:
                told = position.cut
                print(
                    f"step {position.step} (generation {position.generation}), {lag.seconds:.1f} s old, {lag.steps} "
                    f"steps and {lag.parts} parts behind",
                    flush=True,
                )
            if options.until is not None and position.step >= options.until:
                return


def _write(replica: Replica, options: argparse.Namespace) -> None:
    """Write what was asked for, also after an error: what is applied is a step of the training."""
    if replica.position is None:
        return
    if options.state is not None:
        replica.save(options.state)
    if options.save is not None:
        with replica.reading(after_error=True) as position:
            save_whole({name: tensor.detach() for name, tensor in replica.state_dict().items()}, options.save)
        print(f"{options.save}: step {position.step}", flush=True)


@contextmanager
def _until_signal() -> Iterator[threading.Event]:
    """Give an event that Ctrl-C and SIGTERM set, where signals may be handled at all."""
    stopped = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    before = {number: signal.signal(number, lambda *_: stopped.set()) for number in numbers}
    try:
        yield stopped
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"give PORT or HOST:PORT, a port from 0 to 65535, got {text!r}")
    return host or "127.0.0.1", int(port)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"a time is a number of seconds above 0, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlap-replica",
        description="Follow the deltas of a training: apply whole cuts, print the step, and write the tables into a "
        "file or answer lookups over HTTP. Ctrl-C and SIGTERM end it.",
    )
    parser.add_argument("sink", help="a folder, an address for fsspec, or redis://host:port/0?key=name")
    parser.add_argument("--save", type=Path, metavar="FILE", help="at the end, write the tables by name (torch.save)")
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="go on from this file where it exists, and write it at the end"
    )
    parser.add_argument(
        "--serve", type=_address, metavar="[HOST:]PORT", help="answer GET /step and POST /lookup (0: a free port)"
    )
    parser.add_argument("--once", action="store_true", help="apply what is there, then end")
    parser.add_argument("--until", type=int, metavar="STEP", help="end when this step is applied")
    parser.add_argument("--every", type=_seconds, default=0.5, metavar="SECONDS", help="between looks at the sink")
    return parser


if __name__ == "__main__":
    sys.exit(main())
