"""Replace the forward of sharded modules by a pipelined one; find which input of the batch feeds which module."""

from __future__ import annotations

import itertools
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from torchrec.distributed import comm_ops, types, utils
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin, ShardedModule
from torchrec.sparse import jagged_tensor
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..distributed import Mismatches
from ..runtime import InFlightBatch, Path, RangesLeftOut, is_profiled, leaves, resolve
from ..tables import (
    IdRanges,
    SentInput,
    check_torchrec,
    has_model_parallel_tables,
    holds_sequences,
    takes_weights,
    why_never_early,
)
from .options import SparseOptions

_num_made = itertools.count()
_RANGES = RangesLeftOut([comm_ops, types, utils, jagged_tensor])

# Why a module runs in its own forward, and how to avoid it.
WRITTEN = (
    "its tables are written between two steps again and again (or their learning rates are set by hand, which only "
    "combined_optimizer can move while tables are looked up early)"
)
WRITTEN_IN_STEP = "its tables were written after its early lookup"
CHANGED_IN_PLACE = "its input was changed in place after its ids had been sent"
WITH_GRADIENTS = "it was called with gradients enabled in an evaluation"
OTHER_AUTOCAST = "it was called under another autocast than its early lookup"
_NOT_AT_FIRST = "it was not called for the first batch"
_NOT_FOR_ALL = "it was not called for a batch that has its input"

_CALL = (
    "To overlap it, call it once per {step} with a KeyedJaggedTensor that is part of the batch (made in the dataset, "
    "the collate function, on_before_batch_transfer or on_after_batch_transfer), or that a method decorated with "
    "@lightning_overlap.staged makes of the batch."
)
_WRITE_SELDOM = (
    "To overlap it, write its tables seldom, for example once an epoch: each time one lookup is repeated. Or train "
    "with pipeline='sparse_dist', which sends the ids early and looks up nothing early."
)
_CALL_ALWAYS = (
    "To overlap it, call it in every {step}, also in one that returns early: call it first, then return (None, say, to "
    "skip the batch)."
)
_ADVICE: Mapping[str, str] = {
    _NOT_AT_FIRST: _CALL_ALWAYS,
    _NOT_FOR_ALL: _CALL_ALWAYS,
    WRITTEN: _WRITE_SELDOM,
    WRITTEN_IN_STEP: _WRITE_SELDOM,
    CHANGED_IN_PLACE: "To overlap it, change its input in on_after_batch_transfer, or change a copy.",
    WITH_GRADIENTS: "To overlap it, call it without gradients (inference_mode of the Trainer, torch.no_grad).",
    OTHER_AUTOCAST: "To overlap it, leave autocast to Trainer(precision=...).",
}
"""Advice by reason; the other reasons take `_CALL`."""


class LazyEmbeddings(LazyGetItemMixin[str, Any], LazyAwaitable[Any]):  # type: ignore[misc]
    """Embeddings that wait at their first use, in the grad mode in which the module was called.

    TorchRec's awaitables wait in the mode of the first use. If a step first reads embeddings under `no_grad`, for
    example for a statistic, they would have no gradient when it trains on them afterwards.

    Args:
        receive: Waits for the embeddings and returns them: a KeyedTensor, or a dict of JaggedTensors by feature.
    """

    def __init__(self, receive: Callable[[], Any]) -> None:
        super().__init__()
        self._receive = receive
        self._mode = _grad_mode()

    # Methods of an EmbeddingCollection's dict that TorchRec's awaitables lack.
    def __iter__(self) -> Iterator[str]:
        return iter(self.keys())

    def __contains__(self, key: object) -> bool:
        return key in self.keys()

    def __len__(self) -> int:
        return len(self.keys())

    def wait(self) -> Any:
        """Return the embeddings; without a profiler, skip TorchRec's `wait`, whose profiler range takes 5 us."""
        return super().wait() if is_profiled() or self.callbacks else self._wait_impl()

    def _wait_impl(self) -> Any:
        if _grad_mode() == self._mode:
            return self._receive()
        grad, inference = self._mode
        with torch.inference_mode(inference), torch.set_grad_enabled(grad):
            return self._receive()


class EarlyEmbeddings(LazyEmbeddings):
    """Embeddings of an early lookup.

    TorchRec's own pipelined forwards wait where the module is called. These wait at the first use, so a bottom MLP
    that runs in between still overlaps with the all-to-all.
    """


def _grad_mode() -> tuple[bool, bool]:
    """Return whether gradients are enabled, and whether inference mode is."""
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


