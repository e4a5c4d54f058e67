"""Ways to break the package, each with a test that fails then: `python -m tests.laws.mutants`, or `make mutants`.

Each break is made in a copy of the repository. A line tells what came of it, a table at the end what was not noticed.
docs/laws.md shows the same list; `--table` prints it.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
import tempfile
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor, as_completed
from pathlib import Path
from typing import NamedTuple

ROOT = Path(__file__).resolve().parents[2]
PACKAGE = "lightning_overlap"
TIMEOUT_S = 300
FAILED, PASSED = 1, 0  # exit codes of pytest


class Mutant(NamedTuple):
    law: int
    what: str
    tests: tuple[str, ...]  # from `tests/`; each of them fails
    file: str = ""  # that is changed, from the package's root; empty where the test breaks the package by itself
    text: str = ""  # stands there once
    instead: str = ""


DELAYED = "test_equals_the_plain_loop_with_updates_delayed_by_as_much"
MUTANTS = (
    Mutant(
        1,
        "an update takes the learning rate that held at the lookup",
        ("sparse/test_update_rates.py::test_the_update_of_a_batch_takes_the_rate_of_its_step[table_wise-semi_sync-2]",),
        "sparse/update_rates.py",
        "if set_rates is None or not torch.is_grad_enabled():",
        "if True:",
    ),
    Mutant(
        1,
        "a call under `no_grad` gets its embeddings with their graph",
        ("sparse/test_callers.py::test_trains_as_the_plain_loop_does[no_grad]",),
        "sparse/answers.py",
        "if torch.is_grad_enabled() or not self._options.trains:\n            return Early",
        "if True:\n            return Early",
    ),
    Mutant(
        1,
        "after the update of one part of the tables the other part is looked up",
        ("plugin/test_split_backward.py::test_between_hosts_a_part_is_looked_up_before_the_next_part_is_updated",),
        "sparse/lookup.py",
        "if (name, part) == only]",
        "if (name, part) != only]",
    ),
    Mutant(
        1,
        "a layer that is called twice loses the weight gradients of one call",
        ("dense/test_split_layers.py::test_both_halves_are_the_whole_backward[called_twice]",),
        "dense/split_layers.py",
        "for of_layer in self._pending.values() for call in of_layer]",
        "for of_layer in self._pending.values() for call in of_layer[:1]]",
    ),
    Mutant(
        1,
        "a layer is split though its weight is used elsewhere",
        ("plugin/test_split_backward.py::test_a_fit_equals_base[tied]",),
        "dense/graph.py",
        "any(not users[node] <= own for node in own - outputs)",
        "False",
    ),
    Mutant(
        1,
        "a deferred update is applied twice",
        ("laws/test_laws.py::test_a_mode_equals_the_plain_loop[embedding_collection-semi_sync_deferred-2]",),
        "sparse/deferred_update.py",
        "            _go_on([*received, *self._sent.to_apply], retain_graph=retain_graph)\n",
        "            _go_on([*received, *self._sent.to_apply], retain_graph=True)\n"
        "            _go_on([*received, *self._sent.to_apply], retain_graph=retain_graph)\n",
    ),
    Mutant(
        1,
        "in a frozen window the updates are made in another order",
        ("laws/test_frozen_window.py::test_equals_the_plain_loop[1rank-rowwise_adagrad-4]",),
        "runtime/deferred_updates.py",
        "in [inflight for inflight in self.to_update.values() if inflight.index <= index]:",
        "in [inflight for inflight in self.to_update.values() if inflight.index <= index][::-1]:",
    ),
    Mutant(
        1,
        "in a frozen window an evaluation finds updates made whose optimizer step is to come",
        ("laws/test_frozen_window.py::test_between_two_steps_tables_are_those_of_the_last_step[1rank]",),
        "runtime/deferred_updates.py",
        "return [inflight for inflight in self.to_update.values() if not inflight.is_held]",
        "return [*self.to_update.values()]",
    ),
    Mutant(
        1,
        "a module's own forward in a frozen window updates in its backward",
        ("laws/test_frozen_window.py::test_modules_that_run_their_own_forward[1rank-all_kinds]",),
        "sparse/answers.py",
        "if self._options.holds_updates:",
        "if False:",
    ),
    Mutant(
        1,
        "the youngest stashed gradients are applied first",
        ("sparse/test_delayed_gradients.py::test_equals_a_plain_loop_that_steps_as_late[1rank-3-table_wise]",),
        "sparse/delayed_gradients.py",
        "waiting.popleft()",
        "waiting.pop()",
    ),
    Mutant(
        1,
        "a lookup without an update is counted by the fused optimizers",
        ("sparse/test_training.py::test_fused_optimizers_count_updates_and_nothing_else",),
        "sparse/update_rates.py",
        "    if any(num_lookups):\n",
        "    if False:\n",
    ),
    Mutant(
        1,
        "lengths and ids that travelled in one all-to-all are put together in another order of ranks",
        ("distributed/test_packed_alltoall.py::test_what_is_packed_arrives_as_if_sent_apart",),
        "distributed/packed_alltoall.py",
        "pieces[number :: len(self._parts)]",
        "pieces[number :: len(self._parts)][::-1]",
    ),
    Mutant(
        1,
        "batches of a loader that fills its memory anew are used as they are",
        ("laws/test_refills.py::test_every_mode_equals_the_plain_loop[ring2-fused_sparse_dist-2]",),
        "runtime/batch_memory.py",
        "        if self._is_trusted:\n            return batch\n        if len",
        "        if True:\n            return batch\n        if len",
    ),
    Mutant(
        2,
        "an exact mode looks up above its backward",
        ("schedules/test_modes.py",),
        "schedules/modes.py",
        '"fused_sparse_dist", (*_FUSED, Step(_LOOKUP, 1, _SIDE), Step(_STEP',
        '"fused_sparse_dist", (*_FUSED[:-1], Step(_LOOKUP, 1, _SIDE), _FUSED[-1], Step(_STEP',
    ),
    Mutant(
        2,
        "`async_lookup` looks up one batch fewer ahead than it says",
        (f"sparse/test_async_lookup.py::{DELAYED}[rowwise_adagrad-2-False-1]",),
        "schedules/modes.py",
        '(f"async_lookup_{staleness}", staleness)',
        '(f"async_lookup_{staleness}", max(1, staleness - 1))',
    ),
    Mutant(
        3,
        "what comes after the step does not wait for the update of the tables",
        ("testing/test_checked_streams.py::test_the_users_code_finds_the_tables_written",),
        "runtime/executor.py",
        "            self._order.compute_waits_for_update()\n            self._run_deferred_lookup()",
        "            self._run_deferred_lookup()",
    ),
    Mutant(
        3,
        "a lookup does not wait for what a module's own forward has left to be written",
        ("testing/test_checked_streams.py::test_the_users_code_finds_the_tables_written",),
        "runtime/stage_issue.py",
        "        self._order.wait_for_writes(step.stream)\n",
        "",
    ),
    Mutant(
        3,
        "tables of the dense optimizer are looked up early without a wait for its step",
        ("testing/test_checked_streams.py::test_no_race_in_any_mode",),
        "runtime/stage_issue.py",
        "        if WeightOwner.DENSE_OPTIMIZER in owners:\n",
        "        if False:\n",
    ),
    Mutant(
        3,
        "any one wait or hand-over of the executor is left out",
        ("testing/test_checked_streams.py::test_a_wait_or_hand_over_that_is_left_out_is_a_race",),
    ),
    Mutant(
        4,
        "embeddings looked up early are served though the ids were changed in place since",
        ("sparse/test_callers.py::test_trains_as_the_plain_loop_does[hashes_in_place]",),
        "sparse/answers.py",
        "if not state.sent.is_unchanged(state.kjt):",
        "if False:",
    ),
    Mutant(
        5,
        "a rank makes a collective alone",
        ("testing/test_check_module.py::test_ranks_that_send_in_another_order",),
    ),
    Mutant(
        6,
        "all-to-alls that were started for batches to come are not completed where training stops early",
        ("runtime/test_end_of_data.py::test_stopping_early_completes_every_collective",),
        "runtime/executor.py",
        "        for inflight in ahead:\n"
        "            self._inputs.drain(inflight)\n"
        "            self._lookups.drop_lookups(inflight)\n",
        "",
    ),
    Mutant(
        6,
        "the early lookups of a fit that failed stand in for the modules' own forwards from then on",
        ("laws/test_faults.py::test_a_fault_of_the_user_on_all_ranks",),
        "plugin/strategy.py",
        "        run.undo.callback(run.sparse.detach)\n",
        "",
    ),
    Mutant(
        7,
        "a checkpoint counts batches that are only looked ahead at",
        ("checkpoint/test_resume.py::test_every_exact_mode[fused_sparse_dist-own-sized]",),
        "plugin/loops/fit_loop.py",
        'state_dict["combined_loader"] = fetcher.trained_states or None',
        "pass",
    ),
    Mutant(
        8,
        "ranks end a batch after the one that the first of them lacks",
        ("runtime/test_end_of_data.py::test_all_ranks_end_where_the_first_of_them_does",),
        "runtime/end_of_data.py",
        "self.num_batches = index if said.lacks else index + 1",
        "self.num_batches = index + 1",
    ),
    Mutant(
        9,
        "the host reads the sizes of an input dist once more",
        ("profiling/test_host_syncs.py::test_one_read_of_sizes_a_step[table_wise-fused_sparse_dist]",),
        "sparse/input_sizes.py",
        "        size, rank = self._group.size(), self._group.rank()\n",
        "        size, rank = self._group.size(), self._group.rank()\n        received.tolist()\n",
    ),
    Mutant(
        10,
        "columns stay in the order of the sharding plan",
        ("laws/test_unsharded.py::test_columns_stand_in_the_order_of_the_configs_in_every_mode",),
        "tables/names.py",
        "return columns if columns.keys() == names else",
        "return columns if True else",
    ),
    Mutant(
        10,
        "features are taken from where they stood in the first batch",
        ("tables/test_feature_names.py::test_trained_as_with_every_feature_in_its_place",),
        "tables/sharding.py",
        "    find_features_by_name(model)\n",
        "",
    ),
    Mutant(
        11,
        "nobody notices that a callback has written tables between two steps",
        ("sparse/test_callers.py::test_the_next_lookup_sees_tables_written_at_the_end_of_a_batch",),
        "sparse/module_context.py",
        "return any(num_writes(self.module, owner) != before for owner, before in self.num_writes.items())",
        "return False",
    ),
    Mutant(
        11,
        "a backward between two steps is no write of the tables",
        ("sparse/test_callers.py::test_the_next_lookup_sees_tables_written_at_the_end_of_a_batch",),
        "tables/write_counts.py",
        "_num_backwards[module] = _num_backwards.get(module, 0) + 1",
        "_num_backwards[module] = 0",
    ),
    Mutant(
        11,
        "an early lookup keeps the learning rate that somebody has changed by hand since",
        ("sparse/test_callers.py::test_a_rate_that_is_set_by_hand_is_that_of_its_batch",),
        "sparse/module_context.py",
        "if self.rates is not None and rates_of(self.module) != self.rates:",
        "if False:",
    ),
    Mutant(
        11,
        "a rank that sees written tables leaves its early lookup aside without the others",
        ("sparse/test_callers.py::test_writes_that_begin_late_are_refused_before_anything_is_wrong",),
        "runtime/table_writes.py",
        "everyone = self._asks and self._any_rank(written)",
        "everyone = written",
    ),
    Mutant(
        12,
        "an old checkpoint is removed before the new one has its name",
        ("checkpoint/test_crashes.py::test_a_file_system_that_cannot_swap_names[sharded-last]",),
        "checkpoint/atomic.py",
        "        path.rename(being_replaced(path))\n",
        "        discard(path)\n",
    ),
    Mutant(
        12,
        "objects beside the tensors of a checkpoint are unpickled untrusted",
        ("checkpoint/test_untrusted.py::test_nothing_is_executed[extra_state]",),
        "checkpoint/safe_metadata.py",
        "weights_only=self._weights_only)",
        "weights_only=False)",
    ),
    Mutant(
        12,
        "the list of a checkpoint's tensors may name anything",
        ("checkpoint/test_untrusted.py::test_nothing_is_executed[list]",),
        "checkpoint/safe_metadata.py",
        '            raise pickle.UnpicklingError(f"it names {module}.{name}")\n',
        "            return super().find_class(module, name)\n",
    ),
    Mutant(
        13,
        "a replica applies a cut that does not follow what it has",
        ("deltas/test_chain.py::test_a_replica_first_comes_to_what_a_new_generation_follows",),
        "deltas/parts/chain.py",
        "if head.after is None or head.after == at or (head.after < at and not is_own):",
        "if True:",
    ),
    Mutant(
        13,
        "rows to send are marked when they are looked up",
        ("deltas/test_deltas.py::test_rows_marked_at_their_lookup_are_missed",),
    ),
    Mutant(
        13,
        "rows to send are gathered before their update",
        ("deltas/test_delta_streams.py::test_rows_are_not_gathered_before_their_update",),
    ),
)


def table() -> str:
    lines = ["| law | broken on purpose | caught by |", "| --- | --- | --- |"]
    for mutant in MUTANTS:
        tests = ", ".join(f"`{test.rpartition('/')[2]}`" for test in mutant.tests)
        lines.append(f"| {mutant.law} | {mutant.what} | {tests} |")
    return "\n".join(lines)


def _copied(folder: Path) -> None:
    names = ("lightning_overlap", "tests", "conf", "examples", "benchmarks", "docs", "requirements")
    for name in names:
        shutil.copytree(ROOT / name, folder / name, ignore=shutil.ignore_patterns("__pycache__"))
    for file in ROOT.iterdir():
        if file.is_file():
            shutil.copy2(file, folder)


def outcome(mutant: Mutant, tests: Sequence[str]) -> str:
    """Break a copy of the package and run tests there; return "caught" where they fail, else what has come of it."""
    with tempfile.TemporaryDirectory() as temporary:
        folder = Path(temporary)
        _copied(folder)
        if mutant.file:
            path = folder / PACKAGE / mutant.file
            path.write_text(path.read_text(encoding="utf-8").replace(mutant.text, mutant.instead), encoding="utf-8")
        command = [sys.executable, "-m", "pytest", "-q", "-x", "-p", "no:cacheprovider"]
        try:
            done = subprocess.run(
                [*command, *(f"tests/{test}" for test in tests)],
                cwd=folder,
                env=os.environ | {"PYTHONPATH": str(folder), "OMP_NUM_THREADS": "1"},
                capture_output=True,
                text=True,
                timeout=TIMEOUT_S,
            )
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
    parser.add_argument("--table", action="store_true", help="print the table of docs/laws.md, and run nothing")
    args = parser.parse_args(arguments)
    if args.table:
        print(table())
        return 0
    jobs = [(mutant, test) for mutant in MUTANTS if args.only in mutant.what for test in mutant.tests]
    missed = []
    with ThreadPoolExecutor(os.cpu_count()) as pool:
        found = {pool.submit(outcome, mutant, [test]): (mutant, test) for mutant, test in jobs}
        for number, future in enumerate(as_completed(found), 1):
            mutant, test = found[future]
            said = future.result()
            print(f"[{number}/{len(jobs)}] law {mutant.law}: {mutant.what}: {said} ({test})", flush=True)
            if said != "caught":
                missed.append((mutant, test, said))
    for mutant, test, said in missed:
        print(f"law {mutant.law}: {mutant.what}: {said}\n    tests/{test}")
    print(f"{len(jobs) - len(missed)} of {len(jobs)} caught")
    return bool(missed)


if __name__ == "__main__":
    sys.exit(main())
