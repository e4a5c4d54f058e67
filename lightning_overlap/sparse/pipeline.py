"""The sparse stages of a model's sharded modules: input dist, lookup and output dist of batches to come."""

from __future__ import annotations

import warnings
from collections.abc import Iterable, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.nn import ModuleList
from torchrec.distributed.types import ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..preprocessing import StagedCalls
from ..runtime import InFlightBatch, LookupOrder, Path, resolve
from ..schedules import Stage, StreamName, WeightOwner
from ..tables import (
    SentInput,
    caching_tbes,
    forget_prefetched,
    has_model_parallel_tables,
    rates_of,
    tbes,
)
from .answers import Answers
from .freed_features import release
from .input_dist import InputExchange, splits_only
from .input_sizes import check_types, types_in
from .lookup import look_up, parts_to_look_up
from .module_context import ModuleContext, wait_for
from .options import SparseOptions
from .overwritten import OverwrittenLookups
from .pipelined_forward import PipelinedForwards, inputs_of
from .table_updates import TableUpdates
from .update_rates import take_back


class SparsePipeline:
    """The sparse stages of all sharded modules of a model.

    Args:
        modules: The outermost sharded modules of a model, by name.
        group: Process group of the input dist alone, so that it never queues after other traffic; None on one rank.
        order: The device's streams and the order of lookups, shared with the executor.
        options: What differs between training and evaluations, and between runs.
    """

    def __init__(
        self,
        modules: Mapping[str, ShardedModule[Any, Any, Any, Any]],
        group: dist.ProcessGroup | None,
        order: LookupOrder,
        options: SparseOptions,
    ) -> None:
        self.modules = modules
        self.order, self._observe = order, order.observe
        self._group, self._options = group, options
        self._trains, self._releases = options.trains, options.releases
        self._forwards = PipelinedForwards(modules, group, options)
        self._staged = StagedCalls(
            options.model, step=options.step, trains=options.trains, rank=options.rank, warned=options.warned
        )
        self._inputs = None if group is None else InputExchange(group)
        # Steps may fill the backward's wait only where the host itself waits: for the gradient all-to-all, on a CPU.
        host_waits = options.trains and group is not None and not order.streams.is_async
        self._updates = TableUpdates(self._forwards, order, options, fills_waits=options.fills_waits and host_waits)
        self.answers = Answers(self._forwards, order, self._updates, options, self.receive_input)
        # The rest of `runtime.SparseStages`, which other objects implement.
        self.register_backward_hook = self._updates.register_hook
        self.start_update, self.embedding_update = self._updates.start, self._updates.make
        self.gradients_are_there = self._updates.gradients_are_there
        self.update_replicas, self.drop_replica_updates = self._updates.update_replicas, self._updates.hold_replicas
        self._overwritten = OverwrittenLookups(
            self._forwards, holds_rates=options.holds_rates, any_rank=options.any_rank
        )
        self._is_first = True
        self.ready = False
        """Whether it is known which input of a batch feeds which module."""
        self.keep_ids = False
        """Whether batches that are looked up from now on keep their ids until their step is over."""

    @property
    def unpipelined(self) -> dict[str, str]:
        """The modules that run in their own forward, as far as is known now, each with the reason."""
        reasons = {name: pipelined.unpipelined_reason for name, pipelined in self._forwards.items()}
        return {name: reason for name, reason in reasons.items() if reason is not None}

    @property
    def can_defer_updates(self) -> bool:
        """Whether an update can come later than its backward: not on a CPU with one rank, where nothing is gained."""
        gains = self._group is not None or self.order.streams.is_async or self._options.holds_updates
        return self._trains and gains

    def attach(self) -> None:
        """Replace the modules' forwards by pipelined ones; those of an evaluation replace those of training for a time.

        `detach` puts back what was replaced.
        """
        self._forwards.attach(self.answers.answer)
        self._staged.attach()
        self._updates.hold_replicas()

    def detach(self) -> None:
        """Give every module the forward back that it had before; forget all state of batches, without a collective."""
        self._forwards.detach()
        self._staged.detach()
        self._updates.release_replicas()
        self._updates.forget()
        self.answers.abandon()
        if self._inputs is not None:
            self._inputs.forget()
        self.order.reset()

    @contextmanager
    def forward(self, inflight: InFlightBatch) -> Iterator[None]:
        """Serve early embeddings while the step of one batch runs.

        Where a module runs its own forward for it instead, `inflight.ran_unpipelined` says so.
        """
        self._check_types(inflight)
        self.answers.begin(inflight)
        self._staged.begin(inflight)
        try:
            yield
        finally:
            self.answers.end()
            self._staged.end()
        if self.ready:
            self._forwards.check_calls(inflight.modules)
        for state in inflight.modules.values():
            self._leave_aside(state)

    def forget_received(self, inflight: InFlightBatch) -> None:
        """Let go of the embeddings and inputs of a batch whose backward is over."""
        self.answers.forget(inflight)
        self._staged.forget(inflight)

    # -- which input feeds which module -------------------------------------------------------------------------

    def _check_types(self, inflight: InFlightBatch) -> None:
        """Check the types of the first batch's inputs, which the modules' own forwards send."""
        is_first, self._is_first = self._is_first, False
        if not is_first or self._group is None or not has_model_parallel_tables(ModuleList(self.modules.values())):
            return
        names_and_types = ((", ".join(kjt.keys()), kjt.dist_tensors()) for kjt in keyed_jagged_tensors(inflight.batch))
        check_types({f"the input of features {names}": types_in(sent) for names, sent in names_and_types}, self._group)

    def discover(self, inflight: InFlightBatch) -> None:
        """Find the inputs of the modules' calls in the staged batch, by identity: the stages are ready from then on.

        All ranks call this after the forward of the same batch: they agree on what they have found.
        """
        self._staged.discover(inflight)
        self._forwards.discover(self._staged.searched(inflight))
        self.ready = True
        if self._staged.is_used:
            self.keep_features("staged methods may be called anew in their step, with the ids of the batch")
        if names := ", ".join(repr(one.name) for one in self._forwards.values() if one.path is None):
            self.keep_features(f"{self._options.step} makes the input of {names} itself, perhaps of ids to be released")

    def keep_features(self, reason: str) -> None:
        """Release no ids from now on; warn that `release_features` is without effect, once, of the reason."""
        if self._releases:
            self._releases = False
            if self._options.rank == 0:
                warnings.warn(f"release_features=True releases nothing: {reason}.", UserWarning, stacklevel=2)

    def make_inputs(self, inflight: InFlightBatch) -> None:
        """Call the staged methods for a batch, on the stream of its copy, which whoever reads the batch waits for."""
        if not self._staged.is_used:
            return
        streams, (stream, _) = self.order.streams, inflight.done[Stage.COPY_BATCH_TO_DEVICE]
        if self._staged.state_has_changed():
            streams.wait(stream, streams.record(StreamName.COMPUTE))
        with streams.on(stream):
            made = self._staged.make(inflight)
        for reader in (StreamName.DATA_DIST, StreamName.COMPUTE):
            streams.record_stream(made, reader)
        inflight.done[Stage.COPY_BATCH_TO_DEVICE] = (stream, streams.record(stream))

    # -- input dist ---------------------------------------------------------------------------------------------

    def input_splits_dist(self, inflight: InFlightBatch) -> None:
        """Start the all-to-all of split sizes: one for all modules.

        Source: `_start_data_dist` and `_fuse_input_dist_splits`, TorchRec 1.8.
        """
        searched = self._staged.searched(inflight)
        kjts = inputs_of(searched) if self._group is not None else []
        num_found: dict[str, int] = {}
        for name, pipelined in self._forwards.items():
            kjt = _input_in(searched, pipelined.path) if pipelined.early else None
            if kjt is None or pipelined.keys != frozenset(kjt.keys()):
                continue
            # The step may pass another input with the same keys: of the batch, or of what staged methods made of it.
            alike = [path for path, other in kjts if pipelined.keys == frozenset(other.keys())]
            num_found[name] = sum(self._staged.are_alike(path, pipelined.path) for path in alike)
            module = pipelined.module
            state = inflight.modules[name] = ModuleContext(module, kjt, module.create_context())
            sent = _shared(kjt)  # TorchRec may keep the object that it is given and replace its weights
            state.outside = self._forwards.ids_outside(pipelined, kjt, inflight)
            if state.outside is not None:  # an error if the step calls the module with these ids, and does not map them
                sent._values = torch.zeros_like(kjt.values())
            with splits_only(module, self._group, narrow=self._options.multi_node):
                state.splits_awaitable = module.input_dist(state.context, sent)
            state.sent = SentInput(kjt)
        taking_part = [name for name, pipelined in self._forwards.items() if pipelined.takes_part]
        if self._inputs is not None and (taking_part or self._trains):
            inflight.sizes = self._inputs.start_sizes(taking_part, inflight.modules, num_found, inflight.latest_none)

    def input_data_dist(self, inflight: InFlightBatch) -> None:
        """Read the sizes on the host, the one host sync of the step; start the all-to-all of lengths, ids, weights."""
        if self._inputs is None:
            for state in inflight.modules.values():
                self._observe("wait", Stage.INPUT_SPLITS_DIST, inflight.index)
                state.tensors_awaitable, state.splits_awaitable = wait_for(state.splits_awaitable), None
        elif inflight.sizes is not None:
            self._observe("wait", Stage.INPUT_SPLITS_DIST, inflight.index)
            self._inputs.start_data(inflight)
        if self._releases:
            self._release_sent(inflight)

    def _release_sent(self, inflight: InFlightBatch) -> None:
        """Free the ids of a batch, but those that a module is going to read in its own forward."""
        searched = self._staged.searched(inflight)
        read_later = [_input_in(searched, one.path) for one in self._forwards.values() if not one.early]
        for state in inflight.modules.values():
            if all(state.kjt is not kjt for kjt in read_later):
                assert state.sent is not None
                release(state.kjt)
                state.sent.forget_ids()

    def receive_input(self, inflight: InFlightBatch) -> list[Any]:
        """Wait for the ids that this rank receives, and assemble them.

        Returns:
            Everything that holds received tensors (ids and TorchRec's contexts), for `Streams.record_stream`.
        """
        received: list[Any] = []
        for state in inflight.modules.values():
            if state.dist_input is None and state.tensors_awaitable is not None:
                self._observe("wait", Stage.INPUT_DATA_DIST, inflight.index)
                state.dist_input, state.tensors_awaitable = wait_for(state.tensors_awaitable), None
            received += [state.dist_input, state.context]
        return received

    # -- lookup and output dist ---------------------------------------------------------------------------------

    def prefetch(self, inflight: InFlightBatch) -> None:
        """Copy the rows that the lookup will read from UVM into the cache, for the tables that have one.

        FBGEMM locks them there until their backward, and the backward of the batch before waits for this.

        Source: `prefetch_embeddings`, TorchRec 1.8.
        """
        for state in inflight.modules.values():
            if not caching_tbes(state.module):
                continue
            assert state.dist_input is not None, f"the prefetch of batch {inflight.index} comes before its input"
            stream = self.order.streams[self.order.lookup]  # on which the prefetched rows are read, and updated
            state.module.prefetch(state.dist_input, forward_stream=stream, ctx=state.context)

    def forget_prefetched(self) -> None:
        """Drop what was prefetched and not looked up: FBGEMM matches prefetches to lookups by their order alone."""
        for pipelined in self._forwards.values():
            with self.order.streams.on(StreamName.PREFETCH):
                forget_prefetched(pipelined.module)

    def has_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> bool:
        """Whether a batch has tables of these owners that are still to be looked up."""
        return any(state.embeddings is None and parts_to_look_up(state, owners) for state in inflight.modules.values())

    def embedding_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
        """Look up the tables of these owners and start the all-to-all of their embeddings.

        The fused tables of all modules come first. They are model-parallel: their embeddings travel while the
        data-parallel tables are read. One lookup runs at a time, since two would only share the memory's bandwidth.
        """
        for owner in WeightOwner:
            if owner in owners:
                self._look_up(inflight, frozenset({owner}))

    def _look_up(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
        for state in inflight.modules.values():
            if state.embeddings is not None or state.dist_input is None or not parts_to_look_up(state, owners):
                continue
            if self.keep_ids:
                state.ids = state.dist_input
            if self._options.holds_rates and state.rates is None:
                state.rates = rates_of(state.module)
            set_rates = self._options.set_rates
            if set_rates is not None:
                set_rates = state.deferred.with_rates(set_rates, tbes(state.module))
            with state.counting(state.num_lookups):
                look_up(state, owners, set_rates, defers_update=inflight.defers_update)
            state.note_lookup(owners)
            if not self._trains:
                self._take_back(state)

    # -- what is not used after all -----------------------------------------------------------------------------

    def drop_update(self, inflight: InFlightBatch) -> None:
        """Wait for the gradients of a batch and drop them; take its lookups back from the kernels' iteration counts."""
        self._updates.forget(inflight)
        with self.order.on_lookup():  # where the gradients were allocated
            for state in inflight.modules.values():
                state.deferred.drop()
        self.count_lookups(inflight, -1)

    def is_overwritten(self, batches: Iterable[InFlightBatch]) -> bool:
        """Whether somebody has written tables of this rank after they were looked up for one of these batches."""
        return self._overwritten.found_in(batches)

    def leave_overwritten(self, batches: Iterable[InFlightBatch]) -> None:
        """Drop the early lookups of these batches, on all ranks alike: the tables were written since.

        Raises:
            RuntimeError: The ids of these batches were released, so that they cannot be looked up anew.
        """
        if self._releases:
            raise RuntimeError(
                "tables were written between two steps, after the next batch had been looked up, and its ids are gone "
                "(release_features=True): it cannot be looked up anew. Train with release_features=False."
            )
        dropped = list(batches)
        self._overwritten.note_drop(dropped)
        for inflight in dropped:
            self.drop_lookups(inflight)

    def drop_lookups(self, inflight: InFlightBatch) -> None:
        """Wait for the early lookups of a batch and drop them: its modules will run in their own forward."""
        for name, state in list(inflight.modules.items()):
            if state.embeddings is not None or state.output_dist_awaitables:
                self._leave_aside(state)
                del inflight.modules[name]

    def count_lookups(self, inflight: InFlightBatch, times: int) -> None:
        """Change the iteration counts of fused optimizers by the early lookups of a batch.

        Args:
            inflight: A batch that has been looked up and not yet updated.
            times: -1 takes its lookups out of the counts, so that a checkpoint has updates only; 1 adds them again.
        """
        for state in inflight.modules.values():
            for num_lookups in (state.num_lookups, state.num_own_lookups):
                take_back(tbes(state.module), [-times * num for num in num_lookups], self.order)

    def drain(self, inflight: InFlightBatch) -> None:
        """Complete every collective that was started for a batch, in the order of its stages."""
        if inflight.sizes is not None or any(state.splits_awaitable is not None for state in inflight.modules.values()):
            streams = self.order.streams  # the splits were made on the input dist's stream, and are sent from this one
            streams.wait(StreamName.COMPUTE, streams.record(StreamName.DATA_DIST))
            self.input_data_dist(inflight)
        self.receive_input(inflight)
        for state in inflight.modules.values():
            self._leave_aside(state)

    def _leave_aside(self, state: ModuleContext) -> None:
        """Wait for embeddings that nobody is going to use; take their lookup back from the kernels' counts."""
        if state.tensors_awaitable is not None:  # ids for a lookup at the module's call, which did not come
            state.tensors_awaitable.wait()
            state.tensors_awaitable = None
        if state.served or not (state.output_dist_awaitables or state.embeddings is not None):
            return
        with self.order.on_lookup():  # where the embeddings were allocated
            for awaitable in [*state.output_dist_awaitables.values(), state.embeddings]:
                if awaitable is not None:
                    awaitable.wait()
        self._take_back(state)
        state.served = True

    def _take_back(self, state: ModuleContext) -> None:
        take_back(tbes(state.module), state.num_lookups, self.order)
        state.num_lookups = []


def keyed_jagged_tensors(batch: Any) -> list[KeyedJaggedTensor]:
    """Return every KeyedJaggedTensor of a batch, in a fixed order."""
    return [kjt for _, kjt in inputs_of(batch)]


def note_lengths(kjts: Iterable[KeyedJaggedTensor]) -> None:
    """Cache the number of ids of each feature in inputs that are still on the host; the input dist asks for it.

    On the device it would be one more host sync for each KeyedJaggedTensor.
    """
    for kjt in kjts:
        if kjt.device().type == "cpu":
            kjt.sync()


def _shared(kjt: KeyedJaggedTensor) -> KeyedJaggedTensor:
    """Return another object with the same tensors: what `copy.copy` does, without its 10 microseconds."""
    shared: KeyedJaggedTensor = object.__new__(type(kjt))
    vars(shared).update(vars(kjt))
    return shared


def _input_in(batch: Any, path: Path | None) -> KeyedJaggedTensor | None:
    """The KJT at a path, or None where this batch has none there: the module then runs its own forward."""
    try:
        kjt = resolve(batch, path or ())
    except LookupError:
        return None
    return kjt if isinstance(kjt, KeyedJaggedTensor) else None
