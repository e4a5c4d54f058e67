"""Find tables that a fit is said to train and that no gradient reaches."""

import warnings
from collections.abc import Collection, Iterator, Mapping
from functools import partial
from typing import Any

import torch
from torch import Tensor
from typing_extensions import override

from ...runtime import Flight
from ...schedules import WeightOwner
from ...tables import answer_tensors, owners_of, spec_of, table_by_name, tables_in_backward, tables_of
from ...text import some
from ..deferred_update import DeferredUpdate
from ..options import SparseOptions
from .watcher import Arguments, CalledModule, Watcher

NUM_BACKWARDS = 8
"""Backwards of a fit after which tables without a gradient are warned of."""


class GradientWatch(Watcher):
    """Watches which modules' embeddings get a gradient, until each table has got one.

    DistributedDataParallel stops at a parameter without a gradient. A fused table has none to look for: if its module
    is called under `no_grad`, or its embeddings are detached, nothing updates it, without a word. So the answers of a
    module get hooks until the first gradient comes. Nothing is read from a device, and the ranks exchange nothing:
    where a gradient reaches a module on one rank it has to on all, or its all-to-all would wait. As for
    DistributedDataParallel, a gradient of zeros is one: bags share a tensor, and pass by table only for sequences.

    The graph of an early lookup whose update is deferred has gaps between the answer and the tables. There a gradient
    has to reach both ends in the same backward, once for each module; embeddings that a loss leaves out reach neither.
    """

    def __init__(self, modules: Mapping[str, Any], options: SparseOptions) -> None:
        self._options = options
        trained = {name: _trained_tables(module) for name, module in modules.items()}
        self._waiting = {name: tables for name, tables in trained.items() if tables}  # module -> without a gradient yet
        self._fused = {name: frozenset(tables) for name, tables in self._waiting.items()}
        self._tables = {name: table_by_name(modules[name]) for name in self._waiting}  # module -> embedding -> table
        self._called: dict[str, bool] = {}  # of those waiting, those called in a step: whether with gradients enabled
        self._num_left = NUM_BACKWARDS
        # Of modules whose gaps no gradient has passed yet: updates whose answer has got a gradient in this backward.
        self._unproven: dict[str, list[DeferredUpdate]] = {name: [] for name in self._waiting}
        self._num_watched = dict.fromkeys(self._waiting, 0)  # answers of theirs with such gaps

    @override
    def called(self, forward: CalledModule, arguments: Arguments, flight: Flight | None, *, in_backward: bool) -> None:
        name = forward.name
        if name in self._waiting:
            self._called[name] = self._called.get(name, False) or torch.is_grad_enabled()

    @override
    def received(self, name: str, embeddings: Any, deferred: DeferredUpdate | None) -> None:
        """Note the first gradient that reaches the embeddings; of sequences, by table.

        Also watch embeddings whose graph has gaps, until a gradient has passed the gaps of the module.
        """
        if name in self._waiting:
            for tables, part in self._parts(name, embeddings):
                for tensor in answer_tensors(part):
                    tensor.register_hook(partial(self._note_gradient, name, tables))
        if name in self._unproven and deferred:
            self._num_watched[name] += 1
            for tables, part in self._parts(name, embeddings):
                if self._fused[name].intersection(tables):
                    for tensor in answer_tensors(part):
                        tensor.register_hook(partial(self._note_at_gap, name, deferred))

    def _note_at_gap(self, name: str, deferred: DeferredUpdate, gradient: Tensor | None) -> None:
        if gradient is not None and name in self._unproven:
            self._unproven[name].append(deferred)

    @override
    def backward_begins(self) -> None:
        """Gradients that the step has computed by itself do not count."""
        for reached in self._unproven.values():
            reached.clear()

    def _warn(self, name: str, problem: str) -> None:
        known = name, "no gradient"
        if self._options.rank == 0 and known not in self._options.warned:
            self._options.warned.add(known)
            warnings.warn(f"{problem} (Seen in {NUM_BACKWARDS} backwards.)", stacklevel=2)

    def _parts(self, name: str, answer: Any) -> Iterator[tuple[Collection[str], Any]]:
        tables = self._tables[name]
        if isinstance(answer, tuple):  # of managed collision modules
            for part in answer:
                yield from self._parts(name, part)
        elif isinstance(answer, dict) and answer.keys() <= tables.keys():
            yield from (((tables[key],), part) for key, part in answer.items())
        else:
            yield self._fused[name], answer

    def _note_gradient(self, name: str, tables: Collection[str], gradient: Tensor | None) -> None:
        # Autograd calls the hooks of all parts of a split, with None for those that no gradient reaches.
        if gradient is not None and name in self._waiting:
            self._waiting[name].difference_update(tables)
            if not self._waiting[name]:
                del self._waiting[name]

    @override
    def backward_ends(self) -> None:
        """Count a backward; after `NUM_BACKWARDS` warn of the tables that no gradient has reached.

        Raises a RuntimeError if the gradient of a module's embeddings has not passed the gaps in their graph.
        """
        for name, reached in [(name, reached) for name, reached in self._unproven.items() if reached]:
            if not all(deferred.got_gradient for deferred in reached):
                raise RuntimeError(
                    f"the backward of {self._options.method} has computed the gradient of the embeddings of {name!r}, "
                    f"and none has reached its tables ({some(sorted(self._fused[name]))}): they would not be trained. "
                    "What uses the embeddings first keeps no graph (a trace or a transformation of functions). Read "
                    "their tensors before it (values(), to_dict()), or train with pipeline='fused_sparse_dist'."
                )
            del self._unproven[name]
        for name in self._unproven:
            if self._num_watched[name] == NUM_BACKWARDS and name not in self._waiting:
                tables = some(sorted(self._fused[name]))
                self._warn(
                    name,
                    f"no gradient reaches tables of {name!r} ({tables}) any more since they are looked up early: their "
                    "embeddings do not reach the loss, or what uses them first keeps no graph. Unless you detach "
                    "them, read their tensors before it (values(), to_dict()).",
                )
        if self._num_left:
            self._num_left -= 1
            if not self._num_left:
                for name, problem in self.without_gradient().items():
                    self._warn(name, problem)

    def without_gradient(self) -> Mapping[str, str]:
        """Return module -> what is wrong, for modules with tables that no gradient has reached yet."""
        problems, step = {}, self._options.method
        for name, tables in self._waiting.items():
            if name not in self._called:
                why = f"{step} does not call the module"
            elif not self._called[name]:
                why = f"{step} calls the module without gradients (torch.no_grad or torch.inference_mode)"
            else:
                why = "their embeddings do not reach the loss (are they detached?)"
            problems[name] = (
                f"no gradient reaches tables of {name!r} ({some(sorted(tables))}): {why}. They stay as they are, but "
                "their fused optimizer is to train them. To leave tables untrained, set requires_grad=False before fit."
            )
        return problems


def _trained_tables(module: Any) -> set[str]:
    trained = getattr(module, "trained_in_backward", None)
    if trained is None:  # the user has sharded it
        is_known = spec_of(module) is not None and WeightOwner.FUSED_BACKWARD in owners_of(module)
        trained = tables_in_backward(tables_of(module)) if is_known else ()
    return set(trained)
