"""Ways to break the package, each with a test that then has to fail: `make mutants` tries them.

A break replaces functions or methods of the package, in every process of a test run whose environment names it
(`tests/support/__init__.py`). It holds no text of the package: whoever rewrites a function need not touch it.
"""

import contextlib
import pickle
from collections.abc import Callable, Iterator
from concurrent.futures import ThreadPoolExecutor
from dataclasses import replace
from pathlib import Path
from typing import Any, NamedTuple

import pytest
import torch
import torch.distributed as dist

from lightning_overlap.balance import balancer
from lightning_overlap.balance.samples import JaggedField
from lightning_overlap.checkpoint import safe_metadata
from lightning_overlap.checkpoint.incremental import Increment
from lightning_overlap.deltas.files.chain import Chain
from lightning_overlap.deltas.restoring import shard_tables
from lightning_overlap.dense.graph import Uses
from lightning_overlap.dense.split_layers import SplitLayers
from lightning_overlap.plugin import strategy
from lightning_overlap.plugin.learning_rates import LearningRates
from lightning_overlap.plugin.loops import fit_loop, preemption, resume
from lightning_overlap.plugin.loops.batch_stream import BatchStream
from lightning_overlap.plugin.loops.fetcher import LookaheadFetcher
from lightning_overlap.plugin.nonfinite import NonfiniteLosses
from lightning_overlap.row_log import rows
from lightning_overlap.runtime.batch_memory import BatchMemory
from lightning_overlap.runtime.batches import Batches
from lightning_overlap.runtime.deferred_updates import DeferredUpdates
from lightning_overlap.runtime.streams import Streams
from lightning_overlap.runtime.table_writes import TableWrites
from lightning_overlap.runtime.walker import Walker
from lightning_overlap.schedules import modes
from lightning_overlap.schedules.stages import Stage, WeightOwner
from lightning_overlap.sparse import module_flight, module_forward, update_rates
from lightning_overlap.sparse.deferred_update import DeferredUpdate
from lightning_overlap.sparse.input_dist import InputExchange
from lightning_overlap.sparse.input_sizes import InputSizes
from lightning_overlap.sparse.module_flight import ModuleFlight
from lightning_overlap.sparse.module_forward import ModuleForward
from lightning_overlap.sparse.packed_alltoall import PackedExchange
from lightning_overlap.sparse.pipeline import SparsePipeline
from lightning_overlap.sparse.watchers.gradient_watch import GradientWatch
from lightning_overlap.sparse.watchers.loss_guard import LossGuard
from lightning_overlap.storage import MARKER, Manifest, Place, sealed_file
from lightning_overlap.tables import names, parts, sharding
from lightning_overlap.tables.write_counts import SentInput

Apply = Callable[[pytest.MonkeyPatch], None]


class Break(NamedTuple):
    law: int
    what: str
    test: str  # from `tests/`: it fails
    apply: Apply


BREAKS: dict[str, Break] = {}
"""All of them, by what is broken."""


def breaks(law: int, what: str, test: str) -> Callable[[Apply], Apply]:
    """Put a break into `BREAKS`."""

    def add(apply: Apply) -> Apply:
        BREAKS[what] = Break(law, what, test, apply)
        return apply

    return add


def _nothing(*args: Any, **kwargs: Any) -> None:
    """Stand in for a function that is left out."""


# Law 1: exact means exact.


@breaks(
    1,
    "an update takes the learning rate that held at the lookup",
    "sparse/test_update_rates.py::test_the_update_of_a_batch_takes_the_rate_of_its_step[table_wise-semi_sync-2]",
)
def _rate_of_the_lookup(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module_flight, "updates_at_present_rate", lambda *args, **kwargs: contextlib.nullcontext())


