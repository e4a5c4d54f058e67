"""Stand in for the `forward` of one sharded module: early embeddings, the same again in a backward, or its own."""

import warnings
from collections.abc import Callable
from functools import partial
from typing import Any

import torch
from torchrec.distributed.types import LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torch import current_backward, never_compiled, saving_is_hooked
from ..runtime import NOTHING, Made, Path
from ..schedules import Stage
from ..tables import (
    TRAINED,
    IdRanges,
    SentInput,
    check_torchrec,
    count_backwards,
    has_model_parallel_tables,
    holds_sequences,
    ids_fit_32_bits,
    no_samples,
    renew_counts,
    takes_weights,
    tbes,
    version_in,
    why_never_early,
    without_backward,
)
from .batch_inputs import only_input
from .embeddings import EarlyEmbeddings, LazyEmbeddings
from .grad_modes import keeping_saved, outside_inference_mode
from .input_sizes import check_types
from .misfits import misfit
from .module_flight import ModuleFlight, Progress, autocast_of
from .reasons import ADVICE, CALL, CHANGED_IN_PLACE, OTHER_AUTOCAST, WITH_GRADIENTS, WRITTEN_IN_STEP
from .sent_updates import SentUpdates
from .shared import Shared
from .sparse_batch import SparseBatch
from .update_rates import counting, take_back, updates_at_present_rate


