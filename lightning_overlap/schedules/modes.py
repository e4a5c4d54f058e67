"""The pipeline modes: one table each, and the stream policies. `MODES` and `STREAMS` map names to them."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from .schedule import Schedule, Step, check_number
from .stages import Stage, StreamName

_COPY, _SPLITS, _DATA = Stage.COPY_BATCH_TO_DEVICE, Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST
_PREFETCH, _LOOKUP, _UPDATE = Stage.PREFETCH, Stage.EMBEDDING_LOOKUP, Stage.EMBEDDING_UPDATE
_FORWARD, _BACKWARD, _STEP = Stage.DENSE_FORWARD, Stage.BACKWARD, Stage.OPTIMIZER_STEP
_COMPUTE, _MEMCPY, _DIST, _SIDE = StreamName.COMPUTE, StreamName.MEMCPY, StreamName.DATA_DIST, StreamName.LOOKUP

# The step that fetches a batch blocks the host when the data loader is slow. Below DENSE_FORWARD the device then has
# the forward left to run; above it, as in the fused modes, the backward and the optimizer step of the batch before.

BASE = Schedule("base", (
    Step(_COPY, 0, _COMPUTE),
    Step(_FORWARD, 0, _COMPUTE),  # input dist, lookup and output dist inside, in the modules' own forward
    Step(_BACKWARD, 0, _COMPUTE),
    Step(_STEP, 0, _COMPUTE),
))  # fmt: skip
"""Nothing starts early: the reference. Source: TrainPipelineBase, TorchRec 1.8, without its early copy."""

SPARSE_DIST = Schedule("sparse_dist", (
    Step(_LOOKUP, 0, _COMPUTE),
    Step(_SPLITS, 1, _DIST),
    Step(_FORWARD, 0, _COMPUTE),
    Step(_COPY, 2, _MEMCPY),
    Step(_DATA, 1, _DIST),
    Step(_BACKWARD, 0, _COMPUTE),
    Step(_STEP, 0, _COMPUTE),
))  # fmt: skip
"""Copy of N+2 and input dist of N+1 early. Source: TrainPipelineSparseDist, TorchRec 1.8."""

_FUSED = (
    Step(_COPY, 2, _MEMCPY),  # the ranks ask each other whether all have it, and hear that after the forward
    Step(_FORWARD, 0, _COMPUTE),
    Step(_SPLITS, 2, _DIST),  # these sizes travel with the ids that are sent next
    Step(_DATA, 1, _DIST),
    Step(_BACKWARD, 0, _COMPUTE),  # writes the tables, so from here on batch N+1 may read them
)

FUSED_SPARSE_DIST = Schedule("fused_sparse_dist", (*_FUSED, Step(_LOOKUP, 1, _SIDE), Step(_STEP, 0, _COMPUTE)))
"""As `sparse_dist`, and the lookup of N+1 right after the fused backward of N, while the dense optimizer steps.

Source: TorchRec PR 2916, issued before the step."""

FUSED_SPARSE_DIST_AFTER_OPTIMIZER = Schedule(
    "fused_sparse_dist_after_optimizer", (*_FUSED, Step(_STEP, 0, _COMPUTE), Step(_LOOKUP, 1, _SIDE))
)
"""The same lookup, issued after the dense optimizer. Source: `embedding_lookup_after_opt` of TorchRec PR 2916."""

PREFETCH = Schedule("prefetch", (
    Step(_DATA, 1, _DIST),
    Step(_FORWARD, 0, _COMPUTE),
    Step(_COPY, 2, _MEMCPY),
    Step(_PREFETCH, 1, StreamName.PREFETCH),  # the backward of a cached table waits for it: the cache is settled
    Step(_BACKWARD, 0, _COMPUTE),
    Step(_SPLITS, 2, _DIST),
    Step(_LOOKUP, 1, _SIDE),
    Step(_STEP, 0, _COMPUTE),
))  # fmt: skip
"""As `fused_sparse_dist`, and the rows of N+1 copied from UVM into the cache during the forward of N.

