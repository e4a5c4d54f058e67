"""One batch in one sharded module: all of its state, and its stages from the sizes to the update of the tables."""

from collections.abc import Callable, Container, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from enum import IntEnum, auto
from functools import partial
from typing import Any

import torch
from torchrec.distributed.embedding_types import KJTList
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import KeyedJaggedTensor

from ..compat.torch import saving_is_hooked
from ..compat.torchrec import (
    assembled,
    compute_parts,
    output_dists_of,
    set_values,
    shallow_copy,
    start_output_dist,
    wait_for,
)
from ..runtime import NOTHING, Made
from ..schedules import Stage, WeightOwner
from ..tables import (
    TRAINED,
    SentInput,
    by_config,
    caching_tbes,
    num_writes,
    owners_of_parts,
    rates_of,
    spec_of,
    tables_of,
    tbes,
    version_in,
    without_graph,
)
from .deferred_update import DeferredUpdate
from .described_input import splits_only
from .embeddings import EarlyEmbeddings
from .grad_modes import own_graph
from .released_ids import release
from .shared import Shared
from .update_rates import counting, take_back, updates_at_present_rate


class Progress(IntEnum):
    """How far a batch has come in a module; `ModuleFlight.advance` takes it one step further."""

    SENDING = auto()  # its sizes are exchanged, then its ids are sent
    RECEIVED = auto()  # the ids that this rank looks up are there; some parts may be looked up already
    LOOKED_UP = auto()  # all parts were looked up, and their embeddings are under way
    SERVED = auto()  # a call of the module got them
    DROPPED = auto()  # no call will get them: the module runs in its own forward
    UPDATED = auto()  # the tables have its update; another backward of the same step is another update

    def __str__(self) -> str:
        return self.name.lower().replace("_", " ")


_NEXT: dict[Progress, tuple[Progress, ...]] = {
    Progress.SENDING: (Progress.RECEIVED, Progress.DROPPED),
    Progress.RECEIVED: (Progress.LOOKED_UP, Progress.DROPPED),
    Progress.LOOKED_UP: (Progress.SERVED, Progress.DROPPED),
    Progress.SERVED: (Progress.UPDATED,),
    Progress.DROPPED: (),
    Progress.UPDATED: (Progress.UPDATED,),
}


