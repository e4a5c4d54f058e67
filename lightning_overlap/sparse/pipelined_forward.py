"""Replace the forward of sharded modules by a pipelined one; find which input of the batch feeds which module."""

import itertools
import warnings
from collections.abc import Callable, Container, Iterator, Mapping
from contextlib import contextmanager
from typing import Any

import torch
import torch.distributed as dist
from torch.utils.hooks import RemovableHandle
from torchrec.distributed.types import LazyAwaitable, LazyGetItemMixin, ShardedModule
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..distributed import Mismatches, gather_objects
from ..runtime import Path, Streams, Telemetry, is_profiled, leaves
from ..tables import (
    IdRanges,
    check_torchrec,
    has_model_parallel_tables,
    holds_sequences,
    refuse_other_batch_sizes,
    take_row_0_for_ids_outside,
    takes_weights,
    why_never_early,
)
from .flight import SparseFlight
from .misfits import misfit
from .options import SparseOptions

_num_made = itertools.count()

# Why a module runs in its own forward, and how to avoid it.
WRITTEN = (
    "its tables are written between two steps again and again (or their learning rates are set by hand, which only "
    "combined_optimizer can move while tables are looked up early)"
)
WRITTEN_IN_STEP = "its tables were written after its early lookup"
CHANGED_IN_PLACE = "its input was changed in place after its ids had been sent"
WITH_GRADIENTS = "it was called with gradients enabled in an evaluation"
OTHER_AUTOCAST = "it was called under another autocast than its early lookup"
_CALLED_TWICE = "it was called more than once in a step"
_NOT_AT_FIRST = "it was not called for the first batch"
_NOT_FOR_ALL = "it was not called for a batch that has its input"

_CALL = (
    "To overlap it, call it once per {step} with a KeyedJaggedTensor that is part of the batch. The dataset or the "
    "collate function can make it, or the module's hook: `def on_after_batch_transfer(self, batch, dataloader_idx): "
    "batch['sparse'] = self.make_inputs(batch); return batch`."
)
_WRITE_SELDOM = (
    "To overlap it, write its tables seldom, for example once an epoch: each time one lookup is repeated. Or train "
    "with pipeline='sparse_dist', which sends the ids early and looks up nothing early."
)
_CALL_ALWAYS = (
    "To overlap it, call it in every {step}, also in one that returns early: call it first, then return (None, say, to "
    "skip the batch)."
)
_ADVICE: Mapping[str, str] = {  # by reason; the other reasons take `_CALL`
    _NOT_AT_FIRST: _CALL_ALWAYS,
    _NOT_FOR_ALL: _CALL_ALWAYS,
    WRITTEN: _WRITE_SELDOM,
    WRITTEN_IN_STEP: _WRITE_SELDOM,
    CHANGED_IN_PLACE: "To overlap it, change its input in on_after_batch_transfer, or change a copy.",
    WITH_GRADIENTS: "To overlap it, call it without gradients (inference_mode of the Trainer, torch.no_grad).",
    OTHER_AUTOCAST: "To overlap it, leave autocast to Trainer(precision=...).",
}


class LazyEmbeddings(LazyGetItemMixin[str, Any], LazyAwaitable[Any]):  # type: ignore[misc]
    """Embeddings that `receive` waits for at their first use, in the grad mode of the call, not of that use."""

    def __init__(self, receive: Callable[[], Any]) -> None:
        super().__init__()
        self._receive, self._mode = receive, _grad_mode()

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
    """Embeddings of an early lookup; a bottom MLP that runs before their first use overlaps with the all-to-all."""


def _grad_mode() -> tuple[bool, bool]:
    return torch.is_grad_enabled(), torch.is_inference_mode_enabled()


Answer = Callable[["PipelinedForward", tuple[Any, ...], dict[str, Any]], Any]  # returns the embeddings for a call


