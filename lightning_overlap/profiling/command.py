"""`overlap-timeline`: draw traces and print how much of them was hidden."""

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
    """Run `overlap-timeline`; return the exit code: 0, or `BAD_INPUT` with a message on stderr."""
    parser = argparse.ArgumentParser(
        prog="overlap-timeline",
        description="Draw traces as a PNG. Print how much communication and lookup time was hidden, and what blocked "
        "the host.",
    )
    parser.add_argument(
        "files", nargs="+", type=Path, metavar="FILE", help="a trace (.json, .json.gz) of torch.profiler; one per rank"
    )
    parser.add_argument("--out", type=Path, help="folder or .png file to write (default: next to FILE)")
    parser.add_argument("--steps", type=_at_least_one, default=NUM_STEPS, help="steps to draw (default: %(default)s)")
    parser.add_argument("--title", help="title of the picture (default: the names of the files)")
    options = parser.parse_args(arguments)
    try:
        ranks = read_all(options.files)
        first, out = options.files[0], options.out
        stem = first.name.removesuffix(".gz").removesuffix(".json") or first.name
        png = out if out is not None and out.suffix == ".png" else (out or first.parent) / f"{stem}.png"
        png.parent.mkdir(parents=True, exist_ok=True)
        title = options.title or ", ".join(path.name for path in options.files)
        write_png(png, ranks, num_steps=options.steps, title=title)
    except (TraceError, ImportError) as err:
        print(f"overlap-timeline: {err}", file=sys.stderr)
        return BAD_INPUT
    except OSError as err:
        advice = "Choose a writable folder with --out."
        print(f"overlap-timeline: cannot write {err.filename}: {err.strerror}. {advice}", file=sys.stderr)
        return BAD_INPUT
    report = as_report({rank: summarize(spans) for rank, spans in ranks.items()})
    try:
        print(f"{report}\n\n{png}", flush=True)
    except BrokenPipeError:  # as in `| head`; prevents another error when Python flushes at exit
        os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())
    return 0


def read_all(paths: Sequence[Path]) -> dict[int | str, list[Span]]:
    """Read traces; return the spans by rank, or by file and rank if two files have the same rank."""
    read = [(rank, path, spans) for path in paths for rank, spans in read_trace(path).items()]
    times = Counter(rank for rank, _, _ in read)
    if len(times) == len(read):
        read.sort(key=itemgetter(0))
    return {rank if times[rank] == 1 else f"{path} rank {rank}": spans for rank, path, spans in read}


def _at_least_one(text: str) -> int:
    if not text.isdigit() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"the number of steps must be 1 or more, got {text!r}")
    return int(text)


if __name__ == "__main__":
    sys.exit(main())
