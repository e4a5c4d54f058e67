"""The inputs of sharded modules: find them in the batch, send their ids to the tables' ranks, perhaps free them."""

import warnings
from collections.abc import Iterable
from typing import Any, NoReturn

import torch
from torch import Tensor
from torch.nn import ModuleList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..runtime import Path, resolve
from ..schedules import Stage, StreamName
from ..tables import SentInput, has_model_parallel_tables, renew_counts, watch_lengths
from .flight import SparseFlight
from .input_dist import InputExchange, recats_cached, splits_only
from .input_sizes import check_types, types_in
from .misfits import wrong_lengths
from .module_context import ModuleContext, Progress, wait_for
from .pipelined_forward import PipelinedForwards, inputs_of


class SparseInputs:
    """Finds the inputs of all sharded modules of a model, and sends their ids; see `SparsePipeline`."""

    def __init__(self, forwards: PipelinedForwards) -> None:
        self._forwards, self._group = forwards, forwards.group
        self._streams, self._telemetry = forwards.streams, forwards.telemetry
        self._options = options = forwards.options
        self._exchange = None if self._group is None else InputExchange(self._group, self._streams)
        # Modules that have columns in the exchange of sizes, alike on all ranks, also if they run unpipelined later.
        self._taking_part: list[str] = []
        self._is_first = True
        self._at_first: list[tuple[Path, KeyedJaggedTensor]] = []  # inputs in the first batch before its step
        self.ready = False  # whether it is known which input of a batch feeds which module
        self.releases = options.releases  # whether the ids of a batch are freed once they have been sent

    def forget(self) -> None:
        """Forget the sizes of batches that were dropped."""
        if self._exchange is not None:
            self._exchange.waiting.clear()

    def begin_step(self, inflight: SparseFlight) -> None:
        """Before the first step, find the batch's inputs, which the step may take out of it; check their types."""
        if not self.ready:
            self._at_first = inputs_of(inflight.batch)
        is_first, self._is_first = self._is_first, False
        if is_first and self._group is not None and has_model_parallel_tables(ModuleList(self._forwards.modules)):
            with_weights = any(getattr(module, "takes_weights", True) is not False for module in self._forwards.modules)
            types = {}
            for _, kjt in self._at_first:
                sent = dict(zip(kjt.dist_labels(), kjt.dist_tensors(), strict=True))
                if not with_weights:
                    sent.pop("weights", None)
                types[f"the input of features {', '.join(kjt.keys())}"] = types_in([*sent], sent.values())
            check_types(types, self._group)

    def discover(self) -> None:
        """Find the inputs of the modules' calls in the batch; all ranks call this after the same forward."""
        self._forwards.discover(self._at_first)
        self._at_first = []
        self._taking_part = [name for name, pipelined in self._forwards.items() if pipelined.early]
        self.ready = True
        if names := ", ".join(repr(one.name) for one in self._forwards.values() if one.path is None):
            self.keep_features(f"{self._options.step} makes the input of {names} itself, perhaps of ids to be released")

    def keep_features(self, reason: str) -> None:
        """Release no ids from now on; warn once that `release_features` has no effect, and why."""
        if self.releases:
            self.releases = False
            if self._options.rank == 0:
                warnings.warn(f"release_features=True releases nothing: {reason}.", UserWarning, stacklevel=2)

    def input_splits_dist(self, inflight: SparseFlight) -> None:
        """Start the all-to-all of sizes. Source: `_start_data_dist`, `_fuse_input_dist_splits`, TorchRec 1.8."""
        kjts = inputs_of(inflight.batch) if self._group is not None else []
        for name, pipelined in self._forwards.items():
            kjt = _input_in(inflight.batch, pipelined.path) if pipelined.early else None
            if kjt is None or pipelined.keys != frozenset(kjt.keys()):
                continue
            if pipelined.has_sequences and not kjt.lengths().numel():
                continue  # TorchRec's lookup would fail; a call is refused by name
            self._forwards.refuse_misfit(pipelined, kjt, inflight)
            module = pipelined.module
            state = ModuleContext(name, inflight.index, module, kjt, context=module.create_context())
            inflight.modules[name] = state
            # The step may pass another input of the batch that has the same keys.
            state.num_found = sum(pipelined.keys == frozenset(other.keys()) for _, other in kjts)
            # TorchRec may keep the object that it is given and replace its weights. `copy.copy` takes 10 microseconds.
            sent: KeyedJaggedTensor = object.__new__(type(kjt))
            vars(sent).update(vars(kjt))
            state.outside = self._forwards.ids_outside(pipelined, kjt, inflight)
            if state.outside is not None:  # an error if the step calls the module with these ids, and does not map them
                sent._values = torch.zeros_like(kjt.values())
            with splits_only(module, sent, self._group, narrow=self._options.multi_node):
                state.splits_awaitable = module.input_dist(state.context, sent)
            state.sent = SentInput(kjt)
        if self._exchange is not None and (self._taking_part or self._options.trains):
            self._exchange.start_sizes(self._taking_part, inflight)

    def input_data_dist(self, inflight: SparseFlight) -> None:
        """Read the sizes on the host, the one host sync of the step; start the all-to-all of lengths, ids, weights."""
        if self._exchange is None:
            for state in inflight.modules.values():
                self._telemetry.observe("wait", Stage.INPUT_SPLITS_DIST, inflight.index)
                with recats_cached():
                    state.tensors_awaitable, state.splits_awaitable = wait_for(state.splits_awaitable), None
        elif inflight.sizes is not None:
            self._telemetry.observe("wait", Stage.INPUT_SPLITS_DIST, inflight.index)
            self._exchange.start_data(inflight)
        if self.releases:
            # Modules that run in their own forward will read their ids in the step.
            read_later = [_input_in(inflight.batch, one.path) for one in self._forwards.values() if not one.early]
            for state in inflight.modules.values():
                if all(state.kjt is not kjt for kjt in read_later):
                    release(state.kjt)
                    state.sent.forget_ids()

    def receive_input(self, inflight: SparseFlight) -> list[Any]:
        """Wait for the ids that this rank receives and assemble them; return all that holds them, for other streams."""
        received: list[Any] = []
        for state in inflight.modules.values():
            if state.tensors_awaitable is not None:
                self._telemetry.observe("wait", Stage.INPUT_DATA_DIST, inflight.index)
                state.dist_input, state.tensors_awaitable = wait_for(state.tensors_awaitable), None
                state.advance(Progress.RECEIVED)
            received += [state.dist_input, state.context]
        return received

    def drain(self, inflight: SparseFlight) -> None:
        """Complete the exchanges of sizes and ids that were started for a batch."""
        if inflight.sizes is not None or any(state.splits_awaitable is not None for state in inflight.modules.values()):
            # The splits were made on the input dist's stream, and are sent from this one.
            self._streams.order(StreamName.DATA_DIST, then=StreamName.COMPUTE)
            self.input_data_dist(inflight)
        self.receive_input(inflight)


