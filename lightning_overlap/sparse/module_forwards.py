"""The forwards of all sharded modules of a model: attach them, find their inputs, check their calls."""

from collections.abc import Container, Mapping
from typing import Any

import torch.distributed as dist
from torch.utils.hooks import RemovableHandle
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..distributed import gather_if_unequal
from ..runtime import Path
from ..tables import refuse_other_batch_sizes, take_row_0_for_ids_outside
from .batch_inputs import only_input
from .module_forward import ModuleForward
from .reasons import CALLED_TWICE, NOT_AT_FIRST, NOT_FOR_ALL
from .sent_updates import SentUpdates
from .shared import Shared


class ModuleForwards(dict[str, ModuleForward]):
    """The forward of each sharded module, by name; an ImportError if TorchRec lacks a private name of it."""

    def __init__(self, modules: Mapping[str, Any], shared: Shared, updates: SentUpdates) -> None:
        super().__init__((name, ModuleForward(name, module, shared, updates)) for name, module in modules.items())
        self._group, self._options = shared.group, shared.options
        self.modules = modules
        self._hooks: list[RemovableHandle] = []  # of kernels and output dists, while attached

    def attach(self) -> None:
        """Replace the modules' forwards."""
        for forward in self.values():
            forward.attach()
        if self._hooks:
            return
        if self._options.out_of_range_ids != "error":
            self._hooks += [hook for one in self.values() for hook in take_row_0_for_ids_outside(one.module)]
        if self._group is not None and "nccl" not in str(dist.get_backend(self._group)):
            self._hooks += [hook for one in self.values() for hook in refuse_other_batch_sizes(one.name, one.module)]

    def detach(self) -> None:
        """Give every module its former forward back."""
        for forward in self.values():
            forward.detach()
        for hook in self._hooks:
            hook.remove()
        self._hooks = []

    @property
    def are_called(self) -> bool:
        """Whether the step that runs has called any of them."""
        return any(forward.calls for forward in self.values())

    def begin_step(self) -> None:
        """Forget the calls of the last step."""
        for forward in self.values():
            forward.calls.clear()

    def end_calls(self) -> None:
        """End the calls of a step: report to ranks that wait for a call that this rank left out."""
        for forward in self.values():
            if not forward.calls:
                forward.note_usual_call(forward.name)

    def check_calls(self, begun: Container[str]) -> None:
        """Run modules unpipelined from now on that a step has called twice, or not at all though they have `begun`."""
        for forward in self.values():
            num_calls = len(forward.calls)
            forward.calls.clear()
            if not forward.early:
                continue
            if num_calls > 1:
                forward.run_unpipelined(CALLED_TWICE)
            elif not num_calls and forward.name in begun:
                forward.run_unpipelined(NOT_FOR_ALL)

    def all_called(self) -> bool:
        """Whether the step that runs has called all modules that may be looked up early."""
        return all(forward.calls for forward in self.values() if forward.unpipelined_reason is None)

    def find_inputs(self, inputs: list[tuple[Path, KeyedJaggedTensor]]) -> None:
        """Find the inputs of the modules' calls among those of the batch, by identity; all ranks agree."""
        by_id, by_path = {id(kjt): path for path, kjt in inputs}, dict(inputs)
        mine = {name: _find(forward, by_id, self._options.method) for name, forward in self.items()}
        everyone = [mine] if self._group is None else gather_if_unequal(mine, self._group)
        for name, forward in self.items():
            found: Path | str = everyone[0][name]
            if len({None if isinstance(theirs[name], str) else theirs[name] for theirs in everyone}) > 1:
                found = "its input is at different places of the batch on different ranks"
            if not isinstance(found, str):
                forward.path, forward.keys = found, list(by_path[found].keys())
            if forward.unpipelined_reason is not None:
                forward.warn_of_own_forward(forward.unpipelined_reason)
            elif isinstance(found, str):
                forward.run_unpipelined(found)
            self._warn_of_untrained_sequences(forward)

    def _warn_of_untrained_sequences(self, forward: ModuleForward) -> None:
        """Warn of sequences with variable batch sizes: TorchRec 1.8 does not train their tables on a CPU."""
        inputs = [only_input(*call) for call in forward.calls]
        kjts = [given for given in inputs if isinstance(given, KeyedJaggedTensor)]
        varies = any(kjt.variable_stride_per_key() and kjt.device().type == "cpu" for kjt in kjts)
        if varies and forward.has_sequences and self._options.rank == 0:
            forward.warn_once(
                "variable batch sizes",
                f"If batch sizes vary by feature, TorchRec 1.8 looks up {forward} differently from the unsharded "
                "module, and does not train its tables on a CPU. Give it one batch size.",
            )


def _find(forward: ModuleForward, by_id: Mapping[int, Path], step: str) -> Path | str:
    """Return where in the batch a module's input is (its inputs are given by `id`), or why it cannot be sent early."""
    if not forward.calls:
        return NOT_AT_FIRST
    if len(forward.calls) > 1:
        return CALLED_TWICE
    args, kwargs = forward.calls[0]
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
