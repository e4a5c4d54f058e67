"""Find out in the first step which input of a batch feeds which module; find the inputs of later batches."""

import warnings
from collections.abc import Iterator
from typing import Any

from torch.nn import ModuleList
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..distributed import gather_if_unequal
from ..runtime import Path
from ..tables import has_model_parallel_tables, refuse_varying_sizes, why_not_varying_sizes
from .batch_inputs import input_in, inputs_of
from .input_sizes import check_types, types_in
from .module_flight import ModuleFlight
from .module_forward import ModuleForward
from .module_forwards import ModuleForwards
from .shared import Shared
from .sparse_batch import SparseBatch
from .watchers.last_calls import LastCalls


class Discovery:
    """Knows the inputs of all sharded modules of a model, once `discover` was called after the first forward."""

    def __init__(self, forwards: ModuleForwards, shared: Shared, last_calls: LastCalls | None) -> None:
        self._forwards, self._shared, self._last_calls, self._options = forwards, shared, last_calls, shared.options
        # Modules that have columns in the exchange of sizes, alike on all ranks, also if they run unpipelined later.
        self.taking_part: list[str] = []
        self.ready = False  # whether it is known which input of a batch feeds which module
        self.releases = shared.options.releases  # whether the ids of a batch are freed once they have been sent
        self._is_first = True
        self._at_first: list[tuple[Path, KeyedJaggedTensor]] = []  # inputs in the first batch before its step

    def begin_step(self, flight: SparseBatch) -> None:
        """Before the first step, find the batch's inputs, which the step may take out of it; check their types."""
        if not self.ready:
            self._at_first = inputs_of(flight.batch)
        is_first, self._is_first = self._is_first, False
        if is_first:
            self._check_varying_sizes()
        modules, group = self._forwards.modules.values(), self._shared.group
        if not is_first or group is None or not has_model_parallel_tables(ModuleList(modules)):
            return
        with_weights = any(getattr(module, "takes_weights", True) is not False for module in modules)
        types = {}
        for _, kjt in self._at_first:
            sent = dict(zip(kjt.dist_labels(), kjt.dist_tensors(), strict=True))
            if not with_weights:
                sent.pop("weights", None)
            types[f"the input of features {', '.join(kjt.keys())}"] = types_in([*sent], sent.values())
        check_types(types, group)

    def _check_varying_sizes(self) -> None:
        """Refuse batch sizes that vary by feature where kernels of any rank cannot take them; all ranks call this."""
        varies = any(kjt.variable_stride_per_key() for _, kjt in self._at_first)
        # On CUDA kernels write one output together.
        why = why_not_varying_sizes(self._forwards.modules, on_cpu=not self._shared.streams.is_async)
        own, group = (varies, why), self._shared.group
        by_rank = [own] if group is None else gather_if_unequal(own, group)
        if any(varies for varies, _ in by_rank):
            refuse_varying_sizes([why for _, why in by_rank])

    def discover(self) -> None:
        """Find the inputs of the modules' calls in the batch; all ranks call this after the same forward."""
        self._forwards.find_inputs(self._at_first)
        self._at_first = []
        self.taking_part = [name for name, forward in self._forwards.items() if forward.early]
        self.ready = True
        if names := ", ".join(repr(one.name) for one in self._forwards.values() if one.path is None):
            method = self._options.method
            self.keep_features(f"{method} makes the input of {names} itself, perhaps of ids to be released")

    def keep_features(self, reason: str) -> None:
        """Release no ids from now on; warn once that `release_features` has no effect, and why."""
        if self.releases:
            self.releases = False
            if self._options.rank == 0:
                warnings.warn(f"release_features=True releases nothing: {reason}.", UserWarning, stacklevel=2)

    def inputs_of(self, flight: SparseBatch) -> Iterator[ModuleFlight]:
        """Yield a flight for each module whose ids of this batch are sent early."""
        kjts = inputs_of(flight.batch) if self._shared.group is not None else []
        for name, forward in self._forwards.items():
            kjt = self._input_of(forward, flight) if forward.early else None
            if kjt is None or not forward.has_keys_of(kjt):
                continue
            if forward.has_sequences and not kjt.lengths().numel():
                continue  # TorchRec's lookup would fail; a call is refused by name
            forward.refuse_misfit(kjt, flight)
            yield ModuleFlight(
                name=name,
                batch=flight.index,
                module=forward.module,
                kjt=kjt,
                shared=self._shared,
                narrow=forward.narrow,
                # The step may pass another input of the batch that has the same keys.
                num_found=1 if flight.is_padding else sum(forward.has_keys_of(other) for _, other in kjts),
                outside=forward.ids_outside(kjt, flight),
            )

    def _input_of(self, forward: ModuleForward, flight: SparseBatch) -> KeyedJaggedTensor | None:
        if flight.is_padding and self._last_calls is not None:
            return self._last_calls.input_of(forward)
        return input_in(flight.batch, forward.path)

    def inputs_read_in_step(self, batch: Any) -> list[KeyedJaggedTensor | None]:
        """Return the inputs of a batch that modules read in their own forward."""
        return [input_in(batch, forward.path) for forward in self._forwards.values() if not forward.early]