@breaks(
    1,
    "a call under `no_grad` gets its embeddings with their graph",
    "sparse/test_callers.py::test_trains_as_the_plain_loop_does[no_grad]",
)
def _graph_under_no_grad(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(ModuleFlight, "serve", torch.enable_grad()(ModuleFlight.serve))


@breaks(
    1,
    "after the update of one part of the tables the other part is looked up",
    "plugin/test_split_backward.py::test_between_hosts_a_part_is_looked_up_before_the_next_part_is_updated",
)
def _the_other_part(patch: pytest.MonkeyPatch) -> None:
    look_up = ModuleFlight.look_up

    def look_up_other(self: ModuleFlight, owner: WeightOwner, only: int | None = None, **kwargs: Any) -> None:
        if only is not None:
            others = [part for part in self.parts_to_look_up((owner,)) if part != only]
            only = others[0] if others else only
        look_up(self, owner, only, **kwargs)

    patch.setattr(ModuleFlight, "look_up", look_up_other)


@breaks(
    1,
    "a layer that is called twice loses the weight gradients of one call",
    "dense/test_split_layers.py::test_both_halves_are_the_whole_backward[called_twice]",
)
def _one_call_of_two(patch: pytest.MonkeyPatch) -> None:
    take = SplitLayers.take

    def take_first(self: SplitLayers, call: Any, gradient: torch.Tensor) -> torch.Tensor | None:
        found = take(self, call, gradient)
        del self._pending[call.layer][1:]
        return found

    patch.setattr(SplitLayers, "take", take_first)


@breaks(
    1,
    "a layer is split though its weight is used elsewhere",
    "plugin/test_split_backward.py::test_a_fit_equals_base[tied]",
)
def _all_layers_are_split(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(Uses, "whole", lambda self, layers, loss: {})


@breaks(
    1,
    "a deferred update is applied twice",
    "laws/test_laws.py::test_a_mode_equals_the_plain_loop[embedding_collection-semi_sync_deferred-2]",
)
def _update_twice(patch: pytest.MonkeyPatch) -> None:
    apply = DeferredUpdate._apply_sent

    def apply_twice(self: DeferredUpdate, cuts: list[Any], *, retain_graph: bool) -> None:
        gradients = [cut.leaf.grad for cut in cuts]
        apply(self, cuts, retain_graph=True)
        for cut, gradient in zip(cuts, gradients, strict=True):
            cut.leaf.grad = gradient
        apply(self, cuts, retain_graph=retain_graph)

    patch.setattr(DeferredUpdate, "_apply_sent", apply_twice)


@breaks(
    1,
    "a lookup without an update is counted by the fused optimizers",
    "sparse/test_training.py::test_fused_optimizers_count_updates_and_nothing_else",
)
def _lookups_count(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module_flight, "take_back", _nothing)
    patch.setattr(module_forward, "take_back", _nothing)


@breaks(
    1,
    "lengths and ids that travelled in one all-to-all are put together in another order of ranks",
    "sparse/test_packed_alltoall.py::test_what_is_packed_arrives_as_if_sent_apart",
)
def _another_order_of_ranks(patch: pytest.MonkeyPatch) -> None:
    make = PackedExchange.__init__

    def make_reversed(self: PackedExchange, *args: Any, **kwargs: Any) -> None:
        make(self, *args, **kwargs)
        self._segments = [by_rank[::-1] for by_rank in self._segments]

    patch.setattr(PackedExchange, "__init__", make_reversed)


@breaks(
    1,
    "batches of a loader that fills its memory anew are used as they are",
    "laws/test_refills.py::test_every_mode_equals_the_plain_loop[ring2-fused_sparse_dist-2]",
)
def _batches_are_not_copied(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(BatchMemory, "own", lambda self, batch: batch)


# Law 2: staleness is a number.


@breaks(2, "an exact mode looks up above its backward", "schedules/test_modes.py")
def _exact_mode_is_stale(patch: pytest.MonkeyPatch) -> None:
    schedule = modes.FUSED_SPARSE_DIST
    steps = [step for step in schedule.steps if step.stage is not Stage.EMBEDDING_LOOKUP]
    steps.insert(schedule.position(Stage.BACKWARD), schedule[Stage.EMBEDDING_LOOKUP])
    for derived in vars(schedule).keys() - {"name", "steps"}:
        patch.delitem(vars(schedule), derived)
    patch.setitem(vars(schedule), "steps", tuple(steps))


@breaks(
    2,
    "`async_lookup` looks up one batch fewer ahead than it says",
    "sparse/test_async_lookup.py::test_equals_the_plain_loop_with_updates_delayed_by_as_much[rowwise_adagrad-2-False-1]",
)
def _one_batch_fewer(patch: pytest.MonkeyPatch) -> None:
    make = modes._looks_up_before_backward
    patch.setattr(modes, "_looks_up_before_backward", lambda name, staleness: make(name, max(1, staleness - 1)))


@breaks(
    2,
    "a module's own forward, and so its update of the tables, does not run on the lookup stream",
    "testing/test_checked_streams.py::test_the_users_code_is_ordered_with_lookups_and_updates",
)
def _own_forward_on_the_callers_stream(patch: pytest.MonkeyPatch) -> None:
    run = ModuleForward._on_lookup_stream

    def run_on_callers(self: ModuleForward, *args: Any) -> Any:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Streams, "on_lookup", lambda self: contextlib.nullcontext())
            return run(self, *args)

    patch.setattr(ModuleForward, "_on_lookup_stream", run_on_callers)


# Law 3: a lookup waits for the last writer of what it reads.


@breaks(
    3,
    "what comes after the step does not wait for the update of the tables",
    "testing/test_checked_streams.py::test_the_users_code_is_ordered_with_lookups_and_updates",
)
def _step_without_updates(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(DeferredUpdates, "order_compute", _nothing)


@breaks(
    3,
    "tables of the dense optimizer are looked up early without a wait for its step",
    "testing/test_checked_streams.py::test_no_race_in_any_mode",
)
def _no_wait_for_the_step(patch: pytest.MonkeyPatch) -> None:
    order = Walker._order_lookup

    def order_without(self: Walker, row: Any, flight: Any, owners: frozenset[WeightOwner]) -> None:
        order(self, row, flight, owners - {WeightOwner.DENSE_OPTIMIZER})

    patch.setattr(Walker, "_order_lookup", order_without)


# Law 4: the user's arguments are checked.


@breaks(
    4,
    "embeddings looked up early are served though the ids were changed in place since",
    "sparse/test_callers.py::test_trains_as_the_plain_loop_does[hashes_in_place]",
)
def _changed_ids(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SentInput, "is_unchanged", lambda self, kjt: True)


# Law 5: who issues collectives.


@breaks(
    5,
    "the ids of a batch are sent by a thread of their own",
    "laws/test_collectives.py::test_the_thread_that_trains_issues_every_collective[fused_sparse_dist]",
)
def _sent_by_another_thread(patch: pytest.MonkeyPatch) -> None:
    send = InputExchange.send_ids

    def send_elsewhere(self: InputExchange, flight: Any) -> None:
        with ThreadPoolExecutor(1) as thread:
            thread.submit(send, self, flight).result()

    patch.setattr(InputExchange, "send_ids", send_elsewhere)


# Law 6: nothing in flight outlives its owner.


@breaks(
    6,
    "all-to-alls that were started for batches to come are not completed where training stops early",
    "runtime/test_batches.py::test_stopping_early_completes_every_collective",
)
def _not_completed(patch: pytest.MonkeyPatch) -> None:
    drain = Walker.drain

    def drain_nothing(self: Walker) -> None:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Batches, "ahead", lambda self: [])
            drain(self)

    patch.setattr(Walker, "drain", drain_nothing)


@breaks(
    6,
    "the early lookups of a fit that failed stand in for the modules' own forwards from then on",
    "laws/test_faults.py::test_a_fault_of_the_user_on_all_ranks",
)
def _not_detached(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(SparsePipeline, "detach", _nothing)


# Law 7: looked-ahead is not consumed.


@breaks(
    7,
    "a checkpoint counts batches that are only looked ahead at",
    "checkpoint/test_resume.py::test_every_exact_mode[fused_sparse_dist-own-sized]",
)
def _counts_ahead(patch: pytest.MonkeyPatch) -> None:
    patch.delattr(fit_loop._FitLoopMixin, "on_save_checkpoint")  # Lightning's is left


@breaks(
    7,
    "after a second resume a fit continues where Lightning's counters say",
    "checkpoint/test_any_resumes.py::test_any_resumes_equal_none",
)
def _lightnings_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(resume.Resume, "roll_back", _nothing)


@breaks(
    7,
    "a loader without a length goes on in an epoch with the state after the batch that its fetcher holds",
    "checkpoint/test_any_resumes.py::test_any_resumes_equal_none",
)
def _state_after_the_held_batch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LookaheadFetcher, "resume", lambda self, states: None)


# Law 8: uneven ranks end together.


@breaks(
    8,
    "ranks end a batch after the one that the first of them lacks",
    "runtime/test_batches.py::test_all_ranks_end_where_the_first_of_them_does",
)
def _ends_late(patch: pytest.MonkeyPatch) -> None:
    read = Batches._read_result

    def read_late(self: Batches, index: int) -> None:
        before, known = dict(self.in_flight), self.num_batches
        read(self, index)
        if known is None and self.num_batches == index:  # a rank lacks this batch
            self.num_batches = index + 1
            self.in_flight |= {number: flight for number, flight in before.items() if number == index}

    patch.setattr(Batches, "_read_result", read_late)


# Law 9: no hidden host sync.


@breaks(
    9,
    "the host reads the sizes of an input dist once more",
    "profiling/test_host_syncs.py::test_one_read_of_sizes_a_step[table_wise-fused_sparse_dist]",
)
def _reads_once_more(patch: pytest.MonkeyPatch) -> None:
    wait = InputSizes.wait

    def read_more(self: InputSizes) -> Any:
        torch.zeros(1).tolist()
        return wait(self)

    patch.setattr(InputSizes, "wait", read_more)


# Law 10: the strategy does not change what the module computes.


@breaks(
    10,
    "columns stay in the order of the sharding plan",
    "laws/test_unsharded.py::test_columns_stand_in_the_order_of_the_configs_in_every_mode",
)
def _order_of_the_plan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(names.OutputInOrder, "_put_in_order", lambda self, columns: columns)


@breaks(
    10,
    "sharding draws from the generators of the ranks",
    "laws/test_unsharded.py::test_dropout_drops_what_it_drops_under_ddp[2ranks-every_type]",
)
def _sharding_draws(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(strategy, "isolate_rng", lambda **kwargs: contextlib.nullcontext())


@breaks(
    10,
    "a mean over rows of all ranks divides columns of other tables as well",
    "laws/test_random_fits.py::test_what_was_found_before[means_by_rows_beside_other_tables]",
)
def _divides_others(patch: pytest.MonkeyPatch) -> None:
    divide = names.SummedMeans.divide

    def divide_all(self: names.SummedMeans, divisors: torch.Tensor, columns: Any) -> Any:
        divide(self, divisors, columns)  # finds the divisor of each column; 0 is that of columns without one
        assert self._places is not None
        self._places = self._places.clamp(min=1)
        return divide(self, divisors, columns)

    patch.setattr(names.SummedMeans, "divide", divide_all)


@breaks(
    10,
    "features are taken from where they stood in the first batch",
    "tables/test_feature_names.py::test_trained_as_with_every_feature_in_its_place",
)
def _features_by_place(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sharding, "find_features_by_name", _nothing)


# Law 11: nothing is wrong without a word.


@breaks(
    11,
    "tables that no gradient reaches are trained, as far as the log says",
    "sparse/test_gradient_watch.py::test_the_reason_is_told[no_grad-base]",
)
def _no_gradient_watch(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(GradientWatch, "backward_ends", _nothing)


@breaks(
    11,
    "ranks whose learning rates differ train on",
    "plugin/test_learning_rates.py::test_a_metric_that_was_not_reduced_is_named[fused_sparse_dist-table_wise]",
)
def _rates_differ(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LearningRates, "compare", _nothing)


@breaks(
    11,
    "nobody notices that a callback has written tables between two steps",
    "sparse/test_callers.py::test_the_next_lookup_sees_tables_written_at_the_end_of_a_batch",
)
def _writes_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module_flight, "num_writes", lambda module, owner: ())


@breaks(
    11,
    "a backward between two steps is no write of the tables",
    "sparse/test_callers.py::test_the_next_lookup_sees_tables_written_at_the_end_of_a_batch",
)
def _backwards_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module_forward, "count_backwards", _nothing)


@breaks(
    11,
    "an early lookup keeps the learning rate that somebody has changed by hand since",
    "sparse/test_callers.py::test_a_rate_that_is_set_by_hand_is_that_of_its_batch",
)
def _rates_unseen(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(module_flight, "rates_of", lambda module: [])


@breaks(
    11,
    "a rank that sees written tables leaves its early lookup aside without the others",
    "sparse/test_callers.py::test_writes_that_begin_late_are_refused_before_anything_is_wrong",
)
def _alone(patch: pytest.MonkeyPatch) -> None:
    make = TableWrites.__init__

    def make_alone(self: TableWrites, *args: Any, any_rank: Any, **kwargs: Any) -> None:
        make(self, *args, any_rank=None, **kwargs)

    patch.setattr(TableWrites, "__init__", make_alone)


# Law 12: a crash leaves the newest whole checkpoint; loading executes nothing.


@breaks(
    12,
    "an old checkpoint is removed before the new one has its marker",
    "checkpoint/test_crashes.py::test_a_crash_at_any_instant[sharded-last]",
)
def _removed_before(patch: pytest.MonkeyPatch) -> None:
    commit = Place.commit

    def remove_and_commit(self: Place, *args: Any) -> None:
        if self.is_folder():
            self.discard_folder()
        commit(self, *args)

    patch.setattr(Place, "commit", remove_and_commit)


@breaks(
    12,
    "the marker of a checkpoint is written before its last file",
    "checkpoint/test_crashes.py::test_a_crash_at_any_instant[sharded-last]",
)
def _marked_before(patch: pytest.MonkeyPatch) -> None:
    begin = Place.begin

    def begin_marked(self: Place, save: str, *, shares: bool) -> tuple[str, str]:
        folders = begin(self, save, shares=shares)
        if (manifest := self.manifest()) is not None:
            self.store.put(f"{self.name}/{MARKER}", [manifest._replace(save=save, files={}).encode()])
        return folders

    patch.setattr(Place, "begin", begin_marked)


@breaks(
    12,
    "objects beside the tensors of a checkpoint are unpickled untrusted",
    "checkpoint/test_untrusted.py::test_nothing_is_executed[extra_state]",
)
def _any_object(patch: pytest.MonkeyPatch) -> None:
    make = safe_metadata.SafePlanner.__init__
    patch.setattr(safe_metadata.SafePlanner, "__init__", lambda self, weights_only: make(self, False))


@breaks(
    12,
    "the list of a checkpoint's tensors may name anything",
    "checkpoint/test_untrusted.py::test_nothing_is_executed[list]",
)
def _any_name(patch: pytest.MonkeyPatch) -> None:
    find = safe_metadata._Unpickler.find_class

    def find_any(self: Any, module: str, name: str) -> Any:
        try:
            return find(self, module, name)
        except pickle.UnpicklingError:
            return pickle.Unpickler.find_class(self, module, name)

    patch.setattr(safe_metadata._Unpickler, "find_class", find_any)


@breaks(
    12,
    "an incremental checkpoint lacks the rows of saves before it",
    "checkpoint/test_checkpoint.py::test_a_checkpoint_is_whole_once_rows_are_many[increments-sync-]",
)
def _without_earlier_rows(patch: pytest.MonkeyPatch) -> None:
    begin = Increment.__init__

    def begin_without(self: Increment, *args: Any) -> None:
        begin(self, *args)
        self.rows = {}

    patch.setattr(Increment, "__init__", begin_without)


# Law 13: a replica is the trainer at a step.


@breaks(
    13,
    "a replica applies a cut that does not follow what it has",
    "deltas/test_chain.py::test_a_replica_first_comes_to_what_a_new_generation_follows",
)
def _any_cut(patch: pytest.MonkeyPatch) -> None:
    following, head_of = Chain._following, Chain._head

    def following_any(self: Chain, at: Any) -> Any:
        with pytest.MonkeyPatch.context() as meanwhile:
            meanwhile.setattr(Chain, "_head", lambda self, cut: replace(head_of(self, cut), after=None))
            return following(self, at)

    patch.setattr(Chain, "_following", following_any)


@breaks(
    13,
    "a training that begins from deltas writes rows one further in its shard",
    "deltas/test_restoring.py::test_an_evaluation_gets_tables_and_dense_part",
)
def _rows_one_further(patch: pytest.MonkeyPatch) -> None:
    write = rows.write_rows

    def write_further(table: torch.Tensor, rows_N: torch.Tensor, *rest: Any) -> None:
        write(table, (rows_N + 1) % len(table), *rest)

    patch.setattr(rows, "write_rows", write_further)


@breaks(
    13,
    "a training that begins from deltas leaves raw ids on the ranks that had their rows",
    "deltas/test_raw_ids.py::test_a_training_begins_from_its_deltas",
)
def _ids_do_not_move(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(shard_tables, "move_ids", lambda *_: [])


# Law 14: a loss that is not finite trains nothing.


@breaks(
    14,
    "gradients of a loss that is not finite are sent to the tables",
    "laws/test_nonfinite.py::test_an_error_leaves_all_as_it_was[fused_sparse_dist-False]",
)
def _gradients_are_sent(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(LossGuard, "received", _nothing)


@breaks(
    14,
    "zeros are multiplied by weights of ids that are not finite",
    "laws/test_nonfinite.py::test_a_batch_whose_loss_is_not_finite_is_left_out",
)
def _zero_times_nan(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(update_rates, "with_finite_weights", lambda features: features)


@breaks(
    14,
    "a rank looks at its own loss alone",
    "laws/test_nonfinite.py::test_a_module_without_tables",
)
def _own_loss_alone(patch: pytest.MonkeyPatch) -> None:
    compare = NonfiniteLosses.compare

    def compare_nothing(self: NonfiniteLosses, loss: torch.Tensor) -> None:
        compare(self, loss)
        own = (~torch.isfinite(loss.detach())).any()
        if self._work is not None:
            self._work.wait()
        assert self._flags is not None
        self._flags.fill_(0)
        self._flags[dist.get_rank()] = own

    patch.setattr(NonfiniteLosses, "compare", compare_nothing)


# Law 15: what was saved together loads together.


@breaks(
    15,
    "the files of a folder are not compared with their checksums",
    "checkpoint/test_damages.py::test_files_of_two_saves_are_refused",
)
def _not_compared(patch: pytest.MonkeyPatch) -> None:
    @contextlib.contextmanager
    def unchecked(self: Manifest, name: str) -> Iterator[Path]:
        with self.store.on_disk(self.path(name)) as path:
            yield path

    patch.setattr(Manifest, "checked", unchecked)


@breaks(
    15,
    "a rank of several compares nothing of a full file",
    "checkpoint/test_damages.py::test_all_ranks_refuse_a_damaged_file[5000]",
)
def _half_compared(patch: pytest.MonkeyPatch) -> None:
    check = sealed_file.Seal.check
    patch.setattr(sealed_file.Seal, "check", lambda seal, part=0, num_parts=1: part or check(seal, part, num_parts))


# Law 16: a signal ends a step.


@breaks(
    16,
    "a preemption signal saves where it finds a rank",
    "laws/test_preemption.py::test_every_place[in a validation]",
)
def _saves_at_once(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preemption, "install", _nothing)


@breaks(
    16,
    "a preempted job is requeued at every step from then on",
    "laws/test_preemption.py::test_every_mode[base-0]",
)
def _requeued_again(patch: pytest.MonkeyPatch) -> None:
    requeue = preemption.Preemption.requeue

    def requeue_again(self: preemption.Preemption) -> None:
        requeue(self)
        self._is_over = False

    patch.setattr(preemption.Preemption, "requeue", requeue_again)


@breaks(
    16,
    "SIGTERM ends a preempted fit before its checkpoint is saved",
    "laws/test_preemption.py::test_sigterm_after_it[in the sanity check-limits4]",
)
def _ends_before(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(preemption, "finish", _nothing)


# Law 17: a part is never taken for the whole.


@breaks(
    17,
    "what reads a part of a table gets the part",
    "tables/test_parts.py::test_nothing_reads_what_shares_or_copies_a_part",
)
def _parts_are_read(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(parts.OfPart, "__torch_function__", classmethod(_read_plainly))


def _read_plainly(cls: type, func: Callable[..., Any], types: Any, args: Any = (), kwargs: Any = None) -> Any:
    with torch._C.DisableTorchFunctionSubclass():
        return func(*parts._unwrapped(args), **parts._unwrapped(kwargs or {}))


@breaks(
    17,
    "each rank begins with the tables that it has loaded itself",
    "tables/test_initial_values.py::test_kinds_of_modules",
)
def _own_values(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sharding, "_begin_as_rank_zero", _nothing)


@breaks(
    17,
    "weights in plain containers are not looked for",
    "tables/test_kept_outside.py::test_a_fit_refuses_them",
)
def _kept_outside(patch: pytest.MonkeyPatch) -> None:
    patch.setattr(sharding, "refuse_kept_outside", _nothing)


# Law 18: every reader knows which weights are in the module.


@breaks(
    18,
    "early embeddings of trained weights are served to a teacher",
    "callbacks/test_averages_in_places.py::test_a_teacher_looks_up_averages_and_its_student_trained_weights",
)
def _unknown_weights(patch: pytest.MonkeyPatch) -> None:
    # The second guard counts writes, and the exchange of weights is one.
    patch.setattr(module_forward.ModuleForward, "_has_other_weights", lambda *_: False)
    patch.setattr(module_flight.ModuleFlight, "is_overwritten", lambda _: False)


# Law 20: balanced batches.


@breaks(
    20,
    "a rank computes another assignment than the others",
    "laws/test_balance.py::test_a_balanced_fit_equals_base_on_the_same_batches[base-table_wise]",
)
def _another_assignment(patch: pytest.MonkeyPatch) -> None:
    assign = balancer.assign
    patch.setattr(balancer, "assign", lambda costs: assign(costs)[:, :: 1 - 2 * dist.get_rank()])


@breaks(
    20,
    "the values that a rank sends are in another order than their lengths",
    "laws/test_balance.py::test_a_balanced_fit_equals_base_on_the_same_batches[base-table_wise]",
)
def _values_of_another(patch: pytest.MonkeyPatch) -> None:
    pack = JaggedField.pack

    def pack_shifted(self: JaggedField, places: Any) -> list[Any]:
        parts = pack(self, places)
        parts[1] = parts[1][::-1].copy()
        return parts

    patch.setattr(JaggedField, "pack", pack_shifted)


@breaks(
    20,
    "a checkpoint has the loader's state after the batch whose samples are being exchanged",
    "laws/test_balance.py::test_a_resumed_fit_equals_one_that_was_not_stopped",
)
def _state_of_the_next(patch: pytest.MonkeyPatch) -> None:
    fetch = BatchStream.fetch

    def fetch_later(self: BatchStream, index: int, timer: Any) -> Any:
        fetched = fetch(self, index, timer)
        return fetched and fetched._replace(loader_states=self.states)

    patch.setattr(BatchStream, "fetch", fetch_later)
