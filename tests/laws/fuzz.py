"""Random fits without end: `python -m tests.laws.fuzz --num 200`, `--seed 17` to replay one that fails."""

import argparse
import dataclasses
import os
import sys
from collections.abc import Callable, Iterator, Sequence
from typing import Generic, Protocol, TypeVar

from tqdm import tqdm

from ..support.ranks import RankError, Ranks
from .random_fits import Fit, of_seed
from .random_loops import NOT_DRAWN, differences

TIMEOUT_S = 60


class Drawn(Protocol):
    """What is drawn from a seed, and run."""

    @property
    def num_ranks(self) -> int: ...
    @property
    def num_hosts(self) -> int: ...


T = TypeVar("T", bound=Drawn)


class Runner(Generic[T]):
    """Runs what is drawn in rank processes that stay up; `function` returns what each rank finds wrong."""

    def __init__(self, function: Callable[[T], list[str]], harmless: str) -> None:
        self._function, self._harmless = function, harmless
        self._pools: dict[tuple[int, int], Ranks] = {}

    def run(self, drawn: T) -> str:
        """Return what is wrong with it, or '', or why it counts as neither: a text with `harmless` in it."""
        place = drawn.num_ranks, drawn.num_hosts
        ranks = self._pools.get(place)
        if ranks is not None and (not ranks.alive or ranks.worn):
            ranks.close()
            ranks = None
        if ranks is None:
            ranks = self._pools[place] = Ranks(drawn.num_ranks, num_nodes=drawn.num_hosts)
            ranks.run(os.getpid, timeout_s=180)  # a start may take longer than a fit
        try:
            found = ranks.run(self._function, drawn, timeout_s=TIMEOUT_S)
        except RankError as err:
            return "\n".join(str(err).splitlines()[-12:])
        return next((f"rank {rank}: {', '.join(each)}" for rank, each in enumerate(found) if each), "")

    def simplest(self, drawn: T, problem: str, simpler: Callable[[T], Iterator[T]], most: int = 25) -> tuple[T, str]:
        """Leave out what is not needed to fail likewise."""
        kind, others = _kind(problem), simpler(drawn)
        for _ in range(most):
            other = next(others, None)
            if other is None:
                break
            found = self.run(other)
            if found and self._harmless not in found and _kind(found) == kind:
                drawn, problem, others = other, found, simpler(other)
        return drawn, problem

    def close(self) -> None:
        for ranks in self._pools.values():
            ranks.close()


def _kind(problem: str) -> str:
    """Return what sort of failure it is: other numbers, no answer, or the type of an error."""
    if problem.startswith("rank ") and "Error" not in problem and "no answer" not in problem:
        return "differs"
    return next((line.split(":")[0] for line in reversed(problem.splitlines()) if "Error: " in line), "no answer")


def simpler(fit: Fit) -> Iterator[Fit]:
    if len(fit.parts) > 1:
        for at in range(len(fit.parts)):
            yield dataclasses.replace(fit, parts=fit.parts[:at] + fit.parts[at + 1 :])
    for each in dataclasses.fields(Fit):
        if each.default is not dataclasses.MISSING and getattr(fit, each.name) != each.default:
            yield dataclasses.replace(fit, **{each.name: each.default})
    for at, part in enumerate(fit.parts):
        less = [dataclasses.replace(part, tables=part.tables[:-1])] if len(part.tables) > 1 else []
        for name, value in (("calls", "once"), ("checkpoint", ""), ("use", "by_name"), ("kjt", "x")):
            less += [dataclasses.replace(part, **{name: value})] if getattr(part, name) != value else []
        for one in less:
            yield dataclasses.replace(fit, parts=(*fit.parts[:at], one, *fit.parts[at + 1 :]))


def search(
    seeds: Sequence[int],
    draw: Callable[[int], T],
    runner: Runner[T],
    simpler: Callable[[T], Iterator[T]],
    command: str,
    harmless: str,
) -> int:
    """Run what each seed draws; print the simplest form of what fails; return 1 if anything failed."""
    failed, num_harmless = [], 0
    progress = tqdm(seeds, unit="case", dynamic_ncols=True)
    try:
        for seed in progress:
            drawn = draw(seed)
            problem = runner.run(drawn)
            num_harmless += harmless in problem
            if problem and harmless not in problem:
                failed.append(seed)
                progress.write(f"seed {seed} FAILED: {drawn}")
                drawn, problem = runner.simplest(drawn, problem, simpler)
                progress.write(f"{problem}\nsimplest that fails: {drawn}\nagain: {command} SEED={seed}")
            progress.set_postfix_str(f"{len(failed)} failed, {num_harmless} {harmless.rstrip(': ')}")
    finally:
        runner.close()
    print(f"{len(failed)} of {len(seeds)} failed: seeds {failed}; {num_harmless} {harmless.rstrip(': ')}")
    return int(bool(failed))


def parse_seeds(description: str | None, *more: tuple[str, str]) -> tuple[Sequence[int], argparse.Namespace]:
    """Return the seeds that the command line names, and its other arguments: `more` are names with their help."""
    parser = argparse.ArgumentParser(description=description)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone")
    for name, text in more:
        parser.add_argument(name, default="", help=text)
    args = parser.parse_args()
    return range(args.first, args.first + args.num) if args.seed is None else [args.seed], args


def main() -> int:
    seeds, args = parse_seeds(__doc__, ("--without", "choices that are not drawn: either,checkpoint,no_grad,..."))
    without = tuple(filter(None, args.without.split(",")))
    return search(
        seeds, lambda seed: of_seed(seed, without), Runner(differences, NOT_DRAWN), simpler, "make fuzz", NOT_DRAWN
    )


if __name__ == "__main__":
    sys.exit(main())