Source: PrefetchTrainPipelineSparseDist of TorchRec 1.8; the lookup comes earlier than there."""


def _looks_up_before_backward(name: str, staleness: int) -> Schedule:
    return Schedule(name, (
        Step(_FORWARD, 0, _COMPUTE),
        Step(_COPY, staleness + 2, _MEMCPY),
        Step(_LOOKUP, staleness, _SIDE),  # above BACKWARD (on a CPU within it): reads weights so many updates old
        Step(_SPLITS, staleness + 2, _DIST),
        Step(_BACKWARD, 0, _COMPUTE),
        Step(_DATA, staleness + 1, _DIST),  # after the gradients, which the backward waits for
        Step(_STEP, 0, _COMPUTE),
    ))  # fmt: skip


SEMI_SYNC = _looks_up_before_backward("semi_sync", 1)
"""The lookup of N+1 before the backward of N: staleness 1. Source: TrainPipelineSemiSync, TorchRec 1.8."""

DEFAULT_STALENESS = 2
"""The staleness of `async_lookup` if none is given: 1 would be `semi_sync`, more costs accuracy and memory."""


def async_lookup(staleness: int) -> Schedule:
    """Return the mode that looks up batch N + staleness before the backward of batch N.

    At most the embeddings of `staleness` batches ahead of the trained one are in memory, besides its own.

    Args:
        staleness: Updates, in batches, that a lookup of a fused table does not see; from 1 on, 1 is `semi_sync`.

    Raises:
        ValueError: The staleness is less than 1.
        TypeError: It is no integer.

    Source: DeepRec's asynchronous embedding lookup, in which a queue's capacity bounds what is ahead; here the
    number is exact, every run alike.
    """
    instead = f" For lookups that see every update take pipeline={FUSED_SPARSE_DIST.name!r}."
    check_number("staleness", staleness, least=1, instead=instead)
    return _looks_up_before_backward(f"async_lookup_{staleness}", staleness)


def defer_update(schedule: Schedule) -> Schedule:
    """Return a mode with the updates of batch N after the forward of N+1, right before that iteration's lookup.

    The all-to-all of gradients then starts after the backward and overlaps with the optimizer step and that forward.
    A lookup that stands above the backward sees the same updates as before: the staleness stays. Ids that were sent
    after the backward are now sent after that forward, when the gradients have arrived: gradients, ids, embeddings and
    the dense all-reduce follow one another, each with the link for itself.

    Args:
        schedule: A mode whose lookup stands above its backward.

    Raises:
        ValueError: The mode's lookup comes after the backward, and so needs the update by then.
    """
    lookup = schedule.step_of(_LOOKUP)
    if lookup is None or schedule.position(_LOOKUP) > schedule.position(_BACKWARD):
        raise ValueError(
            f"defer_update: {schedule.name!r} looks up after the backward and so needs its update by then. It is for "
            "modes that look up before it: semi_sync and async_lookup."
        )
    steps = list(schedule.steps)
    ids, backward = schedule.position(_DATA), schedule.position(_BACKWARD)
    sent = [steps.pop(ids)] if ids > backward else []
    position = steps.index(lookup)
    steps[position:position] = [*sent, Step(_UPDATE, -1, lookup.stream)]
    return Schedule(f"{schedule.name}_deferred", tuple(steps))


def frozen_window(schedule: Schedule) -> Schedule:
    """Return an exact mode that updates tables with the optimizer step, those of all batches of that step in order.

    With gradients accumulated over k batches, no lookup of these k sees an update of another one, and each sees the
    updates of all optimizer steps before. So within the window a lookup ahead need not wait for a backward
    (`Schedule.accumulating`), and its ids are sent a batch earlier; only the first lookup of the next window waits.

    Args:
        schedule: A mode of staleness 0.

    Raises:
        ValueError: The mode has a staleness, has no sparse stages, or prefetches.
    """
    if schedule.staleness or not schedule.has_sparse_stages or schedule.prefetches:
        why = (
            f"has a staleness of {schedule.staleness}, while a window sees all updates before it"
            if schedule.staleness
            else "keeps rows in a cache until their backward"
            if schedule.has_sparse_stages
            else "leaves the lookup to the modules"
        )
        raise ValueError(
            f"frozen_window: {schedule.name!r} {why}. It is for sparse_dist, fused_sparse_dist and "
            "fused_sparse_dist_after_optimizer."
        )
    lookup = schedule[_LOOKUP]
    ahead = lookup.offset > 0
    steps = [
        replace(step, offset=step.offset + ahead) if step.stage in (_COPY, _SPLITS, _DATA) else step
        for step in schedule
        if not (ahead and step is lookup)
    ]
    steps += [Step(_UPDATE, 0, lookup.stream), *([lookup] if ahead else [])]
    return Schedule(f"{schedule.name}_frozen_window", tuple(steps))


SEMI_SYNC_DEFERRED = defer_update(SEMI_SYNC)
"""`semi_sync` in which neither the embeddings nor the gradients stand on the critical path: still staleness 1."""

ASYNC_LOOKUP = replace(async_lookup(DEFAULT_STALENESS), name="async_lookup")
"""`async_lookup` where no staleness is given."""

ModeName: TypeAlias = Literal[
    "base",
    "sparse_dist",
    "fused_sparse_dist",
    "fused_sparse_dist_after_optimizer",
    "prefetch",
    "semi_sync",
    "semi_sync_deferred",
    "async_lookup",
    "auto",
]
"""The names of `MODES` and "auto", for editors and type checkers."""

_EXACT = (BASE, SPARSE_DIST, FUSED_SPARSE_DIST, FUSED_SPARSE_DIST_AFTER_OPTIMIZER, PREFETCH)
_STALE = (SEMI_SYNC, SEMI_SYNC_DEFERRED, ASYNC_LOOKUP)

MODES: Mapping[str, Schedule] = MappingProxyType({schedule.name: schedule for schedule in (*_EXACT, *_STALE)})

StreamPolicy: TypeAlias = Literal["current", "data_dist", "dedicated"]
"""The names of `STREAMS`, for editors and type checkers."""

STREAMS: Mapping[str, StreamName] = MappingProxyType(
    {"current": StreamName.COMPUTE, "data_dist": StreamName.DATA_DIST, "dedicated": StreamName.LOOKUP}
)
"""Stream policy -> the stream that lookups issued ahead of their batch run on."""
