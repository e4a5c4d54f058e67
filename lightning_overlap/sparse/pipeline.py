"""The sparse stages of a model's sharded modules, and the stand-in forward that serves what they did early."""

from __future__ import annotations

import time
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import AbstractContextManager, ExitStack, contextmanager, nullcontext
from functools import partial
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.types import LazyAwaitable, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..distributed import Store
from ..runtime import InFlightBatch, Observer, Path, StageTimer, Streams, resolve, timed
from ..schedules import Stage, StreamName, WeightOwner
from ..tables import (
    SentInput,
    SetRates,
    caching_tbes,
    forget_prefetched,
    num_fused_writes,
    num_writes,
    owners_of_parts,
    spec_of,
    tbes,
    without_backward,
    without_graph,
)
from .deferred_update import before_gradients
from .freed_features import release
from .input_dist import Form, InputSizes, ModuleInput, form_of, splits_only
from .lookup import compute_fused, look_up, parts_to_look_up, start_fused
from .lookup_threads import LookupThreads, Rows
from .module_context import ModuleContext
from .pipelined_forward import (
    EarlyEmbeddings,
    LazyEmbeddings,
    PipelinedForward,
    PipelinedForwards,
    inputs_of,
    only_input,
)
from .update_rates import kernel_rates, lookup_counts, lookups_since, set_kernel_rates


