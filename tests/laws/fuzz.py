"""Random fits without end: `python -m tests.laws.fuzz --num 200`, `--seed 17` to replay one that fails."""

import argparse
import dataclasses
import os
import sys
import time
from collections.abc import Iterator

from ..support.ranks import RankError, Ranks
from .random_fits import Fit, of_seed
from .random_loops import NOT_DRAWN, differences

TIMEOUT_S = 60


class Runner:
    def __init__(self) -> None:
        self._pools: dict[tuple[int, int], Ranks] = {}

    def run(self, fit: Fit) -> str:
        """Return what is wrong with a fit, or '', or why it is not one to draw."""
        place = fit.num_ranks, fit.num_hosts
        ranks = self._pools.get(place)
        if ranks is None or not ranks.alive:
            ranks = self._pools[place] = Ranks(fit.num_ranks, num_nodes=fit.num_hosts)
            ranks.run(os.getpid, timeout_s=180)  # a start may take longer than a fit
        try:
            found = ranks.run(differences, fit, timeout_s=TIMEOUT_S)
        except RankError as err:
            return "\n".join(str(err).splitlines()[-12:])
        return next((f"rank {rank}: {', '.join(each)}" for rank, each in enumerate(found) if each), "")

    def close(self) -> None:
        for ranks in self._pools.values():
            ranks.close()


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


def simplest(runner: Runner, fit: Fit, problem: str, most: int = 25) -> tuple[Fit, str]:
    """Leave out what is not needed to fail likewise."""
    kind, others = _kind(problem), simpler(fit)
    for _ in range(most):
        other = next(others, None)
        if other is None:
            break
        found = runner.run(other)
        if found and NOT_DRAWN not in found and _kind(found) == kind:
            fit, problem, others = other, found, simpler(other)
    return fit, problem


def _kind(problem: str) -> str:
    """Return what sort of failure it is: other numbers, no answer, or the type of an error."""
    if problem.startswith("rank ") and "Error" not in problem and "no answer" not in problem:
        return "differs"
    return next((line.split(":")[0] for line in reversed(problem.splitlines()) if "Error: " in line), "no answer")


def main() -> int:
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--num", type=int, default=200)
    parser.add_argument("--first", type=int, default=0, help="the first seed")
    parser.add_argument("--seed", type=int, help="this one alone")
    parser.add_argument("--without", default="", help="choices that are not drawn: either,checkpoint,no_grad,...")
    args = parser.parse_args()
    seeds = range(args.first, args.first + args.num) if args.seed is None else [args.seed]
    runner, failed, without = Runner(), [], tuple(filter(None, args.without.split(",")))
    try:
        for number, seed in enumerate(seeds, 1):
            fit, start = of_seed(seed, without), time.monotonic()
            problem = runner.run(fit)
            outcome = "ok" if not problem else "not drawn" if NOT_DRAWN in problem else "FAILED"
            took = time.monotonic() - start
            print(f"[{number}/{len(seeds)}] seed {seed}: {outcome} ({fit.pipeline}, {took:.1f} s)", flush=True)
            if outcome == "FAILED":
                failed.append(seed)
                fit, problem = simplest(runner, fit, problem)
                print(f"{problem}\nsimplest that fails: {fit}\nagain: make fuzz SEED={seed}", flush=True)
    finally:
        runner.close()
    print(f"{len(failed)} of {len(seeds)} failed: seeds {failed}")
    return bool(failed)


if __name__ == "__main__":
    sys.exit(main())
