"""The pipeline modes: one table each, and the stream policies. `MODES` and `STREAMS` map names to them."""

from collections.abc import Mapping
from dataclasses import replace
from types import MappingProxyType
from typing import Literal, TypeAlias

from .schedule import Schedule, Step, check_number
from .stages import Stage, StreamName

_COPY, _SPLITS, _DATA = Stage.COPY_BATCH_TO_DEVICE, Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST
_PREFETCH, _LOOKUP, _UPDATE = Stage.PREFETCH, Stage.EMBEDDING_LOOKUP, Stage.EMBEDDING_UPDATE
_FORWARD, _BACKWARD, _STEP = Stage.DENSE_FORWARD, Stage.BACKWARD, Stage.OPTIMIZER_STEP
_WEIGHTS = Stage.WEIGHT_GRADIENTS
_COMPUTE, _MEMCPY, _DIST = StreamName.COMPUTE, StreamName.MEMCPY, StreamName.DATA_DIST
_LOOKUP_STREAM = StreamName.LOOKUP

# Fetching a batch blocks the host while the data loader is slow. If COPY stands below DENSE_FORWARD, the device still
# has the forward to run; above it, as in the fused modes, the previous batch's backward and optimizer step.

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
"""The copy of N+2 and the input dist of N+1 start early. Source: TrainPipelineSparseDist, TorchRec 1.8."""

_FUSED = (
    Step(_COPY, 2, _MEMCPY),  # the ranks poll whether all have this batch; they read the result after the forward
    Step(_FORWARD, 0, _COMPUTE),
    Step(_SPLITS, 2, _DIST),  # these sizes travel with the ids that are sent next
    Step(_DATA, 1, _DIST),
    Step(_BACKWARD, 0, _COMPUTE),  # writes the tables; batch N+1 may read them afterwards
)

FUSED_SPARSE_DIST = Schedule("fused_sparse_dist", (*_FUSED, Step(_LOOKUP, 1, _LOOKUP_STREAM), Step(_STEP, 0, _COMPUTE)))
"""As `sparse_dist`; the lookup of N+1 starts right after the fused backward of N and overlaps the dense optimizer.
Source: TorchRec PR 2916, issued before the step."""

FUSED_SPARSE_DIST_AFTER_OPTIMIZER = Schedule(
    "fused_sparse_dist_after_optimizer", (*_FUSED, Step(_STEP, 0, _COMPUTE), Step(_LOOKUP, 1, _LOOKUP_STREAM))
)
"""The same lookup, issued after the dense optimizer. Source: `embedding_lookup_after_opt` of TorchRec PR 2916."""

SPLIT_BACKWARD = Schedule("split_backward", (
    *_FUSED,  # BACKWARD computes only gradients of inputs in the dense part: the tables' gradients leave earlier
    Step(_WEIGHTS, 0, _COMPUTE),  # while the tables' gradients travel; the dense all-reduce follows these
    Step(_UPDATE, 0, _LOOKUP_STREAM),
    Step(_LOOKUP, 1, _LOOKUP_STREAM),  # the wait for the dense all-reduce comes after it
    Step(_STEP, 0, _COMPUTE),
))  # fmt: skip
"""As `fused_sparse_dist`; the weight gradients of the dense part overlap the all-to-all of the tables' gradients.
Source: `delay_wgrad_compute` of TransformerEngine (PR 1653), there for the all-to-alls of experts."""

PREFETCH = Schedule("prefetch", (
    Step(_DATA, 1, _DIST),
    Step(_FORWARD, 0, _COMPUTE),
    Step(_COPY, 2, _MEMCPY),
    Step(_PREFETCH, 1, StreamName.PREFETCH),  # the backward of a cached table waits for it, so the cache is settled
    Step(_BACKWARD, 0, _COMPUTE),
    Step(_SPLITS, 2, _DIST),
    Step(_LOOKUP, 1, _LOOKUP_STREAM),
    Step(_STEP, 0, _COMPUTE),
))  # fmt: skip
"""As `fused_sparse_dist`; the rows of N+1 are copied from UVM into the cache during the forward of N.
Source: PrefetchTrainPipelineSparseDist, TorchRec 1.8, which looks up later."""