class PipelinedForward:
    """The `forward` of one sharded module while a pipeline is attached."""

    answer: Answer
    former: Any  # the instance's `forward` before, another pipeline's; None if the instance had only the class's

    def __init__(self, name: str, module: Any, group: dist.ProcessGroup | None, prefetches: bool) -> None:
        check_torchrec(module)
        self.name, self.module = name, module
        self.ranges, self.has_sequences = IdRanges(module), holds_sequences(module)
        present = vars(module).get("forward")
        self.original_forward: Callable[..., Any] = (
            present.original_forward if isinstance(present, PipelinedForward) else module.forward
        )
        self.path: Path | None = None  # of its input in the batch; None before `discover`, and if it is no object of it
        self.keys: frozenset[str] = frozenset()  # of its input; other inputs in the batch may have the same keys
        self.forms: dict[int, Any] = {}  # types of the tensors that its own forward has sent, by call of a step
        # Why it runs in its own forward; None if it can be looked up early.
        self.unpipelined_reason: str | None = why_never_early(module, group, prefetches=prefetches)
        self.is_over_all = self.unpipelined_reason is None  # whether its tables are surely sharded over all ranks
        self.calls: list[tuple[tuple[Any, ...], dict[str, Any]]] = []  # arguments of its calls in the step that runs

    def __str__(self) -> str:
        return f"{self.name!r} ({type(self.module).__name__})"

    @torch.compiler.disable  # type: ignore[untyped-decorator]  # a compiled step would trace the whole pipeline
    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return the embeddings."""
        return self.answer(self, args, kwargs)

    @property
    def early(self) -> bool:
        """Whether the lookup of coming batches starts early."""
        return self.path is not None and self.unpipelined_reason is None


class PipelinedForwards(dict[str, PipelinedForward]):
    """The pipelined forward of each sharded module, by name; an ImportError if TorchRec lacks a private name of it."""

    def __init__(
        self,
        modules: Mapping[str, ShardedModule[Any, Any, Any, Any]],
        group: dist.ProcessGroup | None,
        streams: Streams,
        telemetry: Telemetry,
        options: SparseOptions,
    ) -> None:
        super().__init__(
            (name, PipelinedForward(name, module, group, options.looks_up_cached)) for name, module in modules.items()
        )
        self.modules, self.group, self.options = list(modules.values()), group, options
        self.streams, self.telemetry = streams, telemetry
        self.num_steps = 0  # steps begun
        self._hooks: list[RemovableHandle] = []  # of kernels and output dists, while attached
        key = f"lightning_overlap/{next(_num_made)}"  # all ranks make as many
        self.mismatches: Mismatches | None = None  # None on one rank
        if group is not None and options.store is not None:
            self.mismatches = Mismatches(options.store, key, group.rank(), group.size(), options.timeout_s)

    def attach(self, answer: Answer) -> None:
        """Replace the modules' forwards; `answer` returns the embeddings of each call."""
        for pipelined in self.values():
            pipelined.answer, present = answer, vars(pipelined.module).get("forward")
            if present is not pipelined:
                pipelined.former = present
                pipelined.module.forward = pipelined
        if not self._hooks:
            if self.options.out_of_range_ids != "error":
                self._hooks += [hook for one in self.values() for hook in take_row_0_for_ids_outside(one.module)]
            if self.group is not None and "nccl" not in str(dist.get_backend(self.group)):
                self._hooks += [
                    hook for one in self.values() for hook in refuse_other_batch_sizes(one.name, one.module)
                ]

    def detach(self) -> None:
        """Give every module its former forward back."""
        for pipelined in self.values():
            if vars(pipelined.module).get("forward") is pipelined:
                if pipelined.former is None:
                    del pipelined.module.forward
                else:
                    pipelined.module.forward = pipelined.former
        for hook in self._hooks:
            hook.remove()
        self._hooks = []
        if self.mismatches is not None:
            self.mismatches.end()

    def refuse_trained_weights(self, pipelined: PipelinedForward, given: Any) -> None:
        """Raise a RuntimeError if weights of ids would be sent that the loss trains: their gradients do not return."""
        weights = given.weights_or_none() if isinstance(given, KeyedJaggedTensor) else None
        if (
            isinstance(weights, torch.Tensor)
            and weights.requires_grad
            and torch.is_grad_enabled()
            and self.group is not None
            and takes_weights(pipelined.module)
            and has_model_parallel_tables(pipelined.module)
        ):
            raise RuntimeError(
                f"the weights of the ids passed to {pipelined.name!r} are trained, but are sent to other ranks, which "
                "return no gradients. Weight the embeddings of an EmbeddingCollection, make the tables data-parallel, "
                "take a FeatureProcessedEmbeddingBagCollection, or .detach() the weights."
            )

    def refuse_misfit(self, pipelined: PipelinedForward, given: Any, inflight: SparseFlight | None) -> None:
        """Raise a ValueError if lengths, ids and weights of an input do not fit each other."""
        problem = misfit(given) if isinstance(given, KeyedJaggedTensor) else None
        if problem is not None:
            raise ValueError(
                f"{self._input_of(pipelined, inflight)}: {problem}. Give one length for each feature and sample, "
                "feature by feature, and as many ids (and weights, if any) as the lengths sum up to."
            )

    def _input_of(self, pipelined: PipelinedForward, inflight: SparseFlight | None) -> str:
        where = "" if inflight is None else f" for batch {inflight.index} of {self.options.step}"
        return f"rank {self.options.rank}, the input of {pipelined.name!r}{where}"

    def ids_outside(self, pipelined: PipelinedForward, given: Any, inflight: SparseFlight | None) -> str | None:
        """Return the error about an id of an input that is no row; None if there is none, or only a warning."""
        options = self.options
        if options.out_of_range_ids == "fbgemm" or not isinstance(given, KeyedJaggedTensor):
            return None
        if (found := pipelined.ranges.first_outside(given)) is None:
            return None
        feature, problem = found
        text = f"{self._input_of(pipelined, inflight)}: {problem}."
        if options.out_of_range_ids == "error":
            return (
                f"{text} Map ids to rows in the dataset, or raise num_embeddings. With out_of_range_ids='warning' the "
                "strategy trains on as FBGEMM does: an id outside reads and trains row 0 of the table's shard."
            )
        self._warn_once(pipelined, feature, f"{text} FBGEMM takes row 0 of the table's shard for an id outside.")
        return None

    def served(self, call: str) -> None:
        """Note that this rank has made a call as before: from early embeddings, or with tensors of the same types."""
        if self.mismatches is not None:
            self.mismatches.passed(("unusual", call), self.num_steps)

    def check_all_ranks(self, call: str, problem: str) -> None:
        """Raise a RuntimeError with `problem` if another rank has `served` a call, or does not make it in time."""
        # No collective can ask: ranks that have served the call issue none for it.
        if self.mismatches is not None and self.mismatches.other(("unusual", call), self.num_steps) is not None:
            raise RuntimeError(problem)

    def end_calls(self) -> None:
        """End the calls of a step: answer ranks that wait in `check_all_ranks` for a call that this rank left out."""
        for pipelined in self.values():
            if not pipelined.calls:
                self.served(pipelined.name)

    def check_calls(self, begun: Container[str]) -> None:
        """Run modules unpipelined from now on that a step has called twice, or not at all though they have `begun`."""
        for pipelined in self.values():
            num_calls = len(pipelined.calls)
            pipelined.calls.clear()
            if not pipelined.early:
                continue
            if not num_calls:
                if pipelined.name in begun:
                    self.run_unpipelined(pipelined, _NOT_FOR_ALL)
            elif num_calls > 1:
                self.run_unpipelined(pipelined, _CALLED_TWICE)

    def discover(self, inputs: list[tuple[Path, KeyedJaggedTensor]]) -> None:
        """Find the inputs of the modules' calls among those of the staged batch, by identity; all ranks agree."""
        by_id, by_path = {id(kjt): path for path, kjt in inputs}, dict(inputs)
        mine = {name: _find(pipelined, by_id, self.options.step) for name, pipelined in self.items()}
        everyone = [mine] if self.group is None else gather_objects(mine, self.group)
        for name, pipelined in self.items():
            found: Path | str = everyone[0][name]
            if len({None if isinstance(theirs[name], str) else theirs[name] for theirs in everyone}) > 1:
                found = "its input is at different places of the batch on different ranks"
            if not isinstance(found, str):
                pipelined.path, pipelined.keys = found, frozenset(by_path[found].keys())
            if pipelined.unpipelined_reason is not None:
                self._warn_of_own_forward(pipelined, pipelined.unpipelined_reason, "")
            elif isinstance(found, str):
                self.run_unpipelined(pipelined, found)
            self._warn_of_untrained_sequences(pipelined)
            pipelined.calls.clear()

    def run_unpipelined(self, pipelined: PipelinedForward, reason: str) -> None:
        """Let a module run in its own forward from now on; warn once, with the reason."""
        if pipelined.unpipelined_reason is None:
            pipelined.unpipelined_reason = reason
            advice = _ADVICE.get(reason, _CALL).format(step=self.options.step)
            self._warn_of_own_forward(pipelined, reason, f" {advice}")

    def _warn_of_own_forward(self, pipelined: PipelinedForward, reason: str, advice: str) -> None:
        own = f"The lookup of {pipelined} is not overlapped: {reason}. It runs in its own forward, on current weights."
        if self.options.rank == 0:
            self._warn_once(pipelined, reason, own + advice)

    def _warn_of_untrained_sequences(self, pipelined: PipelinedForward) -> None:
        """Warn of sequences with variable batch sizes: TorchRec 1.8 does not train their tables on a CPU."""
        inputs = [only_input(*call) for call in pipelined.calls]
        kjts = [given for given in inputs if isinstance(given, KeyedJaggedTensor)]
        varies = any(kjt.variable_stride_per_key() and kjt.device().type == "cpu" for kjt in kjts)
        if varies and pipelined.has_sequences and self.options.rank == 0:
            self._warn_once(
                pipelined,
                "variable batch sizes",
                f"If batch sizes vary by feature, TorchRec 1.8 looks up {pipelined} differently from the unsharded "
                "module, and does not train its tables on a CPU. Give it one batch size.",
            )

    def _warn_once(self, pipelined: PipelinedForward, about: str, text: str) -> None:
        warned, known = self.options.warned, (pipelined.name, about)
        if known not in warned:
            warned.add(known)
            warnings.warn(text, UserWarning, stacklevel=2)