_OWN = "{} in its own forward"
"""The name of a call where ranks compare the tensors that own forwards send."""

Answer = Callable[["PipelinedForward", tuple[Any, ...], dict[str, Any]], Any]
"""Returns the embeddings for a call of a module's pipelined forward with these arguments."""


class PipelinedForward:
    """The `forward` of one sharded module while a pipeline is attached.

    `prefetches` says whether tables in a UVM cache can be looked up early.

    Raises:
        ImportError: The installed TorchRec lacks a private name that is used for this module.
    """

    def __init__(
        self, name: str, module: ShardedModule[Any, Any, Any, Any], group: dist.ProcessGroup | None, prefetches: bool
    ) -> None:
        check_torchrec(module)
        self.name, self.module = name, module
        self.ranges = IdRanges(module)
        self.before: Any = vars(module).get("forward")
        """The instance's former `forward`, another pipeline's; None if the instance had only the class's."""
        self.original_forward: Callable[..., Any] = (
            self.before.original_forward if isinstance(self.before, PipelinedForward) else module.forward
        )
        self.path: Path | None = None
        """Where in the batch its input is; None before `discover`, and if its input is no object of the batch."""
        self.keys: frozenset[str] = frozenset()
        """Keys of its input; a step may pass another KeyedJaggedTensor of the batch with the same keys instead."""
        self.form: Any = None
        """Types of the tensors that the last call of its own forward has sent; None before the first call."""
        self.takes_part = False
        """Whether the exchange of sizes has columns for its input.

        All ranks set this alike in `discover`. If the module runs unpipelined later on a rank, the columns stay.
        """
        self.unpipelined_reason: str | None = why_never_early(module, group, prefetches=prefetches)
        """Why it runs in its own forward; None if it can be looked up early."""
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []
        """Arguments of its calls in the step that runs."""
        # Inputs of this step's calls, by `id`, each with its answer, for `checkpoint()`.
        self._answers: dict[int, tuple[SentInput, KeyedJaggedTensor, Any]] = {}

    def keep_answer(self, given: Any, answer: Any) -> None:
        """Keep the answer to a call with this input until `forget_answers`: `checkpoint()` repeats the call."""
        if isinstance(given, KeyedJaggedTensor):
            self._answers[id(given)] = SentInput(given), given, answer

    def answer_again(self, given: Any) -> Any:
        """Return the kept answer for an input that has not changed since; else None."""
        sent, known, answer = self._answers.get(id(given), (None, None, None))
        return answer if sent is not None and known is given and sent.is_unchanged(given) else None

    def forget_answers(self) -> None:
        """Let go of the kept answers."""
        self._answers.clear()

    def __str__(self) -> str:
        return f"{self.name!r} ({type(self.module).__name__})"

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the embeddings."""
        return self._answer(self, args, kwargs)

    def attach(self, answer: Answer) -> None:
        """Replace the module's forward; `answer` returns the embeddings of each call."""
        self._answer = answer
        if vars(self.module).get("forward") is not self:
            self.before = vars(self.module).get("forward")
            self.module.forward = self

    def detach(self) -> None:
        """Restore the former forward."""
        if vars(self.module).get("forward") is not self:
            return
        if self.before is None:
            del self.module.forward
        else:
            self.module.forward = self.before

    @property
    def early(self) -> bool:
        """Whether the lookup of coming batches starts early."""
        return self.path is not None and self.unpipelined_reason is None


