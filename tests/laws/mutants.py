"""Break a copy of the package in the ways of docs/laws.md: the test of each has to fail. `make mutants`."""

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import Any, NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_overlap"
TIMEOUT_S = 300
FAILED, PASSED = 1, 0  # exit codes of pytest


class Break(NamedTuple):
    file: str = ""  # that is changed, from the package's root; empty where the test breaks the package by itself
    text: str = ""  # stands there once
    instead: str = ""


BREAKS = {
    "a preemption signal saves where it finds a rank": Break(
        "plugin/loops/preemption.py",
        "if isinstance(environment, SLURMEnvironment) and environment.auto_requeue:",
        "if False:",
    ),
    "a preempted job is requeued at every step from then on": Break(
        "plugin/loops/preemption.py", "self._is_over = self.saving = True", "self.saving = True"
    ),
    "SIGTERM ends a preempted fit before its checkpoint is saved": Break(
        "plugin/loops/sigterm.py", "    preemption.finish(trainer)", "    pass"
    ),
    "an update takes the learning rate that held at the lookup": Break(
        "sparse/update_rates.py", "if set_rates is None or not torch.is_grad_enabled():", "if True:"
    ),
    "a call under `no_grad` gets its embeddings with their graph": Break(
        "sparse/module_flight.py", "if torch.is_grad_enabled() or not self.pipeline.options.trains:", "if True:"
    ),
    "after the update of one part of the tables the other part is looked up": Break(
        "sparse/module_flight.py", "if only in (None, part)]", "if only != part]"
    ),
    "a layer that is called twice loses the weight gradients of one call": Break(
        "dense/split_layers.py", "for call in of_layer]", "for call in of_layer[:1]]"
    ),
    "a layer is split though its weight is used elsewhere": Break(
        "dense/graph.py", "any(not users[node] <= own for node in own - outputs)", "False"
    ),
    "a deferred update is applied twice": Break(
        "sparse/deferred_update.py",
        "            _go_on([*received, *self._sent.to_apply], retain_graph=retain_graph)\n",
        "            _go_on([*received, *self._sent.to_apply], retain_graph=True)\n"
        "            _go_on([*received, *self._sent.to_apply], retain_graph=retain_graph)\n",
    ),
    "a lookup without an update is counted by the fused optimizers": Break(
        "sparse/update_rates.py", "    if any(num_lookups):\n", "    if False:\n"
    ),
    "lengths and ids that travelled in one all-to-all are put together in another order of ranks": Break(
        "distributed/packed_alltoall.py",
        "for numbers in entry.places]",
        "for numbers in entry.places[::-1]]",
    ),
    "batches of a loader that fills its memory anew are used as they are": Break(
        "runtime/batch_memory.py", "if self._allocates:", "if True:"
    ),
    "an exact mode looks up above its backward": Break(
        "schedules/modes.py", ", Step(_LOOKUP, 1, _SIDE),", "[:-1], Step(_LOOKUP, 1, _SIDE), _FUSED[-1],"
    ),
    "`async_lookup` looks up one batch fewer ahead than it says": Break(
        "schedules/modes.py", '{staleness}", staleness)', '{staleness}", max(1, staleness - 1))'
    ),
    "what comes after the step does not wait for the update of the tables": Break(
        "runtime/walker.py",
        "            self.updates.order_compute()\n            self._look_up_dense_tables()",
        "            self._look_up_dense_tables()",
    ),
    "a module's own forward, and so its update of the tables, does not run on the lookup stream": Break(
        "sparse/module_forward.py",
        "            with streams.on_lookup(), timed, own_mode:\n",
        "            with timed, own_mode:\n",
    ),
    "tables of the dense optimizer are looked up early without a wait for its step": Break(
        "runtime/walker.py", "        if WeightOwner.DENSE_OPTIMIZER in owners:\n", "        if False:\n"
    ),
    "embeddings looked up early are served though the ids were changed in place since": Break(
        "sparse/module_forward.py", "if not found.sent.is_unchanged(found.kjt):", "if False:"
    ),
    "all-to-alls that were started for batches to come are not completed where training stops early": Break(
        "runtime/walker.py",
        "        for flight in ahead:\n            flight.drain()\n            flight.drop()\n",
        "",
    ),
    "the early lookups of a fit that failed stand in for the modules' own forwards from then on": Break(
        "plugin/strategy.py", "        run.undo.callback(run.sparse.detach)\n", ""
    ),
    "a checkpoint counts batches that are only looked ahead at": Break(
        "plugin/loops/fit_loop.py", 'state_dict["combined_loader"] = fetcher.trained_states or None', "pass"
    ),
    "ranks end a batch after the one that the first of them lacks": Break(
        "runtime/batches.py", "index if result.lacks else index + 1", "index + 1"
    ),
    "the host reads the sizes of an input dist once more": Break(
        "sparse/input_sizes.py", "self._group.rank()\n", "self._group.rank()\n        received.tolist()\n"
    ),
    "columns stay in the order of the sharding plan": Break(
        "tables/names.py", "return columns if columns.keys() == names else", "return columns if True else"
    ),
    "tables that no gradient reaches are trained, as far as the log says": Break(
        "plugin/step_hooks.py", "            self._run.sparse.gradients.end_backward()\n", "            pass\n"
    ),
    "ranks whose learning rates differ train on": Break(
        "plugin/learning_rates.py", "crc32(repr(rates).encode()) >> 1", "1"
    ),
    "sharding draws from the generators of the ranks": Break(
        "plugin/strategy.py", "with isolate_rng(include_cuda=not on_cpu):", "if True:"
    ),
    "a mean over rows of all ranks divides columns of other tables as well": Break(
        "tables/names.py", "numbers.get(name, 0)", "numbers.get(name, 1)"
    ),
    "features are taken from where they stood in the first batch": Break(
        "tables/sharding.py", "    find_features_by_name(model)\n", ""
    ),
    "nobody notices that a callback has written tables between two steps": Break(
        "sparse/module_flight.py", "any(num_writes(self.module, owner) != before for", "any(False for"
    ),
    "a backward between two steps is no write of the tables": Break(
        "tables/write_counts.py", "_num_backwards(module)[0] += 1", "pass"
    ),
    "an early lookup keeps the learning rate that somebody has changed by hand since": Break(
        "sparse/module_flight.py", "if self.rates is not None and rates_of(self.module) != self.rates:", "if False:"
    ),
    "a rank that sees written tables leaves its early lookup aside without the others": Break(
        "runtime/table_writes.py", "everyone = self._polls and self._any_rank(written)", "everyone = written"
    ),
    "an old checkpoint is removed before the new one has its name": Break(
        "checkpoint/atomic.py", "        path.rename(being_replaced(path))\n", "        discard(path)\n"
    ),
    "objects beside the tensors of a checkpoint are unpickled untrusted": Break(
        "checkpoint/safe_metadata.py", "weights_only=self._weights_only)", "weights_only=False)"
    ),
    "the list of a checkpoint's tensors may name anything": Break(
        "checkpoint/safe_metadata.py",
        'raise pickle.UnpicklingError(f"it names {module}.{name}")',
        "return super().find_class(module, name)",
    ),
    "a replica applies a cut that does not follow what it has": Break(
        "deltas/files/chain.py",
        "if head.after is None or head.after == at or (head.after < at and not is_own):",
        "if True:",
    ),
}
"""What is broken, as docs/laws.md says it -> how."""