def _looks_up_before_backward(name: str, staleness: int) -> Schedule:
    return Schedule(name, (
        Step(_FORWARD, 0, _COMPUTE),
        Step(_COPY, staleness + 2, _MEMCPY),
        Step(_LOOKUP, staleness, _LOOKUP_STREAM),  # above BACKWARD (on a CPU within it): misses `staleness` updates
        Step(_SPLITS, staleness + 2, _DIST),
        Step(_BACKWARD, 0, _COMPUTE),
        Step(_DATA, staleness + 1, _DIST),  # after the gradients, which the backward waits for
        Step(_STEP, 0, _COMPUTE),
    ))  # fmt: skip


SEMI_SYNC = _looks_up_before_backward("semi_sync", 1)
"""The lookup of N+1 before the backward of N: staleness 1. Source: TrainPipelineSemiSync, TorchRec 1.8."""

DEFAULT_STALENESS = 2  # of `async_lookup`; 1 is `semi_sync`, larger values cost accuracy and memory


def async_lookup(staleness: int) -> Schedule:
    """Return the mode that looks up batch N + staleness before the backward of batch N; `staleness` is 1 or more.

    Raises a ValueError for a smaller staleness, and a TypeError if it is not an integer.
    Source: DeepRec's asynchronous embedding lookup, where the staleness is bounded and not exact.
    """
    instead = f" For lookups that see every update, use pipeline={FUSED_SPARSE_DIST.name!r}."
    check_number("staleness", staleness, least=1, instead=instead)
    return _looks_up_before_backward(f"async_lookup_{staleness}", staleness)


def defer_update(schedule: Schedule) -> Schedule:
    """Return a mode that applies the updates of batch N after the forward of N+1; the staleness does not change.

    Raises a ValueError for a mode that looks up after the backward: it needs the update by then.
    """
    lookup = schedule.step_of(_LOOKUP)
    if lookup is None or schedule.position(_LOOKUP) > schedule.position(_BACKWARD):
        raise ValueError(
            f"defer_update: {schedule.name!r} looks up after the backward and needs its update by then. Use it with a "
            "mode that looks up before the backward: semi_sync or async_lookup."
        )
    steps = list(schedule.steps)
    ids, backward = schedule.position(_DATA), schedule.position(_BACKWARD)
    sent = [steps.pop(ids)] if ids > backward else []  # after that forward: gradients and ids never share the link
    at = steps.index(lookup)
    steps[at:at] = [*sent, Step(_UPDATE, -1, lookup.stream)]
    return Schedule(f"{schedule.name}_deferred", tuple(steps))


SEMI_SYNC_DEFERRED = defer_update(SEMI_SYNC)
"""`semi_sync` with embedding and gradient communication off the critical path: still staleness 1."""

ASYNC_LOOKUP = replace(async_lookup(DEFAULT_STALENESS), name="async_lookup")

ModeName: TypeAlias = Literal[
    "base", "sparse_dist", "fused_sparse_dist", "fused_sparse_dist_after_optimizer", "split_backward", "prefetch",
    "semi_sync", "semi_sync_deferred", "async_lookup", "auto",
]  # fmt: skip
"""The names of `MODES` and "auto", for editors and type checkers."""

_EXACT = (BASE, SPARSE_DIST, FUSED_SPARSE_DIST, FUSED_SPARSE_DIST_AFTER_OPTIMIZER, SPLIT_BACKWARD, PREFETCH)
_STALE = (SEMI_SYNC, SEMI_SYNC_DEFERRED, ASYNC_LOOKUP)
MODES: Mapping[str, Schedule] = MappingProxyType({schedule.name: schedule for schedule in (*_EXACT, *_STALE)})
"""The modes by name, the exact ones first: `MODES["semi_sync"]` is its table, and `.staleness` its staleness."""

StreamPolicy: TypeAlias = Literal["current", "data_dist", "dedicated"]
"""The names of `STREAMS`, for editors and type checkers."""

STREAMS: Mapping[str, StreamName] = MappingProxyType(
    {"current": StreamName.COMPUTE, "data_dist": StreamName.DATA_DIST, "dedicated": StreamName.LOOKUP}
)
"""Stream policy, for the strategy's `stream=`, to the stream of early lookups."""