class SparsePipeline:
    """The sparse stages of all sharded modules of a model.

    Args:
        modules: Sharded modules by their name in the model.
        group: Process group of the input dist alone, so that it never queues behind other traffic; None on
            one rank.
        streams: The device's streams.
        lookup_stream: The stream of early lookups.
        observer: Told of every wait.
        rank: Warns if 0.
        store: Where ranks leave word for each other; needed with a group.
        set_rates: Gives the kernels the learning rates that a schedule has now; None where nothing moves them.
        step: The module's method whose calls are served.
        trains: Whether a backward follows; lookups without one must not count for the fused optimizers.
        warned: Warnings given so far, shared by the pipelines of a run.
        num_threads: Threads that run the kernels of early lookups on a CPU; 0: the calling thread does.
        releases: Whether a batch lets go of ids that have been sent.
        multi_node: Whether there is a link between ranks, where bytes and ranks that are late cost most: ids then
            travel in 32 bits where all that stand for a row fit, and deferred updates wait for the backward's end.
        fills_waits: Whether rows of the schedule may be left until a backward waits for other ranks.
        prefetches: Whether the schedule has a row for it, so that tables in a UVM cache can be looked up early.
        any_rank: Asks all ranks whether one of them says so, on the host; all of them wait for the answer.
        timeout_s: How long a rank waits for one that is late.
    """

    def __init__(
        self,
        modules: Mapping[str, ShardedModule[Any, Any, Any, Any]],
        group: dist.ProcessGroup | None,
        streams: Streams,
        lookup_stream: StreamName,
        *,
        observer: Observer | None = None,
        rank: int = 0,
        store: Store | None = None,
        set_rates: SetRates | None = None,
        step: str = "training_step",
        trains: bool = True,
        warned: set[tuple[str, str | None]] | None = None,
        prefetches: bool = False,
        num_threads: int = 0,
        releases: bool = False,
        multi_node: bool = False,
        fills_waits: bool = True,
        any_rank: Callable[[bool], bool] = bool,
        timeout_s: float = 1800,
    ) -> None:
        self._any_rank = any_rank
        self._num_steps = 0
        self._forms: dict[str, Form] = {}
        self._in_step: InFlightBatch | None = None
        self._multi_node = multi_node
        self._in_backward: list[RemovableHandle] = []
        self._fills_waits = fills_waits and trains and group is not None and not num_threads and not streams.is_async
        self._releases = releases
        self._threads = LookupThreads(num_threads) if num_threads else None
        self._unpipelined_in_step = False
        self._set_rates = set_rates
        # A rate that moves repeats a lookup in its backward, when the next batch's prefetch is in its place.
        prefetches = prefetches and set_rates is None
        self._forwards = PipelinedForwards(
            modules,
            group,
            self,
            step=step,
            prefetches=prefetches,
            rank=rank,
            store=store,
            warned=warned,
            timeout_s=timeout_s,
        )
        self._group = group
        self._streams = streams
        self._lookup_stream = lookup_stream
        self._observe = observer or (lambda kind, stage, index: None)
        self._rank = rank
        self._current: InFlightBatch | None = None
        self._ran_unpipelined = False
        self._step = step
        self._trains = trains
        self._to_update: dict[int, InFlightBatch] = {}
        self._num_writes_seen: list[tuple[int, ...]] = []
        self._has_dense_tables = any(
            WeightOwner.DENSE_OPTIMIZER in owners_of_parts(module)
            for module in self.modules.values()
            if spec_of(module) is not None
        )
        self.timer: StageTimer | None = None
        self.keep_ids = False  # of the batches that are looked up from now on, until their step is over
        self.ready = False

    @property
    def modules(self) -> dict[str, ShardedModule[Any, Any, Any, Any]]:
        """The sharded modules by name."""
        return {name: pipelined.module for name, pipelined in self._forwards.items()}

    @property
    def can_defer_updates(self) -> bool:
        """Whether an update can come later than its backward; on a CPU with one rank there is nothing to wait for."""
        return self._trains and (self._group is not None or self._streams.is_async)

    def attach(self) -> None:
        """Put the stand-ins in the place of the modules' forwards, an evaluation's before those of training."""
        self._forwards.attach()

    def detach(self) -> None:
        """Give every module the forward back that it had before."""
        self._forwards.detach()
        self._current = self._in_step = None
        self._to_update.clear()
        if self._threads is not None:
            self._threads.abandon()

    # -- the stand-in forward -----------------------------------------------------------------------------------

    @contextmanager
    def forward(self, inflight: InFlightBatch) -> Iterator[None]:
        """Serve early results while the step of one batch runs."""
        self.finish_lookups()
        self._unpipelined_in_step = False
        self._forwards.forget_calls()
        self._forwards.forget_answers()
        self._current = self._in_step = inflight
        self._num_steps += 1
        try:
            yield
        finally:
            self._current = None
        if self.ready:
            self._forwards.check_calls(inflight.modules)
            self._forwards.forget_calls()
        for name, state in inflight.modules.items():
            self._leave_aside(self._forwards[name].module, state)

    def call(self, pipelined: PipelinedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Answer a call of a sharded module: the early rows if its own forward would give the same, else its forward.

        Of the calls in a step the first one is served; `checkpoint()` repeats a forward in the backward, and finds
        there the rows that it found before.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        inflight = self._in_step if in_backward else self._current
        look_up_now = partial(pipelined.original_forward, *args, **kwargs)
        if inflight is not None:
            if in_backward and (answer := pipelined.answer_again(only_input(args, kwargs))) is not None:
                return answer
            if not in_backward:
                pipelined.calls.append((args, kwargs))
            state = inflight.modules.get(pipelined.name)
            if state is not None and (
                not state.served or (in_backward and state.rows is not None and state.served_in == self._num_steps)
            ):
                reason = self._why_not_early(pipelined, state, args, kwargs)
                if state.served:
                    if reason is None:
                        return self._serve(inflight.index, state)
                elif self._all_ranks_take_early_rows(pipelined, inflight, reason):
                    state.served, state.served_in = True, self._num_steps
                    self._forwards.served(pipelined, self._num_steps)
                    if state.rows is not None:
                        return self._serve(inflight.index, state)
                    look_up_now = partial(self._look_up_when_called, pipelined.module, inflight, state)
            self._ran_unpipelined = self._unpipelined_in_step = True
        self.finish_lookups()
        self._update_before_a_forward(pipelined.name)
        # checkpoint() drops what a forward saves and repeats it for that, on each rank for itself: no rank would find
        # the others in the collectives of a repeated lookup. So a lookup keeps what it saves, and is not repeated.
        checkpointed = inflight is not None and torch.is_grad_enabled() and _saving_is_hooked()
        with _keeping_saved() if checkpointed else nullcontext():
            rows = self._on_compute_stream(pipelined.module, inflight, look_up_now)
        as_called = partial(_waited_for_as_called, keeps_saved=checkpointed)
        answer = tuple(map(as_called, rows)) if isinstance(rows, tuple) else as_called(rows)
        if checkpointed and not in_backward:
            pipelined.keep_answer(only_input(args, kwargs), answer)
        return answer

    def _why_not_early(
        self, pipelined: PipelinedForward, state: ModuleContext, args: tuple[Any, ...], kwargs: dict[str, Any]
    ) -> str | None:
        """Return what makes early rows differ from those that the module's own forward would give now, or None."""
        if only_input(args, kwargs) is not state.kjt:
            return "it was called with another input than the one in the batch"
        if not state.sent.is_unchanged(state.kjt):
            return "its input was changed in place after its ids had been sent"
        if not self._trains and torch.is_grad_enabled():
            return f"{self._step} called it with gradients enabled"
        if state.rows is not None and state.autocast != _autocast(pipelined.module, state.kjt):
            return f"it was called under another autocast than that of {self._step}"
        if self._is_overwritten(pipelined.module, state):
            return "its tables were written after it had been looked up"
        return None

    def _all_ranks_take_early_rows(
        self, pipelined: PipelinedForward, inflight: InFlightBatch, reason: str | None
    ) -> bool:
        """Whether all ranks serve this call early; if not they all run the module's own forward, for good."""
        if inflight.modules[pipelined.name].votes:
            if self._any_rank(reason is not None):
                reason = reason or "another rank called it with another input of the batch"
        elif reason is not None:
            self._forwards.all_ranks_run_unpipelined(pipelined, self._num_steps, inflight.index, reason)
        if reason is not None:
            self._forwards.run_unpipelined(pipelined, reason)
        return reason is None

    def _is_overwritten(self, module: Any, state: ModuleContext) -> bool:
        return any(num_writes(module, owner) != before for owner, before in state.num_writes.items())

    def is_overwritten(self, batches: Iterable[InFlightBatch]) -> bool:
        """Whether somebody has written tables of this rank after they were looked up for one of these batches."""
        self.finish_lookups()
        # Nobody has written any table since all of these were found as they were looked up: the usual case.
        num_writes = [num_fused_writes(pipelined.module) for pipelined in self._forwards.values()]
        if num_writes == self._num_writes_seen and not self._has_dense_tables:
            return False
        self._num_writes_seen = num_writes
        return any(
            self._is_overwritten(self._forwards[name].module, state)
            for inflight in batches
            for name, state in inflight.modules.items()
            if not state.served
        )

    def leave_overwritten(self, batches: Iterable[InFlightBatch]) -> None:
        """Leave the early rows of these batches aside, on all ranks alike: the tables were written since.

        Raises:
            RuntimeError: Their ids were released, so that nobody can look them up anew.
        """
        if self._releases:
            raise RuntimeError(
                "tables were written between two steps, after the next batch had been looked up, and its ids are gone "
                "(release_features=True): it cannot be looked up anew. Train with release_features=False."
            )
        for inflight in batches:
            self.drop_lookups(inflight)
        for pipelined in self._forwards.values():
            pipelined.num_overwritten += 1
            if pipelined.early and pipelined.num_overwritten == MAX_OVERWRITTEN:
                self._forwards.run_unpipelined(pipelined, "tables are written between two steps again and again")

    def _on_compute_stream(self, module: Any, inflight: InFlightBatch | None, look_up_now: Callable[[], Any]) -> Any:
        """Look up where the module is called."""
        # The lookup stream may still be writing the tables that this reads.
        self._streams.wait(StreamName.COMPUTE, self._streams.record(self._lookup_stream))
        if self._set_rates is not None:
            self._set_rates()
        # Without a batch in flight: an evaluation by hand, or a module that does its own fetching (`dataloader_iter`).
        counts = None if self._trains and (inflight is not None or torch.is_grad_enabled()) else lookup_counts(module)
        timer, index = (None, 0) if inflight is None else (self.timer, inflight.index)
        with (
            nullcontext() if counts is None else without_backward(module),
            timed(timer, Stage.EMBEDDING_LOOKUP, index, StreamName.COMPUTE),
            _outside_inference_mode(),
        ):
            rows = look_up_now()
        if counts is not None:
            self._streams.wait(self._lookup_stream, self._streams.record(StreamName.COMPUTE))
            self._uncount(module, lookups_since(module, counts))
        return rows

    def _look_up_when_called(self, module: Any, inflight: InFlightBatch, state: ModuleContext) -> Any:
        """Look up ids that were sent early."""
        stream, _ = inflight.done[Stage.INPUT_DATA_DIST]
        with self._streams.on(stream):
            received = self.receive_input(inflight)
        self._streams.wait(StreamName.COMPUTE, self._streams.record(stream))
        self._streams.record_stream(received, StreamName.COMPUTE)
        dist_input, state.dist_input = state.dist_input, None
        return module.compute_and_output_dist(state.context, dist_input)

    def _serve(self, index: int, state: ModuleContext) -> EarlyEmbeddings:
        if torch.is_grad_enabled() or not self._trains:
            return EarlyEmbeddings(partial(self._receive_rows, index, state))
        state.without_graph = True
        return EarlyEmbeddings(lambda: without_graph(self._receive_rows(index, state)))

    def _uncount(self, module: Any, num_lookups: list[int]) -> None:
        """Take back what lookups without an update added to the iteration count of the fused optimizers.

        Some TBE optimizers count lookups, not updates (FBGEMM 1.8), and Adam corrects its bias by that count: an
        evaluation, or a lookup that is dropped, would change training, and differently so in each mode. The lookup
        stream, where early lookups count, waits for nothing here.
        """
        if not any(num_lookups):
            return
        with self._streams.on(self._lookup_stream), torch.no_grad():
            for tbe, num in zip(tbes(module), num_lookups, strict=True):
                tbe.iter.sub_(num)
                tbe.iter_cpu.sub_(num)

    def _receive_rows(self, index: int, state: ModuleContext) -> Any:
        """Wait for the all-to-all of rows on the lookup's stream, then hand them to whatever stream asks for them."""
        first = state.received is None
        if first:
            self._observe("wait", Stage.EMBEDDING_LOOKUP, index)
            assert state.rows is not None
            with self._streams.on(self._lookup_stream), _own_graph(self._trains):
                state.received = state.rows.wait()
            state.received_at = self._streams.record(self._lookup_stream)
        with self.timer.merge(index) if first and self.timer is not None else nullcontext():
            self._streams.hand_to_caller(state.received, state.received_at)
        return state.received

    def forget_received(self, inflight: InFlightBatch) -> None:
        """Let go of the rows of a batch whose backward is over."""
        for state in inflight.modules.values():
            state.received = None
        self._forwards.forget_answers()
        if self._in_step is inflight:
            self._in_step = None

    def take_unpipelined_forward(self) -> bool:
        """Whether a module ran its own forward in training since the last call."""
        plain, self._ran_unpipelined = self._ran_unpipelined, False
        return plain

    # -- which input feeds which module -------------------------------------------------------------------------

    def discover(self, inflight: InFlightBatch) -> bool:
        """Find the inputs of the modules' calls in the staged batch, by identity. True when done."""
        self._forwards.discover(inflight.batch)
        self.ready = True
        self._warn_of_kept_features()
        return True

    def _warn_of_kept_features(self) -> None:
        made_inside = [pipelined.name for pipelined in self._forwards.values() if pipelined.path is None]
        if made_inside:
            names = ", ".join(map(repr, made_inside))
            self.keep_features(f"{self._step} makes the input of {names} itself, of what may have to stay")

    def keep_features(self, reason: str) -> None:
        """Release no ids from now on."""
        if self._releases:
            self._releases = False
            if self._rank == 0:
                warnings.warn(f"release_features=True releases nothing: {reason}.", UserWarning, stacklevel=2)

    # -- the stages ---------------------------------------------------------------------------------------------

    def input_splits_dist(self, inflight: InFlightBatch) -> None:
        """Start the all-to-all of split sizes: one for all modules.

        Source: `_start_data_dist` and `_fuse_input_dist_splits`, TorchRec 1.8.
        """
        taking_part = [pipelined for pipelined in self._forwards.values() if pipelined.takes_part]
        early = [pipelined for pipelined in taking_part if pipelined.early]
        several = inputs_of(inflight.batch) if self._group is not None else []
        num_found: dict[str, int] = {}
        for pipelined in early:
            kjt = _input_in(inflight.batch, pipelined.path)
            if kjt is None or pipelined.keys != frozenset(kjt.keys()):
                continue
            num_found[pipelined.name] = sum(pipelined.keys == frozenset(other.keys()) for _, other in several)
            state = inflight.modules[pipelined.name] = ModuleContext(kjt, pipelined.module.create_context())
            sent = _shared(kjt)  # TorchRec may hand on the very object that it is given, and give it other weights
            with splits_only(pipelined.module, self._group, narrow=self._multi_node):
                state.splits = pipelined.module.input_dist(state.context, sent)
            state.sent = SentInput(kjt)
        if self._group is not None and taking_part:
            self._exchange_sizes(inflight, [pipelined.name for pipelined in taking_part], num_found)

    def _exchange_sizes(self, inflight: InFlightBatch, taking_part: list[str], num_found: Mapping[str, int]) -> None:
        """Start the all-to-all of sizes of these modules, whether or not this rank's batch has their inputs."""
        assert self._group is not None
        described = {name: form_of(state.splits) for name, state in inflight.modules.items()}
        if any(name not in self._forms for name in taking_part):
            self._agree_on_forms(described)
        for name, form in described.items():
            if self._forms.get(name) != form:  # weighted unlike the first one, say: the module's own forward tells
                del inflight.modules[name]
        names = [name for name in taking_part if name in self._forms]
        inputs = [
            ModuleInput(self._forms[name], state.splits, state.context, num_found[name])
            if (state := inflight.modules.get(name)) is not None
            else ModuleInput(self._forms[name])
            for name in names
        ]
        inflight.sizes = (names, InputSizes(inputs, self._group)) if names else None

    def _agree_on_forms(self, described: Mapping[str, Form]) -> None:
        """Learn the forms of the modules' inputs from the ranks that have them in their first batch."""
        assert self._group is not None
        everyone: list[Mapping[str, Form]] = [{}] * self._group.size()
        dist.all_gather_object(everyone, dict(described), group=self._group)
        for theirs in everyone:
            for name, form in theirs.items():
                self._forms.setdefault(name, form)

    def input_data_dist(self, inflight: InFlightBatch) -> None:
        """Read the sizes on the host, the one wait of the step; start the all-to-alls of lengths, ids, weights."""
        if self._group is None:
            for state in inflight.modules.values():
                self._observe("wait", Stage.INPUT_SPLITS_DIST, inflight.index)
                state.data, state.splits = state.splits.wait(), None
        elif inflight.sizes is not None:
            self._observe("wait", Stage.INPUT_SPLITS_DIST, inflight.index)
            (names, sizes), inflight.sizes = inflight.sizes, None
            for name, known in zip(names, sizes.wait(), strict=True):
                if known.data is None:
                    inflight.modules.pop(name, None)
                    continue
                state = inflight.modules[name]
                state.data, state.votes, state.splits = known.data, known.is_ambiguous, None
        if self._releases:
            self._release_sent(inflight)

    def _release_sent(self, inflight: InFlightBatch) -> None:
        """Let go of the ids of a batch that no module is going to read in its own forward."""
        read_later = [_input_in(inflight.batch, one.path) for one in self._forwards.values() if not one.early]
        for state in inflight.modules.values():
            if all(state.kjt is not kjt for kjt in read_later):
                release(state.kjt)
                state.sent.forget_ids()

    def receive_input(self, inflight: InFlightBatch) -> list[Any]:
        """Wait for the received ids; return them with the modules' contexts."""
        received: list[Any] = []
        for state in inflight.modules.values():
            if state.dist_input is None and state.data is not None:
                self._observe("wait", Stage.INPUT_DATA_DIST, inflight.index)
                state.dist_input, state.data = state.data.wait(), None
            received += [state.dist_input, state.context]
        return received

    def prefetch(self, inflight: InFlightBatch) -> None:
        """Bring the rows that the lookup will read into the cache of the tables that have one.

        FBGEMM locks them there until their backward, and the backward of the batch before waits for this.

        Source: `prefetch_embeddings`, TorchRec 1.8.
        """
        for name, state in inflight.modules.items():
            module = self._forwards[name].module
            if not caching_tbes(module):
                continue
            assert state.dist_input is not None, f"the prefetch of batch {inflight.index} comes before its input"
            stream = self._streams.native(self._lookup_stream)  # that reads the prefetched rows, in both directions
            module.prefetch(state.dist_input, forward_stream=stream, ctx=state.context)

    def forget_prefetched(self) -> None:
        """Drop what was prefetched and not looked up; a later lookup would be taken for that of these ids."""
        for pipelined in self._forwards.values():
            with self._streams.on(StreamName.PREFETCH):
                forget_prefetched(pipelined.module)

    def has_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> bool:
        """Whether a module has tables of these owners still to look up."""
        return any(
            state.rows is None and parts_to_look_up(self._forwards[name].module, state, owners)
            for name, state in inflight.modules.items()
        )

    def embedding_lookup(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
        """Look up the tables of these owners and start the all-to-all of their rows.

        The fused ones of all modules come first, which are model-parallel: their rows travel while the data-parallel
        tables are read. Two lookups at a time would only share the memory's bandwidth.
        """
        self.finish_lookups()
        for owner in WeightOwner:
            if owner in owners:
                self._look_up(inflight, frozenset({owner}))

    def _begin_in_thread(self, name: str, inflight: InFlightBatch) -> None:
        assert self._threads is not None
        state, module = inflight.modules[name], self._forwards[name].module
        if self.keep_ids:
            state.ids = state.dist_input
        set_rates = None if self._set_rates is None else partial(self._rates_of, module, state)
        if self._set_rates is not None:
            state.held.note_rates = partial(self._present_rates, module)

        def look_up_in_thread() -> Rows:
            counts = lookup_counts(module)
            rows = compute_fused(module, state, set_rates)
            return Rows(rows, lookups_since(module, counts))

        self._threads.submit(name, inflight, look_up_in_thread)

    def finish_lookups(self) -> None:
        """Wait for the lookups that run in threads; start the all-to-all of their rows, in the order of their begin."""
        for job in [] if self._threads is None else self._threads.take():
            assert self._threads is not None
            state, rows = job.inflight.modules[job.module], job.rows.result()
            module = self._forwards[job.module].module
            holds = job.inflight.defers_update
            start_fused(module, state, rows.by_part, self._threads.wait, defers_update=holds)
            state.num_lookups = rows.num_lookups
            self._note_lookup(module, state, frozenset({WeightOwner.FUSED_BACKWARD}))

    def _note_lookup(self, module: Any, state: ModuleContext, owners: frozenset[WeightOwner]) -> None:
        """Note what an early lookup rests on."""
        state.num_writes |= {owner: num_writes(module, owner) for owner in owners}
        state.autocast = _autocast(module, state.kjt)

    def _look_up(self, inflight: InFlightBatch, owners: frozenset[WeightOwner]) -> None:
        for name, state in inflight.modules.items():
            if (
                state.rows is None
                and state.dist_input is not None
                and parts_to_look_up(self._forwards[name].module, state, owners)
            ):
                if self._threads is not None and WeightOwner.FUSED_BACKWARD in owners:
                    self._begin_in_thread(name, inflight)
                    if self._unpipelined_in_step:  # whose backward writes tables without asking for lookups first
                        self.finish_lookups()
                    continue
                module = self._forwards[name].module
                counts = lookup_counts(module)
                if self.keep_ids:
                    state.ids = state.dist_input
                set_rates = None if self._set_rates is None else partial(self._rates_of, module, state)
                if self._set_rates is not None:
                    state.held.note_rates = partial(self._present_rates, module)
                look_up(module, state, owners, set_rates, defers_update=inflight.defers_update)
                self._note_lookup(module, state, owners)
                done = lookups_since(module, counts)
                if not self._trains:
                    self._uncount(module, done)
                    continue
                state.num_lookups = [a + b for a, b in zip(state.num_lookups or [0] * len(done), done, strict=True)]

    def _rates_of(self, module: Any, state: ModuleContext) -> None:
        """Give the kernels the rates that a batch was trained at, or, before that, those of the schedule."""
        assert self._set_rates is not None
        if state.rates is None:
            self._set_rates()
        else:
            set_kernel_rates(module, state.rates)

    def start_update(self, inflight: InFlightBatch) -> None:
        """Send back the gradients of a batch whose tables are still to be updated."""
        self._to_update[inflight.index] = inflight
        for name, state in inflight.modules.items():
            use_rates = partial(self._use_rates, self._forwards[name].module, state)
            with self._restoring_rates(name, state):
                self._streams.record_stream(state.held.send(use_rates), self._lookup_stream)

    def gradients_are_there(self, batches: Iterable[InFlightBatch], timeout_s: float) -> bool:
        """Whether the gradients of these batches' updates arrive within a time."""
        deadline = time.monotonic() + timeout_s
        held = [state.held for inflight in batches for state in inflight.modules.values()]
        while not all(update.has_arrived for update in held):
            if time.monotonic() > deadline:
                return False
            time.sleep(0.01)
        return True

    def embedding_update(self, inflight: InFlightBatch) -> None:
        """Wait for the gradients of a batch and update the tables that were looked up early for it."""
        self._to_update.pop(inflight.index, None)
        for name in inflight.modules:
            self._update(name, inflight)

    def _update(self, name: str, inflight: InFlightBatch) -> None:
        state, module = inflight.modules[name], self._forwards[name].module
        if not state.held:
            return
        self._observe("wait", Stage.EMBEDDING_UPDATE, inflight.index)
        with self._restoring_rates(name, state):
            state.held.apply(partial(self._use_rates, module, state))

    def _use_rates(self, module: Any, state: ModuleContext, rates: list[float] | None) -> None:
        """Give the kernels the learning rates of the backward whose update comes now."""
        state.rates = rates
        if rates is not None:
            set_kernel_rates(module, rates)

    @contextmanager
    def _restoring_rates(self, name: str, state: ModuleContext) -> Iterator[None]:
        """Give the kernels their present rates back after an update at those of its own backward."""
        if self._set_rates is None:
            yield
            return
        module = self._forwards[name].module
        present = kernel_rates(module)
        try:
            yield
        finally:
            state.rates = None
            set_kernel_rates(module, present)

    def _present_rates(self, module: Any) -> list[float]:
        assert self._set_rates is not None
        self._set_rates()
        return kernel_rates(module)

    def _update_before_a_forward(self, name: str) -> None:
        """Make the updates that a module's own forward is to see: it sees all, whatever the staleness."""
        waiting = [inflight for inflight in self._to_update.values() if name in inflight.modules]
        if waiting:
            self._streams.wait(self._lookup_stream, self._streams.record(StreamName.COMPUTE))  # behind the backward
            with self._streams.on(self._lookup_stream):
                for inflight in waiting:
                    self._update(name, inflight)

    def register_backward_hook(self, inflight: InFlightBatch, stage: Stage, call: Callable[[], None]) -> bool:
        """Have this called where the backward of a batch waits for other ranks; False if nothing would, or should."""
        for handle in self._in_backward:  # some joints outlive their backward
            handle.remove()
        self._in_backward.clear()
        if not self._fills_waits or torch.is_anomaly_enabled():
            # On a device the lookup runs beside the dense part; on a CPU it is work of the same thread. Anomaly mode
            # would keep a backward alive for each graph that is made in it.
            return False
        if self._multi_node and stage in (Stage.INPUT_DATA_DIST, Stage.PREFETCH):
            return False  # both wait for ids, which may be on the link still: gradients would stand behind them
        if any(state.without_graph for state in inflight.modules.values()):
            return False  # a forward that checkpoint() repeats may write tables before this is called
        if inflight.defers_update:
            if stage is not Stage.INPUT_SPLITS_DIST and not self._multi_node:
                # What waits is the end of the backward, for whoever is late. Within a host that is less than rows gain
                # by being on their way before the backward.
                return False
            for state in inflight.modules.values():
                self._in_backward += state.held.call_behind_backward(call)
            return bool(self._in_backward)
        joints: list[torch.Tensor] = []
        for name, state in inflight.modules.items():
            owners = owners_of_parts(self._forwards[name].module)
            found = before_gradients(state.rows, owners.count(WeightOwner.FUSED_BACKWARD))
            if found is None:
                return False
            joints += found
        self._in_backward += [joint.register_hook(lambda _: call()) for joint in joints]
        return bool(joints)

    def drop_lookups(self, inflight: InFlightBatch) -> None:
        """Forget early rows, once their collectives are over; these modules' own forward will run instead."""
        self.finish_lookups()
        for name, state in list(inflight.modules.items()):
            if state.rows is not None or state.outputs:
                self._leave_aside(self._forwards[name].module, state)
                del inflight.modules[name]

    def count_lookups(self, inflight: InFlightBatch, times: int) -> None:
        """Count the early lookups of a batch for the fused optimizers so many times more; -1: take them back."""
        self.finish_lookups()
        for name, state in inflight.modules.items():
            self._uncount(self._forwards[name].module, [-times * num for num in state.num_lookups])

    def drain(self, inflight: InFlightBatch) -> None:
        """Complete every collective that was started for a batch, in the order of its stages."""
        self.finish_lookups()
        if inflight.sizes is not None or any(state.splits is not None for state in inflight.modules.values()):
            self.input_data_dist(inflight)
        self.receive_input(inflight)
        for name, state in inflight.modules.items():
            self._leave_aside(self._forwards[name].module, state)

    def _leave_aside(self, module: Any, state: ModuleContext) -> None:
        """Wait for the all-to-alls of rows that nobody is going to use, and take their lookup back."""
        if state.data is not None:  # ids for a lookup where the module is called, which it was not
            state.data.wait()
            state.data = None
        if state.served or not (state.outputs or state.rows is not None):
            return
        for output in [*state.outputs.values(), *([] if state.rows is None else [state.rows])]:
            output.wait()
        self._uncount(module, state.num_lookups)
        state.served = True


def keyed_jagged_tensors(batch: Any) -> list[KeyedJaggedTensor]:
    """Return all of a batch's."""
    return [kjt for _, kjt in inputs_of(batch)]


MAX_OVERWRITTEN = 3
"""How often early rows are left aside because tables were written, before nothing is looked up early any more."""


def _autocast(module: Any, kjt: KeyedJaggedTensor) -> tuple[bool, torch.dtype] | None:
    """Return the autocast that a lookup runs under now, where it may compute something that this changes."""
    kind = spec_of(module)
    if kind is None or kind.feature_processors is None:
        return None
    device = kjt.device().type
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)


def _waited_for_as_called(rows: Any, *, keeps_saved: bool) -> Any:
    if not isinstance(rows, LazyAwaitable):
        return rows
    return LazyEmbeddings(partial(_keep_saved, rows.wait) if keeps_saved else rows.wait)


def _saving_is_hooked() -> bool:
    """Whether somebody takes what operators save for their backward: a non-reentrant `checkpoint()` does."""
    top = getattr(torch._C._autograd, "_top_saved_tensors_default_hooks", None)
    return top is not None and top(True) is not None


def _keeping_saved() -> AbstractContextManager[Any]:
    """Let operators keep what they save for their backward, whatever hooks there are."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


def _keep_saved(call: Callable[[], Any]) -> Any:
    with _keeping_saved():
        return call()


def _outside_inference_mode() -> AbstractContextManager[Any]:
    """Run kernels that FBGEMM 1.8 does not have in inference mode on a CPU; there is no graph either way."""
    if not torch.is_inference_mode_enabled():
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.no_grad())
    return stack


def _own_graph(trains: bool) -> AbstractContextManager[Any]:
    """Wait for rows with the graph of their lookup, whoever asks first; `checkpoint()` shall not see what it saves."""
    is_hooked = _saving_is_hooked()
    if not trains or (torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not is_hooked):
        return nullcontext()
    stack = ExitStack()
    stack.enter_context(torch.inference_mode(False))
    stack.enter_context(torch.enable_grad())
    if is_hooked:
        stack.enter_context(_keeping_saved())
    return stack


def note_lengths(kjts: Iterable[KeyedJaggedTensor]) -> None:
    """Sum up the lengths of each feature while a batch is on the host: the input dist asks for them.

    Asked on the device, each KeyedJaggedTensor is one more read that the host waits for.
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
