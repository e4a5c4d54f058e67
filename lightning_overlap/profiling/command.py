"""`overlap-timeline`: draw and tabulate traces, and say how much of them was hidden."""

from __future__ import annotations

import argparse
import os
import sys
from collections import Counter
from collections.abc import Sequence
from operator import itemgetter
from pathlib import Path

from .draw_png import write_png
from .layout import NUM_STEPS
from .report import as_report, summarize
from .spans import Span
from .torch_trace import read_trace
from .trace_file import TraceError

BAD_INPUT = 2  # exit code for a file that cannot be read or written


def main(arguments: Sequence[str] | None = None) -> int:
    """Run the command; this is the entry point `overlap-timeline`.

    Args:
        arguments: The arguments of the command line; None for those of this process.

    Returns:
        The exit code: 0, or 2 with one message on stderr.
    """
    options = _parser().parse_args(arguments)
    try:
        ranks = read_all(options.files)
        png = _target(options.files[0], options.out)
        title = options.title or ", ".join(path.name for path in options.files)
        write_png(png, ranks, num_steps=options.steps, title=title)
    except (TraceError, ImportError) as err:
        print(f"overlap-timeline: {err}", file=sys.stderr)
        return BAD_INPUT
    except OSError as err:
        advice = "Give a folder that you may write to with --out."
        print(f"overlap-timeline: cannot write {err.filename}: {err.strerror}. {advice}", file=sys.stderr)
        return BAD_INPUT
    report = as_report({rank: summarize(spans) for rank, spans in ranks.items()})
    try:
        print(f"{report}\n\n{png}", flush=True)
    except BrokenPipeError:  # of `| head`; without this Python complains once more when it flushes at its end
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def read_all(paths: Sequence[Path]) -> dict[int | str, list[Span]]:
    """Read traces; return the spans by rank, and under the file's name too where two files have the same rank."""
    read = [(rank, path, spans) for path in paths for rank, spans in read_trace(path).items()]
    times = Counter(rank for rank, _, _ in read)
    if len(times) == len(read):
        read.sort(key=itemgetter(0))
    return {rank if times[rank] == 1 else f"{path} rank {rank}": spans for rank, path, spans in read}


def _target(first: Path, out: Path | None) -> Path:
    """Return the path of the picture: next to the first trace, or as `--out` says."""
    stem = first.name.removesuffix(".gz").removesuffix(".json") or first.name
    if out is None:
        return first.with_name(f"{stem}.png")
    if out.suffix == ".png":
        out.parent.mkdir(parents=True, exist_ok=True)
        return out
    out.mkdir(parents=True, exist_ok=True)
    return out / f"{stem}.png"


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"a number of steps has to be 1 or more, got {text!r}")
    return int(text)


def _parser() -> argparse.ArgumentParser:
    parser = argparse.ArgumentParser(
        prog="overlap-timeline",
        description="Draw traces as a PNG, and print how much of communication and lookup was hidden, and what the "
        "host waited for.",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a torch.profiler trace (.json, .json.gz); one per rank"
    )
    parser.add_argument("--out", type=Path, help="a folder, or a name ending in .png (default: next to FILE)")
    parser.add_argument("--steps", type=_at_least_one, default=NUM_STEPS, help="steps to draw (default: %(default)s)")
    parser.add_argument("--title", help="over the picture (default: the names of the files)")
    return parser


if __name__ == "__main__":
    sys.exit(main())