def keyed_jagged_tensors(batch: Any) -> list[KeyedJaggedTensor]:
    """Return every KeyedJaggedTensor of a batch, in a fixed order."""
    return [kjt for _, kjt in inputs_of(batch)]


def note_lengths(kjts: Iterable[KeyedJaggedTensor]) -> None:
    """Cache the number of ids of each feature in inputs that are still on the host; later it would cost a host sync."""
    for kjt in kjts:
        if kjt.device().type == "cpu":
            renew_counts(kjt)  # a data loader may yield it again, with other lengths
            if wrong_lengths(kjt) is None:  # else the module that gets it refuses it by name
                kjt.sync()
            watch_lengths([kjt])


def count_anew(kjts: Iterable[KeyedJaggedTensor]) -> None:
    """Drop the numbers of `note_lengths` where lengths may have been written since; count again on the host."""
    for kjt in kjts:
        lengths = kjt.lengths()  # a copy on the device has no write yet, and an inference tensor counts none
        if kjt.device().type == "cpu" or lengths.is_inference() or lengths._version:
            note_lengths([kjt.unsync()])


class FreedTensor:
    """Replaces the values or weights of a KeyedJaggedTensor: it has their device and type, and no numbers."""

    def __init__(self, tensor: Tensor) -> None:
        self.device, self.dtype, self.is_cuda = tensor.device, tensor.dtype, tensor.is_cuda

    def record_stream(self, stream: Any) -> None:
        """Do nothing: there is no memory to keep."""

    def _refuse(self, *args: Any, **kwargs: Any) -> NoReturn:
        raise RuntimeError(
            "the ids of this batch were sent to the ranks that look them up, and release_features=True has given their "
            "memory back: a step can hand this KeyedJaggedTensor to its embedding module, once, and read its keys and "
            "lengths. To read its values or weights too, train with release_features=False."
        )

    def __getattr__(self, name: str) -> Any:
        if name.startswith("__"):  # Python asks any object for these, for example to copy it
            raise AttributeError(name)
        self._refuse()

    __len__ = __iter__ = __getitem__ = __add__ = __mul__ = __array__ = _refuse

    @classmethod
    def __torch_function__(cls, *args: Any, **kwargs: Any) -> NoReturn:
        cls._refuse(None)  # type: ignore[arg-type]


def release(kjt: KeyedJaggedTensor) -> None:
    """Let go of a KeyedJaggedTensor's values and weights, which an all-to-all under way may still hold."""
    for name in ("_values", "_weights"):
        tensor = getattr(kjt, name)
        if isinstance(tensor, Tensor):
            setattr(kjt, name, FreedTensor(tensor))


def _input_in(batch: Any, path: Path | None) -> KeyedJaggedTensor | None:
    try:
        kjt = resolve(batch, path or ())
    except LookupError:
        return None
    return kjt if isinstance(kjt, KeyedJaggedTensor) else None
