"""`overlap-replica`: follow a sink, print its progress, and write the tables into a file or serve them."""

import argparse
import signal
import sys
import threading
from collections.abc import Iterator, Sequence
from contextlib import ExitStack, contextmanager
from pathlib import Path

from .http_server import ReplicaServer
from .replica import Replica, ReplicaError, save_whole

BAD_INPUT = 2  # exit code for a sink or a file that cannot be used


def main(arguments: Sequence[str] | None = None) -> int:
    """Run `overlap-replica`; return the exit code: 0, or 2 with a message on stderr."""
    options = _parser().parse_args(arguments)
    try:
        start = options.state if options.state is not None and options.state.exists() else None
        with Replica(None, options.sink, start=start) as replica, _until_signal() as stopped:
            try:
                if options.once:
                    replica.update()
                    if replica.position is None:
                        raise ReplicaError(f"{replica.sink!r} has no whole cut. Does the training write there?")
                else:
                    _follow(replica, options, stopped)
            finally:
                _write(replica, options)
    except (ValueError, OSError, ImportError, ReplicaError) as err:
        print(f"overlap-replica: {err}", file=sys.stderr)
        return BAD_INPUT
    return 0


def _follow(replica: Replica, options: argparse.Namespace, stopped: threading.Event) -> None:
    with ExitStack() as stack:
        if options.serve is not None:
            server = stack.enter_context(ReplicaServer(replica, *options.serve))
            print(f"http://{server.host}:{server.port}/step", flush=True)
        printed = None
        print(f"following {replica.sink!r}", flush=True)
        replica.follow(options.every)
        while not stopped.wait(0.1):
            position = replica.position
            if position is None:
                replica.check()
                continue
            lag = replica.lag
            if position.cut != printed:
                printed = position.cut
                print(
                    f"step {position.step} (generation {position.generation}), {lag.seconds:.1f} s old, {lag.steps} "
                    f"steps and {lag.files} files behind",
                    flush=True,
                )
            if options.until is not None and position.step >= options.until:
                return


def _write(replica: Replica, options: argparse.Namespace) -> None:
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
    stopped = threading.Event()
    numbers = (signal.SIGINT, signal.SIGTERM) if threading.current_thread() is threading.main_thread() else ()
    with ExitStack() as stack:
        for number in numbers:
            stack.callback(signal.signal, number, signal.signal(number, lambda *_: stopped.set()))
        yield stopped


def _address(text: str) -> tuple[str, int]:
    host, _, port = text.rpartition(":")
    if not port.isdigit() or int(port) > 65535:
        raise argparse.ArgumentTypeError(f"must be PORT or HOST:PORT with a port from 0 to 65535, got {text!r}")
    return host or "127.0.0.1", int(port)


def _seconds(text: str) -> float:
    try:
        value = float(text)
    except ValueError:
        value = 0.0
    if not 0 < value < float("inf"):
        raise argparse.ArgumentTypeError(f"must be a number of seconds above 0, got {text!r}")
    return value


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlap-replica",
        description="Follow the deltas of a training: apply whole cuts, print the step, and write the tables into a "
        "file or answer lookups over HTTP. Stop it with Ctrl-C or SIGTERM.",
    )
    parser.add_argument("sink", help="a folder, an fsspec URL, or redis://host:port/0?key=name")
    parser.add_argument("--save", type=Path, metavar="FILE", help="write the tables by name at the end (torch.save)")
    parser.add_argument(
        "--state", type=Path, metavar="FILE", help="start from this file if it exists, and write it at the end"
    )
    parser.add_argument(
        "--serve", type=_address, metavar="[HOST:]PORT", help="answer GET /step and POST /lookup (port 0: a free port)"
    )
    parser.add_argument("--once", action="store_true", help="apply the current cuts, then end")
    parser.add_argument("--until", type=int, metavar="STEP", help="end after applying this step")
    parser.add_argument(
        "--every", type=_seconds, default=0.5, metavar="SECONDS", help="time between listings (default: %(default)s)"
    )
    return parser


if __name__ == "__main__":
    sys.exit(main())
