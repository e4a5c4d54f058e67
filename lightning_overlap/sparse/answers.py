"""Decide whether a call of a sharded module gets early embeddings or runs its own forward, on all ranks alike."""

from collections.abc import Callable, Iterator
from contextlib import AbstractContextManager, contextmanager
from functools import partial
from typing import Any

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..dense import saving_is_hooked
from ..runtime import NOTHING, tensors_in
from ..schedules import Stage, StreamName
from ..tables import (
    SentInput,
    count_backwards,
    has_model_parallel_tables,
    no_samples,
    renew_counts,
    tbes,
    without_backward,
    without_graph,
)
from .alike_calls import AlikeCalls
from .flight import SparseFlight
from .gradient_watch import GradientWatch
from .input_sizes import check_types
from .inputs import SparseInputs
from .module_context import ModuleContext, Progress, autocast_of, wait_for
from .pipelined_forward import (
    CHANGED_IN_PLACE,
    OTHER_AUTOCAST,
    WITH_GRADIENTS,
    WRITTEN_IN_STEP,
    EarlyEmbeddings,
    LazyEmbeddings,
    PipelinedForward,
    PipelinedForwards,
    only_input,
)
from .table_updates import TableUpdates
from .update_rates import counting, take_back


class Answers:
    """Answers the calls of all sharded modules of a model, which their pipelined forwards pass to `answer`."""

    def __init__(
        self, forwards: PipelinedForwards, inputs: SparseInputs, updates: TableUpdates, gradients: GradientWatch
    ) -> None:
        self._forwards, self._inputs, self._updates, self._gradients = forwards, inputs, updates, gradients
        self._streams, self._telemetry = forwards.streams, forwards.telemetry
        self._options = options = forwards.options
        compared = [one.name for one in forwards.values() if one.is_over_all]
        self.alike = AlikeCalls(forwards.mismatches, compared, options)
        # Between hosts on a CPU, where the link is idle once all early embeddings of a step have arrived.
        self._sends_within = (
            options.multi_node and options.fills_waits and options.trains and not self._streams.is_async
        )
        self._current: SparseFlight | None = None  # the batch whose step runs, until the step returns
        self._in_step: SparseFlight | None = None  # the same batch, until its backward is over
        self._send_next: Callable[[], None] | None = None  # until it was called, and until the step returns
        # Answers that `checkpoint()` may ask for again until the backward is over, by module and `id` of the input.
        self._kept: dict[tuple[str, int], tuple[SentInput, KeyedJaggedTensor, Any]] = {}
        self._held: list[torch.Tensor] = []  # gradients of embeddings, until the backward is over

    def begin(self, inflight: SparseFlight, send_next: Callable[[], None]) -> None:
        """Begin the step of a batch; `send_next` sends sizes and ids of coming batches."""
        self._forwards.num_steps += 1
        for pipelined in self._forwards.values():
            pipelined.calls.clear()
        self._kept.clear()
        self._held.clear()
        self.alike.begin_step(self._forwards.num_steps, inflight.index)
        self._current = self._in_step = inflight
        # A mode that watches operators (of a host-sync audit) would not see the read of the sizes within the step.
        is_watched = torch._C._len_torch_function_stack() > 0 or torch._C._len_torch_dispatch_stack() > 0
        self._send_next = send_next if self._sends_within and not is_watched else None

    def end(self) -> None:
        """End the step; its backward may follow."""
        self._current = self._send_next = None

    def abandon(self) -> None:
        """Forget the step."""
        self._current = self._in_step = self._send_next = None
        self._kept.clear()
        self._held.clear()

    def forget(self, inflight: SparseFlight) -> None:
        """Let go of the embeddings of a batch whose backward is over."""
        for state in inflight.modules.values():
            state.received = None
            if state.progress is Progress.SERVED and not inflight.defers_update:
                state.advance(Progress.UPDATED)
        self._kept.clear()
        self._held.clear()
        if self._in_step is inflight:
            self._in_step = None

    def answer(self, pipelined: PipelinedForward, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return early embeddings if the module's own forward would give the same; else run that forward.

        The same: in the caller's grad mode, inference mode, autocast and hooks on saved tensors. Only the first call in
        a step gets early embeddings. `checkpoint()` repeats a call in the backward, and gets the same answer again.

        Raises:
            RuntimeError: This rank has to run the module's own forward, and another rank has taken early embeddings.
            ValueError: An id is no row of its table.
        """
        in_backward = torch._C._current_graph_task_id() != -1
        inflight = self._in_step if in_backward else self._current
        given, step = only_input(args, kwargs), self._forwards.num_steps
        look_up_now = own_forward = partial(pipelined.original_forward, *args, **kwargs)
        self._forwards.refuse_trained_weights(pipelined, given)
        self._gradients.note_call(pipelined.name)
        if pipelined.has_sequences and isinstance(given, KeyedJaggedTensor) and not given.lengths().numel():
            raise ValueError(no_samples(self._call(pipelined, inflight)))
        is_noted = False  # in `alike`
        if inflight is not None:
            if not in_backward:
                pipelined.calls.append((args, kwargs))
            elif (kept := self._kept.get((pipelined.name, id(given)))) is not None and kept[0].is_unchanged(given):
                return kept[2]
            state = inflight.modules.get(pipelined.name)
            if state is not None and (
                not state.served or (in_backward and state.embeddings is not None and state.served_in == step)
            ):
                if state.votes and not in_backward:
                    self._note_call(pipelined, inflight)  # before the ranks vote
                    is_noted = True
                reason = self._why_not_early(pipelined, state, given)
                if state.served:
                    if reason is None:
                        return self._serve(state)
                elif self._all_ranks_take_early(pipelined, inflight, reason):
                    if state.outside is not None:
                        raise ValueError(state.outside)
                    state.served_in = step
                    self._forwards.served(pipelined.name)
                    if state.embeddings is not None:
                        if pipelined.is_over_all and not (is_noted or in_backward):
                            self.alike.note_quiet(pipelined.name, inflight)
                        state.advance(Progress.SERVED)
                        return self._serve(state)
                    look_up_now = partial(self._look_up_when_called, inflight, state)
            elif pipelined.name in inflight.missing and not in_backward:
                problem = (
                    f"{self._call(pipelined, inflight)}, another rank does not: its batch has no input for it. Either "
                    "all ranks have to call a sharded module or none: give it an empty KeyedJaggedTensor (lengths of "
                    "zero) if there are no ids."
                )
                self._forwards.check_all_ranks(pipelined.name, problem)
            if not (is_noted or in_backward):
                self._note_call(pipelined, inflight)
            if look_up_now is own_forward and not in_backward:
                self._check_form(pipelined, given, inflight)
            inflight.ran_unpipelined = True
        if isinstance(given, KeyedJaggedTensor):
            renew_counts(given)
        if not in_backward:
            self._forwards.refuse_misfit(pipelined, given, inflight)
        if not in_backward and (outside := self._forwards.ids_outside(pipelined, given, inflight)) is not None:
            raise ValueError(outside)
        self._updates.make_before_forward(pipelined.name)
        # checkpoint() drops what operators save, and repeats the forward in the backward, at another time on each rank:
        # collectives of a repeated lookup would not match. So a lookup keeps its saved tensors, and is not repeated.
        checkpointed = inflight is not None and torch.is_grad_enabled() and saving_is_hooked()
        with _keeping_saved() if checkpointed else NOTHING:
            found = self._on_lookup_stream(pipelined.module, inflight, look_up_now, (args, kwargs))
        # Between two steps and in evaluations no hook sees the end of a backward that may follow.
        in_step = inflight is not None and self._options.trains
        is_counted = torch.is_grad_enabled() and not in_step
        note = partial(self._note_answer, pipelined, is_counted=is_counted)
        batch = None if inflight is None else inflight.index
        as_called = partial(self._received_as_called, batch, in_step=in_step, keeps_saved=checkpointed, note=note)
        answer = tuple(map(as_called, found)) if isinstance(found, tuple) else as_called(found)
        if checkpointed and not in_backward and isinstance(given, KeyedJaggedTensor):
            self._kept[pipelined.name, id(given)] = SentInput(given), given, answer
        return answer

    def _note_answer(self, pipelined: PipelinedForward, answer: Any, *, is_counted: bool) -> None:
        if is_counted:
            count_backwards(pipelined.module, answer)
        self._gradients.watch(pipelined.name, answer)

    def _note_call(self, pipelined: PipelinedForward, inflight: SparseFlight) -> None:
        """Compare a call in which the module's own forward will run with those of other ranks."""
        if not pipelined.is_over_all:
            return
        if has_model_parallel_tables(pipelined.module):
            self.alike.note(pipelined.name, inflight)
        elif torch.is_grad_enabled():  # data-parallel tables have collectives in the backward alone
            self.alike.note_quiet(pipelined.name, inflight)

    def _why_not_early(self, pipelined: PipelinedForward, state: ModuleContext, given: Any) -> str | None:
        if given is not state.kjt:
            return "it was called with another input than the one in the batch"
        if not state.sent.is_unchanged(state.kjt):
            return CHANGED_IN_PLACE
        if not self._options.trains and torch.is_grad_enabled():
            return WITH_GRADIENTS
        if state.embeddings is not None and state.autocast != autocast_of(pipelined.module, state.kjt):
            return OTHER_AUTOCAST
        if state.is_overwritten():
            return WRITTEN_IN_STEP
        return None

    def _all_ranks_take_early(self, pipelined: PipelinedForward, inflight: SparseFlight, reason: str | None) -> bool:
        """Whether all ranks serve this call early; else all run its own forward from now on. `reason`: why not here."""
        if inflight.modules[pipelined.name].votes:
            if self._options.any_rank(reason is not None):
                reason = reason or "another rank called it with another input of the batch"
        elif reason is not None:
            problem = (
                f"rank {self._options.rank}: the early embeddings of {pipelined.name!r} do not fit its call in "
                f"{self._options.step} of batch {inflight.index}: {reason}. Other ranks took theirs. All ranks have to "
                f"call it alike: change inputs before {self._options.step} (on_after_batch_transfer), or use "
                "pipeline='base'."
            )
            self._forwards.check_all_ranks(pipelined.name, problem)
        if reason is not None:
            self._forwards.run_unpipelined(pipelined, reason)
        return reason is None

    def _check_form(self, pipelined: PipelinedForward, given: Any, inflight: SparseFlight) -> None:
        """Check an input's types on all ranks: at the first such call of a step, and if they have changed since."""
        # A module's own forward sends these tensors, and gloo ends the process on data of another size than expected.
        if not isinstance(given, KeyedJaggedTensor):
            return
        takes = getattr(pipelined.module, "takes_weights", None)
        weights, varies = given.weights_or_none() if takes is not False else None, given.variable_stride_per_key()
        if takes and weights is None:
            return  # the module's own forward raises an error
        form = given.lengths().dtype, given.values().dtype, None if weights is None else weights.dtype, varies
        number = len(pipelined.calls)  # calls of one step may differ
        before, pipelined.forms[number] = pipelined.forms.get(number), form
        own_call, group = f"call {number} of {pipelined.name} in its own forward", self._forwards.group
        if before in (None, form) or not has_model_parallel_tables(pipelined.module):
            compared = pipelined.is_over_all and has_model_parallel_tables(pipelined.module)
            if before is None and group is not None and compared:
                check_types({f"the input of {pipelined.name!r}": _in_words(form)}, group)
            self._forwards.served(own_call)
        else:
            problem = (
                f"{self._call(pipelined, inflight)} with {_in_words(form)}, before that with {_in_words(before)}, as "
                "other ranks do: their data would not have the size that this rank expects. Make types, weights and "
                "batch sizes alike on all ranks in the dataset or the collate function."
            )
            self._forwards.check_all_ranks(own_call, problem)

    def _call(self, pipelined: PipelinedForward, inflight: SparseFlight | None) -> str:
        place = "" if inflight is None else f" in {self._options.step} of batch {inflight.index}"
        return f"rank {self._options.rank} calls {pipelined.name!r}{place}"

    def _serve(self, state: ModuleContext) -> EarlyEmbeddings:
        if torch.is_grad_enabled() or not self._options.trains:
            return EarlyEmbeddings(partial(self._receive_embeddings, state))
        state.without_graph = True
        return EarlyEmbeddings(lambda: without_graph(self._receive_embeddings(state)))

    def _receive_embeddings(self, state: ModuleContext) -> Any:
        """Wait for the embeddings on the lookup stream; let the compute stream and the current one use them."""
        is_first = state.received is None
        if state.received is None:
            self._telemetry.observe("wait", Stage.EMBEDDING_LOOKUP, state.batch)
            assert state.embeddings is not None
            with self._streams.on_lookup(), _own_graph() if self._options.trains else NOTHING:
                received = wait_for(state.embeddings)
            state.received = self._streams.made(received, on=self._streams.lookup)
            self._gradients.watch(state.name, received)
            self._order_backward(received, in_step=True)
        with self._telemetry.merge(state.batch if is_first else None):
            self._streams.use_by_caller(state.received)
        if is_first and (send_next := self._send_next) is not None:
            assert self._current is not None
            # Tensors made in inference mode train nothing.
            other_modes = torch.is_inference_mode_enabled() or saving_is_hooked()
            states = self._current.modules.values()
            if not other_modes and all(one.embeddings is None or one.received is not None for one in states):
                self._send_next = None
                with torch.enable_grad(), torch.autocast("cpu", enabled=False):
                    send_next()
        return state.received.value

    def _order_backward(self, embeddings: Any, *, in_step: bool) -> None:
        """Order a backward through embeddings of the lookup stream with the compute stream.

        Autograd adds in place into a gradient that nobody else on the host holds. The lookup stream may still have to
        read it then: its node was launched, and has let go of the gradient. So gradients are held until the backward is
        over. Source: `can_accumulate_inplace`.

        With `in_step` False no walker sees that end: between two steps, in an evaluation, or if a module does its own
        fetching. Then the compute stream waits for the update of the tables at the end of the backward.
        """
        if not self._streams.is_async or self._streams.lookup is StreamName.COMPUTE:
            return
        for tensor in tensors_in(embeddings):
            if tensor.requires_grad:
                tensor.register_hook(self._held.append)
                if not in_step:
                    tensor.register_hook(self._call_at_end)

    def _call_at_end(self, gradient: torch.Tensor) -> None:
        torch.autograd.Variable._execution_engine.queue_callback(self._end_backward)

    def _end_backward(self) -> None:
        self._held.clear()
        self._streams.order(self._streams.lookup, then=StreamName.COMPUTE)

    def _received_as_called(
        self, batch: int | None, found: Any, *, in_step: bool, keeps_saved: bool, note: Callable[[Any], None]
    ) -> Any:
        """Return an answer of the lookup stream to the caller; an awaitable waits in the modes of the call."""
        streams = self._streams

        def hand_over(received: Any) -> Any:
            self._order_backward(received, in_step=in_step)
            with self._telemetry.merge(batch):
                streams.use_by_caller(streams.made(received, on=streams.lookup))
            note(received)
            return received

        def receive() -> Any:
            with streams.on_lookup(), _keeping_saved() if keeps_saved else NOTHING:
                received = found.wait()
            return hand_over(received)

        return LazyEmbeddings(receive) if isinstance(found, LazyAwaitable) else hand_over(found)

    def _on_lookup_stream(
        self, module: Any, inflight: SparseFlight | None, look_up_now: Callable[[], Any], given: Any
    ) -> Any:
        """Run a module's own lookup on the lookup stream; without a backward it does not count for the optimizers.

        A step may look up the tables of a module several times. If two backwards ran on two streams, nothing would
        order their updates of the same rows.
        """
        streams = self._streams
        streams.use_of_caller(given, on=streams.lookup)
        if self._options.set_rates is not None:
            self._options.set_rates()
        # No batch is in flight in an evaluation by hand, or if a module does its own fetching (`dataloader_iter`).
        trains = self._options.trains and (inflight is not None or torch.is_grad_enabled())
        stage = Stage.EMBEDDING_LOOKUP
        timed = NOTHING if inflight is None else self._telemetry.timed(stage, inflight.index, self._streams.lookup)
        # FBGEMM 1.8 lacks kernels in inference mode on a CPU; there is no graph either way.
        own_mode = _outside_inference_mode(grad=False) if torch.is_inference_mode_enabled() else NOTHING
        if trains:
            with self._streams.on_lookup(), timed, own_mode:
                found = look_up_now()
            # The caller may change its input or the tables next. The kernels read both, and write row numbers.
            streams.use_by_caller(streams.made(given, on=streams.lookup))
            return found
        num_lookups: list[int] = []
        with self._streams.on_lookup(), without_backward(module), counting(tbes(module), num_lookups), timed, own_mode:
            found = look_up_now()
        take_back(tbes(module), num_lookups, self._streams)
        streams.use_by_caller(streams.made(given, on=streams.lookup))
        return found

    def _look_up_when_called(self, inflight: SparseFlight, state: ModuleContext) -> Any:
        """Look up ids that were sent early, at the module's call (managed collision: the lookup itself writes)."""
        stream = inflight.done[Stage.INPUT_DATA_DIST].on
        with self._streams.on(stream):
            received = self._inputs.receive_input(inflight)
        self._streams.use(self._streams.made(received, on=stream), on=self._streams.lookup)
        dist_input, state.dist_input = state.dist_input, None
        found = state.module.compute_and_output_dist(state.context, dist_input)
        state.advance(Progress.LOOKED_UP)
        state.advance(Progress.SERVED)
        return found


def _in_words(form: tuple[torch.dtype, torch.dtype, torch.dtype | None, bool]) -> str:
    lengths, ids, weights, varies = (str(part).removeprefix("torch.") for part in form)
    told = [f"lengths of {lengths}", f"ids of {ids}"]
    told += [f"weights of {weights}"] if weights != "None" else []
    return ", ".join([*told, "batch sizes that vary by feature"] if varies == "True" else told)


def _keeping_saved() -> AbstractContextManager[Any]:
    """Within this context operators keep saved tensors until their backward, whatever hooks are active outside."""
    return torch.autograd.graph.saved_tensors_hooks(lambda tensor: tensor, lambda tensor: tensor)


@contextmanager
def _outside_inference_mode(*, grad: bool, keeps_saved: bool = False) -> Iterator[None]:
    with torch.inference_mode(False), torch.set_grad_enabled(grad), _keeping_saved() if keeps_saved else NOTHING:
        yield


def _own_graph() -> AbstractContextManager[Any]:
    """Within this context a wait connects embeddings to the graph of their lookup, whatever the caller's modes."""
    is_hooked = saving_is_hooked()
    if torch.is_grad_enabled() and not torch.is_inference_mode_enabled() and not is_hooked:
        return NOTHING
    return _outside_inference_mode(grad=True, keeps_saved=is_hooked)