class PipelinedForwards(dict[str, PipelinedForward]):
    """The pipelined forward of each sharded module of a model, by the module's name."""

    def __init__(
        self,
        modules: Mapping[str, ShardedModule[Any, Any, Any, Any]],
        group: dist.ProcessGroup | None,
        options: SparseOptions,
    ) -> None:
        super().__init__(
            (name, PipelinedForward(name, module, group, options.looks_up_cached)) for name, module in modules.items()
        )
        self._group, self.num_steps = group, 0
        self._step, self._rank, self._warned = options.step, options.rank, options.warned
        self._out_of_range_ids = options.out_of_range_ids
        key = f"lightning_overlap/{next(_num_made)}"  # all ranks make as many
        self._mismatches = (
            None
            if group is None or options.store is None
            else Mismatches(options.store, key, group.size(), options.timeout_s)
        )

    def attach(self, answer: Answer) -> None:
        """Replace the modules' forwards; `answer` returns the embeddings of each call."""
        for pipelined in self.values():
            pipelined.attach(answer)
        _RANGES.begin(self)

    def detach(self) -> None:
        """Give every module its former forward back."""
        for pipelined in self.values():
            pipelined.detach()
        _RANGES.end(self)
        if self._mismatches is not None:
            self._mismatches.end()

    def refuse_trained_weights(self, pipelined: PipelinedForward, given: Any) -> None:
        """Refuse to send weights of ids that the loss trains: TorchRec never returns their gradients.

        Raises:
            RuntimeError: The weights of the module's input have a graph.
        """
        weights = given.weights_or_none() if isinstance(given, KeyedJaggedTensor) else None
        trained = isinstance(weights, torch.Tensor) and weights.requires_grad and torch.is_grad_enabled()
        if trained and not takes_weights(pipelined.module):
            return  # the module does not read them
        if trained and self._group is not None and has_model_parallel_tables(pipelined.module):
            raise RuntimeError(
                f"the weights of the ids passed to {pipelined.name!r} are trained, but are sent to other ranks, which "
                "return no gradients. Weight the embeddings of an EmbeddingCollection, make the tables data-parallel, "
                "take a FeatureProcessedEmbeddingBagCollection, or .detach() the weights."
            )

    def ids_outside(self, pipelined: PipelinedForward, given: Any, inflight: InFlightBatch | None) -> str | None:
        """Return the error about an id of the input `given` that is no row; None if there is none, or only a warning.

        `inflight` is the batch of the input; None for a call between two steps.
        """
        if self._out_of_range_ids == "fbgemm" or not isinstance(given, KeyedJaggedTensor):
            return None
        found = pipelined.ranges.first_outside(given)
        if found is None:
            return None
        feature, problem = found
        where = "" if inflight is None else f" for batch {inflight.index} of {self._step}"
        text = f"rank {self._rank}, the input of {pipelined.name!r}{where}: {problem}."
        if self._out_of_range_ids == "error":
            return (
                f"{text} Map ids to rows in the dataset, or raise num_embeddings. With out_of_range_ids='warning' the "
                "strategy trains on as FBGEMM does: an id outside reads and trains row 0 of the table's shard."
            )
        if (pipelined.name, feature) not in self._warned:  # on each rank: ranks have different ids
            self._warned.add((pipelined.name, feature))
            warnings.warn(f"{text} FBGEMM takes row 0 of the table's shard for an id outside.", stacklevel=2)
        return None

    def served(self, pipelined: PipelinedForward, *, own: bool = False) -> None:
        """Note that a call was served early; with `own`: that a module's own forward sends the same types as before."""
        if self._mismatches is not None:
            self._mismatches.served(_OWN.format(pipelined.name) if own else pipelined.name, self.num_steps)

    def forget_answers(self) -> None:
        """Let go of the answers kept for calls that a `checkpoint()` repeats."""
        for pipelined in self.values():
            pipelined.forget_answers()

    def begin_step(self) -> None:
        """Forget the calls of the step before, and their answers."""
        self.num_steps += 1
        for pipelined in self.values():
            pipelined.calls.clear()
            pipelined.forget_answers()

    def discover(self, batch: Any) -> None:
        """Find the inputs of the modules' calls in the staged batch, by identity.

        All ranks agree on the outcome, since every early collective has to be issued by all of them.
        """
        by_id = {id(kjt): path for path, kjt in inputs_of(batch)}
        found = {name: _find(pipelined, by_id, self._step) for name, pipelined in self.items()}
        for name, (path, reason) in self._agree(found).items():
            pipelined = self[name]
            pipelined.path = path
            if path is not None:
                pipelined.keys = frozenset(resolve(batch, path).keys())
            if pipelined.unpipelined_reason is not None:
                self._warn_of_own_forward(pipelined, pipelined.unpipelined_reason, "")
            elif reason is not None:
                self.run_unpipelined(pipelined, reason)
            self._warn_of_untrained_sequences(pipelined)
            pipelined.takes_part = pipelined.early
            pipelined.calls.clear()

    def _agree(self, found: dict[str, tuple[Path | None, str | None]]) -> dict[str, tuple[Path | None, str | None]]:
        """Return the path of each module's input if all ranks have found the same path, else why it is not early."""
        if self._group is None:
            return found
        everyone: list[Any] = [None] * self._group.size()
        dist.all_gather_object(everyone, found, group=self._group)
        return {
            name: (
                next((other[name] for other in everyone if other[name][1] is not None), mine)
                if all(other[name][0] == mine[0] for other in everyone)
                else (None, "its input is at different places of the batch on different ranks")
            )
            for name, mine in found.items()
        }

    def check_all_ranks(self, pipelined: PipelinedForward, problem: str, *, own: bool = False) -> None:
        """Make sure that all ranks run a module's own forward for the same call, before this one issues a collective.

        Ranks that take early embeddings, or do not call the module, issue no collective for the call. So no collective
        can ask them: this rank's collectives would wait for them, or match other collectives of theirs. With `own` the
        question is about the types that the own forward sends, not about early embeddings.

        Raises:
            RuntimeError: `problem`: another rank has taken early embeddings, or does not make the call in time.
        """
        call = _OWN.format(pipelined.name) if own else pipelined.name
        if self._mismatches is not None and not self._mismatches.all_ranks(call, self.num_steps):
            raise RuntimeError(problem)

    def check_calls(self, begun: Container[str]) -> None:
        """Run modules unpipelined from now on if the step has not called them exactly once; forget its calls.

        `begun` names the modules whose input dist was started for the step's batch; a step need not call the others.
        """
        for pipelined in self.values():
            num_calls = len(pipelined.calls)
            pipelined.calls.clear()
            if not pipelined.early:
                continue
            if not num_calls:
                self.served(pipelined)  # a rank that waits for this one in `check_all_ranks` waits in vain
            if num_calls > 1:
                self.run_unpipelined(pipelined, "it was called more than once in a step")
            elif not num_calls and pipelined.name in begun:
                self.run_unpipelined(pipelined, _NOT_FOR_ALL)

    def run_unpipelined(self, pipelined: PipelinedForward, reason: str) -> None:
        """Let a module run in its own forward from now on; warn once, with the reason."""
        if pipelined.unpipelined_reason is None:
            pipelined.unpipelined_reason = reason
            self._warn_of_own_forward(pipelined, reason, _ADVICE.get(reason, _CALL).format(step=self._step))

    def _warn_of_own_forward(self, pipelined: PipelinedForward, reason: str, advice: str) -> None:
        own = f"The lookup of {pipelined} is not overlapped: {reason}. It runs in its own forward, on current weights."
        self._warn(pipelined, reason, f"{own} {advice}".strip())

    def _warn_of_untrained_sequences(self, pipelined: PipelinedForward) -> None:
        """Warn of sequences with variable batch sizes: TorchRec 1.8 does not train their tables on a CPU."""
        inputs = [only_input(*call) for call in pipelined.calls]
        kjts = [given for given in inputs if isinstance(given, KeyedJaggedTensor)]
        varies = any(kjt.variable_stride_per_key() and kjt.device().type == "cpu" for kjt in kjts)
        if varies and holds_sequences(pipelined.module):
            self._warn(
                pipelined,
                "variable batch sizes",
                f"If batch sizes vary by feature, TorchRec 1.8 looks up {pipelined} differently from the unsharded "
                "module, and does not train its tables on a CPU. Give it one batch size.",
            )

    def _warn(self, pipelined: PipelinedForward, reason: str, text: str) -> None:
        known = pipelined.name, reason
        if self._rank == 0 and known not in self._warned:
            self._warned.add(known)
            warnings.warn(text, UserWarning, stacklevel=2)