def _find(pipelined: PipelinedForward, by_id: Mapping[int, Path], step: str) -> Path | str:
    """Return where in the batch a module's input is (its inputs are given by `id`), or why it cannot be sent early."""
    if not pipelined.calls:
        return _NOT_AT_FIRST
    if len(pipelined.calls) > 1:
        return _CALLED_TWICE
    args, kwargs = pipelined.calls[0]
    given = only_input(args, kwargs)
    if id(given) in by_id:
        return by_id[id(given)]
    if given is not None and not isinstance(given, KeyedJaggedTensor):
        return f"its input is a {type(given).__name__}, and only a KeyedJaggedTensor can be sent early"
    kind = type(given).__name__ if given is not None else f"{len(args)} arguments and {sorted(kwargs)}"
    return (
        f"its input ({kind}) is made inside {step}, it is not an object of the batch (whose dataclass fields, "
        "named tuples, sequences, mappings, attributes and slots were searched)"
    )


@contextmanager
def other_forwards(forwards: list[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Give modules without a `forward` of their own, the first of each pair, another one within this context."""
    for module, forward in forwards:
        vars(module)["forward"] = forward  # nn.Module.__setattr__ is slow
    try:
        yield
    finally:
        for module, _ in forwards:
            del vars(module)["forward"]


def inputs_of(batch: Any) -> list[tuple[Path, KeyedJaggedTensor]]:
    """Return every KeyedJaggedTensor of a batch with the path that leads to it."""
    found = leaves(batch, lambda node: KeyedJaggedTensor in type(node).__mro__)  # `isinstance` is slow for this class
    return [(path, leaf) for path, leaf in found if KeyedJaggedTensor in type(leaf).__mro__]


def only_input(args: tuple[Any, ...], kwargs: Mapping[str, Any]) -> Any:
    """Return the single argument of a call, or None."""
    values = [*args, *kwargs.values()]
    return values[0] if len(values) == 1 else None