@dataclass(slots=True, kw_only=True)
class ModuleFlight:
    """One batch in one sharded module; its methods are the stages, and the only code that changes its state.

    Source: `TrainPipelineContext`, TorchRec 1.8, which has the same names for the awaitables.
    """

    name: str  # the module's name in the model
    batch: int  # the batch's number
    module: Any
    kjt: KeyedJaggedTensor  # the module's input in the batch
    shared: Shared
    progress: Progress = Progress.SENDING  # changed by `advance`
    context: Any = None  # TorchRec's own context of this module and batch, from `create_context`
    splits_awaitable: Any = None  # what `input_dist` returned; None once its sizes have been read
    tensors_awaitable: Any = None  # the all-to-all of lengths, ids and weights, while it is under way
    dist_input: KJTList | None = None  # received ids, a KeyedJaggedTensor for each part; None once all were looked up
    output_dist_awaitables: dict[int, Awaitable[torch.Tensor]] = field(default_factory=dict)  # by part, until all are
    embeddings: LazyAwaitable[Any] | None = None  # the module's output, once all parts were looked up early
    deferred: DeferredUpdate = field(default_factory=DeferredUpdate)  # empty where the update is not deferred
    sent: Any = None  # the `SentInput` of its ids, once they were sent
    outside: str | None = None  # the error about an id that is no row, for which row 0 was looked up
    num_writes: dict[WeightOwner, tuple[int, ...]] = field(default_factory=dict)  # `tables.num_writes` at the lookup
    weights: int = TRAINED  # `tables.version_in` at the lookup: which weights the module had
    rates: list[float] | None = None  # learning rates of its kernels at the lookup, if `SparseOptions.holds_rates`
    autocast: tuple[bool, torch.dtype] | None = None  # `autocast_of` at the lookup
    narrow: bool = False  # whether its ids and lengths are sent as 32-bit integers
    num_found: int = 1  # how many KeyedJaggedTensors of this rank's batch have the keys of the module's input
    votes: bool = False  # whether all ranks vote at the call: on some rank another input has the same keys
    served_in: int = -1  # number of the step that got the embeddings; LBFGS runs several steps of a batch
    without_graph: bool = False  # whether a call under `no_grad` got them: a reentrant `checkpoint()` repeats it later
    received: Made | None = None  # the embeddings, once waited for, until the backward is over
    num_lookups: list[int] = field(default_factory=list)  # what the early lookup added to each kernel's iteration count
    ids: KJTList | None = None  # the ids that were looked up, if a watcher keeps them until the step is over

    def advance(self, to: Progress) -> None:
        """Enter the next state; raise a RuntimeError if that state cannot follow the present one."""
        if to not in _NEXT[self.progress]:
            raise RuntimeError(
                f"batch {self.batch} in module {self.name!r} cannot become {to}: it is {self.progress}, and only "
                f"{' or '.join(map(str, _NEXT[self.progress]))} can follow. Stages were issued twice or out of order."
            )
        self.progress = to

    @property
    def served(self) -> bool:
        """Whether a call got the early embeddings, or they were dropped."""
        return self.progress >= Progress.SERVED

    @property
    def has_early_lookup(self) -> bool:
        """Whether a lookup of any part was issued early."""
        return self.embeddings is not None or bool(self.output_dist_awaitables)

    # Ids.

    def describe_input(self) -> None:
        """Describe the all-to-alls of the input, for `InputExchange.send_sizes`."""
        kjt = self.kjt
        sent = shallow_copy(kjt)  # TorchRec may keep the object that it is given and replace its weights
        if self.outside is not None:  # an error if the step calls the module with these ids, and does not map them
            set_values(sent, torch.zeros_like(kjt.values()))
        self.context = self.module.create_context()
        with splits_only(self.module, sent, self.shared.group, narrow=self.narrow) as input_dist:
            self.splits_awaitable = input_dist(self.context, sent)
        self.sent = SentInput(kjt)

    def expect_own_ids(self) -> None:
        """On one rank, where nothing is sent: the ids that it looks up are its own."""
        self.shared.telemetry.observe("wait", Stage.INPUT_SPLITS_DIST, self.batch)
        self.expect_ids(wait_for(self.splits_awaitable), votes=False)

    def expect_ids(self, awaitable: Any, *, votes: bool) -> None:
        """Take the awaitable of the ids, once `InputExchange.send_ids` has sent them.

        `votes`: on some rank another input of the batch has the same keys.
        """
        self.tensors_awaitable, self.splits_awaitable, self.votes = awaitable, None, votes

    def release_ids(self) -> None:
        """Let go of the input's values and weights, which were sent."""
        release(self.kjt)
        self.sent.forget_ids()

    def receive_ids(self) -> None:
        """Wait for the ids that this rank looks up, and assemble them."""
        if self.tensors_awaitable is not None:
            self.shared.telemetry.observe("wait", Stage.INPUT_DATA_DIST, self.batch)
            self.dist_input, self.tensors_awaitable = wait_for(self.tensors_awaitable), None
            self.advance(Progress.RECEIVED)

    # The lookup.

    def prefetch(self) -> None:
        """Copy the rows that the lookup will read into the cache. Source: `prefetch_embeddings`, TorchRec 1.8."""
        if caching_tbes(self.module):
            streams = self.shared.streams
            # The lookup stream reads and updates the prefetched rows.
            self.module.prefetch(self.dist_input, forward_stream=streams[streams.lookup], ctx=self.context)

    def parts_to_look_up(self, owners: Container[WeightOwner]) -> list[int]:
        """Return the parts of these owners that are still to be looked up."""
        if self.progress > Progress.RECEIVED:
            return []
        of_parts, started = owners_of_parts(self.module), self.output_dist_awaitables
        return [part for part, owner in enumerate(of_parts) if owner in owners and part not in started]

    def look_up(self, owner: WeightOwner, only: int | None = None, *, defers_update: bool) -> None:
        """Look up the tables of an owner, or of one part alone, and start the all-to-all of their embeddings."""
        parts = [part for part in self.parts_to_look_up((owner,)) if only in (None, part)]
        if self.progress is not Progress.RECEIVED or not parts:
            return
        options = self.shared.options
        for watcher in self.shared.watchers.looks_up:
            watcher.looks_up(self)
        if options.holds_rates and self.rates is None:
            self.rates = rates_of(self.module)
        if (set_rates := options.set_rates) is not None:
            set_rates = self.deferred.with_rates(set_rates, tbes(self.module))
        with (
            counting(tbes(self.module), self.num_lookups),
            updates_at_present_rate(self.module, set_rates, mends_weights=self.shared.mends_weights(self.module)),
            self._deferring_update() if defers_update else NOTHING,
        ):
            if len(parts) == len(owners_of_parts(self.module)):
                self.embeddings = self.module.compute_and_output_dist(self.context, self.dist_input)
            else:
                self._look_up_parts(parts)
        if self.embeddings is not None:
            self.dist_input = None
            self.advance(Progress.LOOKED_UP)
        self.num_writes[owner] = num_writes(self.module, owner)
        self.weights = version_in(self.module)
        self.autocast = autocast_of(self.module, self.kjt)
        if not options.trains:
            self._take_back()

    def _look_up_parts(self, parts: list[int]) -> None:
        """Run the kernels of some parts and start their output dists; after the last part assemble the output."""
        module, context, started = self.module, self.context, self.output_dist_awaitables
        embeddings = compute_parts(module, context, self.dist_input, parts)
        for part in parts:
            started[part] = start_output_dist(module, context, part, embeddings[part])
        if len(started) == len(embeddings):
            in_order = [started[part] for part in range(len(started))]
            self.embeddings = by_config(module, context, assembled(module, context, in_order))
            started.clear()

    @contextmanager
    def _deferring_update(self) -> Iterator[None]:
        """Within this context output dists interrupt the graph of fused tables' embeddings, for `deferred`."""
        dists, owners = output_dists_of(tables_of(self.module)), owners_of_parts(self.module)
        hooks = [
            dist.register_forward_hook(partial(self.deferred.open_gaps, part))
            for part, (dist, owner) in enumerate(zip(dists, owners, strict=True))
            if owner is WeightOwner.FUSED_BACKWARD
        ]
        try:
            yield
        finally:
            for hook in hooks:
                hook.remove()

    def look_up_when_called(self) -> Any:
        """Look up ids that were sent early, at the module's call (managed collision: the lookup itself writes)."""
        dist_input, self.dist_input = self.dist_input, None
        found = self.module.compute_and_output_dist(self.context, dist_input)
        self.advance(Progress.LOOKED_UP)
        self.advance(Progress.SERVED)
        return found

    def is_overwritten(self) -> bool:
        """Whether tables of this rank, or their learning rates, were written since the lookup."""
        if self.rates is not None and rates_of(self.module) != self.rates:
            return True
        return any(num_writes(self.module, owner) != before for owner, before in self.num_writes.items())

    # The step.

    def claim(self, step: int) -> None:
        """Note that all ranks take the early lookup in a step, by its number."""
        self.served_in = step

    def serve(self) -> EarlyEmbeddings:
        """Return the embeddings of the early lookup; their first use waits for them."""
        if torch.is_grad_enabled() or not self.shared.options.trains:
            return EarlyEmbeddings(self._receive)
        self.without_graph = True
        return EarlyEmbeddings(lambda: without_graph(self._receive()))

    def _receive(self) -> Any:
        """Wait for the embeddings on the lookup stream; let the compute stream and the current one use them."""
        shared = self.shared
        is_first = self.received is None
        if self.received is None:
            shared.telemetry.observe("wait", Stage.EMBEDDING_LOOKUP, self.batch)
            assert self.embeddings is not None
            with shared.streams.on_lookup(), own_graph() if shared.options.trains else NOTHING:
                received = wait_for(self.embeddings)
            self.received = Made(received, shared.streams.lookup)
            shared.received(self.name, received, in_step=True, deferred=self.deferred)
        with shared.telemetry.merge(self.batch if is_first else None):
            shared.streams.give_to_caller(self.received)
        # Tensors made in inference mode train nothing.
        if is_first and not (torch.is_inference_mode_enabled() or saving_is_hooked()):
            shared.step.send_next_if_idle()
        return self.received.value

    def end_backward(self, *, defers_update: bool) -> None:
        """Let go of the embeddings, once a backward is over."""
        self.received = None
        if self.progress is Progress.SERVED and not defers_update:
            self.advance(Progress.UPDATED)

    # The update.

    def update(self, after_part: Callable[[int], None] | None = None) -> None:
        """Make a deferred update, if there is one; call `after_part` with the number of each part after its update."""
        if not self.deferred:
            return
        self.shared.telemetry.observe("wait", Stage.EMBEDDING_UPDATE, self.batch)
        if after_part is None:
            self.deferred.apply()
        else:
            owners = enumerate(owners_of_parts(self.module))
            self.deferred.apply_parts([part for part, one in owners if one is WeightOwner.FUSED_BACKWARD], after_part)
        self.advance(Progress.UPDATED)

    def count_lookups(self, times: int) -> None:
        """Add its lookups to the iteration counts of fused optimizers; with `times=-1` subtract them."""
        take_back(tbes(self.module), [-times * num for num in self.num_lookups], self.shared.streams)

    def abandon(self) -> list[Any]:
        """Drop a deferred update; return what holds the tensors of collectives that may be under way."""
        awaitables = [self.splits_awaitable, self.tensors_awaitable, *self.output_dist_awaitables.values()]
        return [self.kjt, self.context, *awaitables, self.dist_input, self.embeddings, *self.deferred.abandon()]

    def drop(self) -> None:
        """Wait for the collectives under way and drop them; take its lookup back from the kernels' counts."""
        if self.tensors_awaitable is not None:  # ids for a lookup at the module's call, which did not come
            self.tensors_awaitable.wait()
            self.tensors_awaitable = None
        if self.has_early_lookup:
            with self.shared.streams.on_lookup():  # where the embeddings were allocated
                for awaitable in [*self.output_dist_awaitables.values(), self.embeddings]:
                    if awaitable is not None:
                        awaitable.wait()
            self._take_back()
        self.deferred = DeferredUpdate()  # no backward reaches its gaps
        self.advance(Progress.DROPPED)

    def _take_back(self) -> None:
        take_back(tbes(self.module), self.num_lookups, self.shared.streams)
        self.num_lookups = []


def autocast_of(module: Any, kjt: KeyedJaggedTensor) -> tuple[bool, torch.dtype] | None:
    """Return whether autocast is on and its dtype; None for modules whose lookup does not depend on it."""
    kind = spec_of(module)
    if kind is None or kind.feature_processors is None:
        return None
    device = kjt.device().type
    return torch.is_autocast_enabled(device), torch.get_autocast_dtype(device)