class Mutant(NamedTuple):
    law: int
    what: str
    tests: tuple[str, ...]  # from `tests/`; each of them fails
    file: str = ""  # this and the rest: a `Break`
    text: str = ""
    instead: str = ""


def _mutants() -> Iterator[Mutant]:
    """Read the rows of docs/laws.md."""
    for line in (ROOT / "docs" / "laws.md").read_text(encoding="utf-8").splitlines():
        cells = [cell.strip() for cell in line.strip("|").split("|")]
        if len(cells) == 3 and cells[2].startswith("`test_"):
            file, colons, test = cells[2].strip("`").partition("::")
            [path] = (ROOT / "tests").rglob(file)
            name = f"{path.relative_to(ROOT / 'tests').as_posix()}{colons}{test}"
            yield Mutant(int(cells[0]), cells[1], (name,), *BREAKS.get(cells[1], ()))


MUTANTS = tuple(_mutants())


def _copied(folder: Path) -> None:
    for name in ("lightning_overlap", "tests", "conf", "examples", "benchmarks", "docs", "requirements"):
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in filter(Path.is_file, ROOT.iterdir()):
        shutil.copy2(file, folder)


def outcome(mutant: Mutant) -> str:
    """Break a copy of the package and run tests there; return "caught" where they fail, else what has come of it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _copied(folder)
        if mutant.file:
            path = folder / PACKAGE / mutant.file
            path.write_text(path.read_text(encoding="utf-8").replace(mutant.text, mutant.instead), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        command += [f"tests/{test}" for test in mutant.tests]
        environment = os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"}
        options: dict[str, Any] = {"capture_output": True, "text": True, "timeout": TIMEOUT_S}
        try:
            done = subprocess.run(command, cwd=folder, env=environment, **options)
        except subprocess.TimeoutExpired:
            return f"NO ANSWER within {TIMEOUT_S} s"
    expected = FAILED if mutant.file else PASSED  # what breaks the package by itself passes where it is noticed
    if done.returncode == expected:
        return "caught"
    last = (done.stdout.strip() or done.stderr.strip()).splitlines()[-1:]
    return "NOT CAUGHT" if done.returncode == PASSED else f"NOT RUN: {last}"


def main(arguments: Sequence[str] | None = None) -> int:
    """Break the package in all of these ways, or those whose text contains a word, and return 0 if all are caught."""
    parser = argparse.ArgumentParser(description=__doc__)
    parser.add_argument("--only", default="", help="a word of those to try")
    args = parser.parse_args(arguments)
    missed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = {pool.submit(outcome, mutant): mutant for mutant in MUTANTS if args.only in mutant.what}
        for number, future in enumerate(as_completed(found), 1):
            mutant, said = found[future], future.result()
            line = f"law {mutant.law}: {mutant.what}: {said} ({', '.join(mutant.tests)})"
            print(f"[{number}/{len(found)}] {line}", flush=True)
            if said != "caught":
                missed.append(line)
    print(*missed, f"{len(found) - len(missed)} of {len(found)} caught", sep="\n")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