class ModuleForward:
    """The `forward` of one sharded module while a `SparsePipeline` is attached.

    A call gets early embeddings if the module's own forward would give the same: in the caller's grad mode, inference
    mode, autocast and hooks on saved tensors. Only the first call in a step gets them.
    """

    former: Any  # the instance's `forward` before, another pipeline's; None if the instance had only the class's

    def __init__(self, name: str, module: Any, shared: Shared, updates: SentUpdates) -> None:
        check_torchrec(module)
        self.name, self.module, self._shared, self._updates = name, module, shared, updates
        self._ranges, self.has_sequences = IdRanges(module), holds_sequences(module)
        # Found once: they walk all tables.
        self._is_sent = has_model_parallel_tables(module)
        self.narrow = shared.options.multi_node and ids_fit_32_bits(module)  # whether ids are sent as 32 bits
        present = vars(module).get("forward")
        self._original: Callable[..., Any] = present._original if isinstance(present, ModuleForward) else module.forward
        self.path: Path | None = None  # of its input in the batch; None before `discover`, and if it is no object of it
        self.keys: list[str] = []  # of its input; other inputs in the batch may have the same keys
        self._forms: dict[int, Any] = {}  # types of the tensors that its own forward has sent, by call of a step
        # Why it runs in its own forward; None if it can be looked up early.
        prefetches = shared.options.looks_up_cached
        self.unpipelined_reason: str | None = why_never_early(module, shared.group, prefetches=prefetches)
        self.is_on_all_ranks = self.unpipelined_reason is None  # whether its tables are surely sharded over all ranks
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # arguments of its calls in the step that runs

    def __str__(self) -> str:
        return f"{self.name!r} ({type(self.module).__name__})"

    @property
    def early(self) -> bool:
        """Whether the lookup of coming batches starts early."""
        return self.path is not None and self.unpipelined_reason is None

    def has_keys_of(self, kjt: KeyedJaggedTensor) -> bool:
        """Whether its input has the keys of this one, in whatever order."""
        keys = kjt.keys()
        return keys == self.keys or (len(keys) == len(self.keys) and set(keys) == set(self.keys))

    @never_compiled
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the embeddings."""
        answer = self.answer(args, kwargs)
        for watcher in self._shared.watchers.answered:
            watcher.answered(self, answer)
        return answer

    def answer(self, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the embeddings.

        Raises:
            RuntimeError: This rank has to run the module's own forward, and another rank has taken early embeddings.
            ValueError: An id is no row of its table.
        """
        given, step = only_input(args, kwargs), self._shared.step
        in_backward = current_backward() != -1
        flight: SparseBatch | None = step.awaiting_backward if in_backward else step.current
        self._refuse_trained_weights(given)
        in_training_step = self._shared.options.trains and flight is not None
        if in_training_step and version_in(self.module) != TRAINED and torch.is_grad_enabled():
            raise RuntimeError(
                f"{self.name!r} was called with gradients while ExponentialMovingAverage.averaged() is active: a "
                "backward would mix averages and trained weights. Look averages up under torch.no_grad()."
            )
        if self.has_sequences and isinstance(given, KeyedJaggedTensor) and not given.lengths().numel():
            raise ValueError(no_samples(self._call_of(flight)))
        for watcher in self._shared.watchers.called:
            watcher.called(self, (args, kwargs), flight, in_backward=in_backward)
        look_up: Callable[[], Any] = partial(self._original, *args, **kwargs)
        sends_ids = True  # whether this call does
        if flight is None:
            return self._own(given, (args, kwargs), look_up, None, in_backward=in_backward)
        if in_backward:
            if (replayed := self._replayed(given, flight)) is not None:
                return replayed
        else:
            self.calls.append((args, kwargs))
        is_noted = in_backward  # whether the ranks have compared this call
        module_flight = flight.modules.get(self.name)
        if module_flight is not None and not module_flight.served and not self._has_other_weights(module_flight):
            if module_flight.votes and not is_noted:
                self._note_call(flight)  # before the ranks vote
                is_noted = True
            if self._all_ranks_take_early(module_flight, given, flight):
                if module_flight.embeddings is not None:
                    if not is_noted and self.is_on_all_ranks:
                        for watcher in self._shared.watchers.called_quietly:
                            watcher.called_quietly(self, flight)
                    return self._early(module_flight)
                look_up, sends_ids = partial(self._look_up_sent_ids, module_flight, flight), False
        elif module_flight is None and self.name in flight.missing and not in_backward:
            self._check_all_lack_input(flight)
        if not is_noted:
            self._note_call(flight)
        if sends_ids and not in_backward:
            self._check_form(given, flight)
        flight.ran_unpipelined = True
        # What was sent early was checked before, and its ids may be released since (`release_features`).
        return self._own(given, (args, kwargs), look_up, flight, in_backward=in_backward, checks=sends_ids)

    # Early embeddings.

    def _has_other_weights(self, module_flight: ModuleFlight) -> bool:
        """Whether the module has averages now and the early lookup had trained weights, or the other way round.

        The same on all ranks. The early embeddings then stay for another call in the step.
        """
        now = version_in(self.module)
        if module_flight.has_early_lookup:
            return now != module_flight.weights
        return now != TRAINED and self._shared.options.trains

    def _early(self, module_flight: ModuleFlight) -> EarlyEmbeddings:
        """Return the embeddings of an early lookup, at the first call in a step."""
        module_flight.advance(Progress.SERVED)
        return module_flight.serve()

    def _replayed(self, given: Any, flight: SparseBatch) -> Any:
        """Return what the same call got in the forward, if `checkpoint()` repeats it in the backward; else None."""
        step = self._shared.step
        sent, _, answer = step.kept_answers.get((self.name, id(given)), (None, None, None))
        if sent is not None and sent.is_unchanged(given):
            return answer
        module_flight = flight.modules.get(self.name)
        if module_flight is None or module_flight.embeddings is None:
            return None
        if not module_flight.served or module_flight.served_in != step.number:
            return None
        return module_flight.serve() if self._why_not_early(module_flight, given) is None else None

    def _why_not_early(self, module_flight: ModuleFlight, given: Any) -> str | None:
        """Return why the early embeddings are not what the module's own forward would return now, or None."""
        kjt, is_looked_up = module_flight.kjt, module_flight.embeddings is not None
        if given is not kjt:
            return "it was called with another input than the one in the batch"
        if not module_flight.sent.is_unchanged(kjt):
            return CHANGED_IN_PLACE
        if not self._shared.options.trains and torch.is_grad_enabled():
            return WITH_GRADIENTS
        if is_looked_up and module_flight.autocast != autocast_of(self.module, kjt):
            return OTHER_AUTOCAST
        if module_flight.is_overwritten():
            return WRITTEN_IN_STEP
        return None

    def _all_ranks_take_early(self, module_flight: ModuleFlight, given: Any, flight: SparseBatch) -> bool:
        """Whether all ranks serve this call early; else all run the module's own forward from now on.

        A ValueError if an id of the early lookup is no row.
        """
        options, reason = self._shared.options, self._why_not_early(module_flight, given)
        if module_flight.votes:
            if options.any_rank(reason is not None):
                reason = reason or "another rank called it with another input of the batch"
        elif reason is not None:
            problem = (
                f"rank {options.rank}: the early embeddings of {self.name!r} do not fit its call in "
                f"{options.method} of batch {flight.index}: {reason}. Other ranks took theirs. All ranks have to "
                f"call it alike: change inputs before {options.method} (on_after_batch_transfer), or use "
                "pipeline='base'."
            )
            self._refuse_unusual_call(self.name, problem)
        if reason is not None:
            self.run_unpipelined(reason)
            return False
        if module_flight.outside is not None:
            raise ValueError(module_flight.outside)
        module_flight.claim(self._shared.step.number)
        self.note_usual_call(self.name)
        return True

    def _look_up_sent_ids(self, module_flight: ModuleFlight, flight: SparseBatch) -> Any:
        """Look up, in the call, ids that were sent early."""
        streams, stream = self._shared.streams, flight.issued[Stage.INPUT_DATA_DIST].on
        with streams.on(stream):
            received = flight.receive_ids()
        streams.use(Made(received, stream), on=streams.lookup)
        return module_flight.look_up_when_called()

    # The module's own forward.

    def _own(
        self,
        given: Any,
        arguments: Any,
        look_up: Callable[[], Any],
        flight: SparseBatch | None,
        *,
        in_backward: bool,
        checks: bool = True,
    ) -> Any:
        """Run the module's own forward, or another lookup within the call, on the lookup stream.

        `checks`: whether the input is to be checked.
        """
        shared = self._shared
        if checks and isinstance(given, KeyedJaggedTensor):
            renew_counts(given)
        if checks and not in_backward:
            self.refuse_misfit(given, flight)
            if (outside := self.ids_outside(given, flight)) is not None:
                raise ValueError(outside)
        self._updates.make_before_forward(self.name)
        # checkpoint() drops what operators save, and repeats the forward in the backward, at another time on each rank:
        # collectives of a repeated lookup would not match. So a lookup keeps its saved tensors, and is not repeated.
        checkpointed = flight is not None and torch.is_grad_enabled() and saving_is_hooked()
        # Between two steps and in evaluations no hook sees the end of a backward that may follow.
        in_step = flight is not None and shared.options.trains
        batch = None if flight is None else flight.index
        hand_over = partial(self._hand_over, batch, in_step=in_step, keeps_saved=checkpointed)
        with keeping_saved() if checkpointed else NOTHING:
            found = self._on_lookup_stream(look_up, arguments, flight)
        answer = tuple(map(hand_over, found)) if isinstance(found, tuple) else hand_over(found)
        if checkpointed and not in_backward and isinstance(given, KeyedJaggedTensor):
            shared.step.kept_answers[self.name, id(given)] = SentInput(given), given, answer
        return answer

    def _on_lookup_stream(self, look_up: Callable[[], Any], arguments: Any, flight: SparseBatch | None) -> Any:
        """Run a module's own lookup on the lookup stream; without a backward it does not count for the optimizers.

        A step may look up the tables of a module several times. If two backwards ran on two streams, nothing would
        order their updates of the same rows.
        """
        streams, options = self._shared.streams, self._shared.options
        streams.take_from_caller(arguments, on=streams.lookup)
        if options.set_rates is not None:
            options.set_rates()
        # No batch is in flight in an evaluation by hand, or if a module does its own fetching (`dataloader_iter`).
        trains = options.trains and (flight is not None or torch.is_grad_enabled())
        telemetry, stage = self._shared.telemetry, Stage.EMBEDDING_LOOKUP
        timed = NOTHING if flight is None else telemetry.timed(stage, flight.index, streams.lookup)
        # FBGEMM 1.8 lacks kernels in inference mode on a CPU; there is no graph either way.
        own_mode = outside_inference_mode(grad=False) if torch.is_inference_mode_enabled() else NOTHING
        num_lookups: list[int] = []
        if trains:
            mends = self._shared.mends_weights(self.module)
            with streams.on_lookup(), timed, own_mode, updates_at_present_rate(self.module, None, mends_weights=mends):
                found = look_up()
        else:
            kernels = tbes(self.module)
            with streams.on_lookup(), without_backward(self.module), counting(kernels, num_lookups), timed, own_mode:
                found = look_up()
            take_back(kernels, num_lookups, streams)
        # The caller may change its input or the tables next. The kernels read both, and write row numbers.
        with telemetry.merge(None if flight is None else flight.index):
            streams.give_to_caller(Made(arguments, streams.lookup))
        return found

    def _hand_over(self, batch: int | None, found: Any, *, in_step: bool, keeps_saved: bool) -> Any:
        """Return an answer of the lookup stream to the caller; an awaitable waits in the modes of the call."""
        streams = self._shared.streams
        is_counted = torch.is_grad_enabled() and not in_step

        def hand_over(received: Any) -> Any:
            self._shared.received(self.name, received, in_step=in_step)
            with self._shared.telemetry.merge(batch):
                streams.give_to_caller(Made(received, streams.lookup))
            if is_counted:
                count_backwards(self.module, received)
            return received

        def receive() -> Any:
            with streams.on_lookup(), keeping_saved() if keeps_saved else NOTHING:
                received = found.wait()
            return hand_over(received)

        return LazyEmbeddings(receive) if isinstance(found, LazyAwaitable) else hand_over(found)

    # What ranks compare.

    def _note_call(self, flight: SparseBatch) -> None:
        """Tell watchers of a call in which the module's own forward will run, if all ranks have to make it."""
        if not self.is_on_all_ranks:
            return
        watchers = self._shared.watchers
        if self._is_sent:
            for watcher in watchers.collective_begins:
                watcher.collective_begins(self, flight)
        elif torch.is_grad_enabled():  # data-parallel tables have collectives in the backward alone
            for watcher in watchers.called_quietly:
                watcher.called_quietly(self, flight)

    def _check_all_lack_input(self, flight: SparseBatch) -> None:
        """Raise a RuntimeError unless all ranks call the module, though some rank's batch has no input for it."""
        problem = (
            f"{self._call_of(flight)}, another rank does not: its batch has no input for it. Either "
            "all ranks have to call a sharded module or none: give it an empty KeyedJaggedTensor (lengths of "
            "zero) if there are no ids."
        )
        self._refuse_unusual_call(self.name, problem)

    def _check_form(self, given: Any, flight: SparseBatch) -> None:
        """Check an input's types on all ranks: at the first such call of a step, and if they have changed since."""
        # A module's own forward sends these tensors, and gloo ends the process on data of another size than expected.
        if not isinstance(given, KeyedJaggedTensor):
            return
        takes = getattr(self.module, "takes_weights", None)
        weights, varies = given.weights_or_none() if takes is not False else None, given.variable_stride_per_key()
        if takes and weights is None:
            return  # the module's own forward raises an error
        form = given.lengths().dtype, given.values().dtype, None if weights is None else weights.dtype, varies
        number = len(self.calls)  # calls of one step may differ
        before, self._forms[number] = self._forms.get(number), form
        own_call, group = f"call {number} of {self.name} in its own forward", self._shared.group
        is_sent = self._is_sent
        if before in (None, form) or not is_sent:
            if before is None and group is not None and self.is_on_all_ranks and is_sent:
                check_types({f"the input of {self.name!r}": _in_words(form)}, group)
            self.note_usual_call(own_call)
        else:
            problem = (
                f"{self._call_of(flight)} with {_in_words(form)}, before that with {_in_words(before)}, as "
                "other ranks do: their data would not have the size that this rank expects. Make types, weights and "
                "batch sizes alike on all ranks in the dataset or the collate function."
            )
            self._refuse_unusual_call(own_call, problem)

    def note_usual_call(self, call: str) -> None:
        """Note that this rank has made a call as before: from early embeddings, or with tensors of the same types."""
        if (mismatches := self._shared.mismatches) is not None:
            mismatches.passed(("unusual", call), self._shared.step.number)

    def _refuse_unusual_call(self, call: str, problem: str) -> None:
        """Raise a RuntimeError with `problem` if another rank has passed a call, or does not make it in time."""
        # No collective can compare them: ranks that have passed the call issue none for it.
        mismatches, step = self._shared.mismatches, self._shared.step.number
        waits = f"before its call of {self.name!r}, whose input has other types than before"
        if mismatches is not None and mismatches.other(("unusual", call), step, waits=waits) is not None:
            raise RuntimeError(problem)

    # Inputs that are refused.

    def _refuse_trained_weights(self, given: Any) -> None:
        """Raise a RuntimeError if weights of ids would be sent that the loss trains: their gradients do not return."""
        weights = given.weights_or_none() if isinstance(given, KeyedJaggedTensor) else None
        if (
            isinstance(weights, torch.Tensor)
            and weights.requires_grad
            and torch.is_grad_enabled()
            and self._shared.group is not None
            and takes_weights(self.module)
            and self._is_sent
        ):
            raise RuntimeError(
                f"the weights of the ids passed to {self.name!r} are trained, but are sent to other ranks, which "
                "return no gradients. Weight the embeddings of an EmbeddingCollection, make the tables data-parallel, "
                "take a FeatureProcessedEmbeddingBagCollection, or .detach() the weights."
            )

    def refuse_misfit(self, given: Any, flight: SparseBatch | None) -> None:
        """Raise a ValueError if lengths, ids and weights of an input do not fit each other."""
        problem = misfit(given) if isinstance(given, KeyedJaggedTensor) else None
        if problem is not None:
            raise ValueError(
                f"{self._input_of(flight)}: {problem}. Give one length for each feature and sample, "
                "feature by feature, and as many ids (and weights, if any) as the lengths sum up to."
            )

    def ids_outside(self, given: Any, flight: SparseBatch | None) -> str | None:
        """Return the error about an id of an input that is no row; None if there is none, or only a warning."""
        options = self._shared.options
        if options.out_of_range_ids == "fbgemm" or not isinstance(given, KeyedJaggedTensor):
            return None
        if (found := self._ranges.first_outside(given)) is None:
            return None
        feature, problem = found
        text = f"{self._input_of(flight)}: {problem}."
        if options.out_of_range_ids == "error":
            return (
                f"{text} Map ids to rows in the dataset, or raise num_embeddings. With out_of_range_ids='warning' the "
                "strategy trains on as FBGEMM does: an id outside reads and trains row 0 of the table's shard."
            )
        self.warn_once(feature, f"{text} FBGEMM takes row 0 of the table's shard for an id outside.")
        return None

    def _call_of(self, flight: SparseBatch | None) -> str:
        options = self._shared.options
        place = "" if flight is None else f" in {options.method} of batch {flight.index}"
        return f"rank {options.rank} calls {self.name!r}{place}"

    def _input_of(self, flight: SparseBatch | None) -> str:
        options = self._shared.options
        where = "" if flight is None else f" for batch {flight.index} of {options.method}"
        return f"rank {options.rank}, the input of {self.name!r}{where}"

    # Warnings.

    def run_unpipelined(self, reason: str) -> None:
        """Run the module in its own forward from now on; warn once, with the reason."""
        if self.unpipelined_reason is None:
            self.unpipelined_reason = reason
            advice = ADVICE.get(reason, CALL).format(step=self._shared.options.method)
            self.warn_of_own_forward(reason, f" {advice}")

    def warn_of_own_forward(self, reason: str, advice: str = "") -> None:
        """Warn once that the module is not looked up early, and why."""
        own = f"The lookup of {self} is not overlapped: {reason}. It runs in its own forward, on current weights."
        if self._shared.options.rank == 0:
            self.warn_once(reason, own + advice)

    def warn_once(self, about: str, text: str) -> None:
        """Warn, once in a run for each subject."""
        warned, known = self._shared.options.warned, (self.name, about)
        if known not in warned:
            warned.add(known)
            warnings.warn(text, UserWarning, stacklevel=2)

    # Attaching it to the module.

    def attach(self) -> None:
        """Become the module's `forward`."""
        present = vars(self.module).get("forward")
        if present is not self:
            self.former = present
            self.module.forward = self

    def detach(self) -> None:
        """Give the module its former forward back."""
        if vars(self.module).get("forward") is not self:
            return
        if self.former is None:
            del self.module.forward
        else:
            self.module.forward = self.former


def _in_words(form: tuple[torch.dtype, torch.dtype, torch.dtype | None, bool]) -> str:
    lengths, ids, weights, varies = form
    words = [f"lengths of {_name_of(lengths)}", f"ids of {_name_of(ids)}"]
    if weights is not None:
        words.append(f"weights of {_name_of(weights)}")
    if varies:
        words.append("batch sizes that vary by feature")
    return ", ".join(words)


def _name_of(dtype: torch.dtype) -> str:
    return str(dtype).removeprefix("torch.")