def _find(pipelined: PipelinedForward, by_id: Mapping[int, Path], step: str) -> tuple[Path | None, str | None]:
    """Return where in the batch a module's input is, or why its lookup cannot start early; the other is None.

    `by_id` has the path of each KeyedJaggedTensor of the batch by its `id`, `step` the name of the user's method.
    """
    if not pipelined.calls:
        return None, _NOT_AT_FIRST
    if len(pipelined.calls) > 1:
        return None, "it was called more than once in a step"
    args, kwargs = pipelined.calls[0]
    given = only_input(args, kwargs)
    path = by_id.get(id(given))
    if path is None:
        kind = type(given).__name__ if given is not None else f"{len(args)} arguments and {sorted(kwargs)}"
        return None, (
            f"its input ({kind}) is made inside {step}, it is not an object of the batch (whose dataclass fields, "
            "named tuples, sequences, mappings, attributes and slots were searched)"
        )
    return path, None


def inputs_of(batch: Any) -> list[tuple[Path, KeyedJaggedTensor]]:
    """Return every KeyedJaggedTensor of a batch with the path that leads to it."""
    found = leaves(batch, lambda node: isinstance(node, KeyedJaggedTensor))
    return [(path, leaf) for path, leaf in found if isinstance(leaf, KeyedJaggedTensor)]


def only_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the single argument of a call, or None."""
    values = [*args, *kwargs.values()]
    return values[0] if len(values) == 1 else None
