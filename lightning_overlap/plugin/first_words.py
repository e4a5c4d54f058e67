"""Log to users, as at the start of a fit; filter out records and warnings of TorchRec and FBGEMM about themselves."""

import logging
import warnings
from collections.abc import Mapping
from functools import partial

from ..schedules import Mode

LOGGER = "lightning.pytorch.lightning_overlap"  # a child of Lightning's logger, with its handler and level

KNOWN_RECORDS: Mapping[str, str] = {
    "torchrec.distributed.planner.types": "The topology was constructed directly",
    "torchrec.distributed.planner.storage_reservations": "There is a known issue with TorchRec's dense tensor",
    "torchrec.distributed.planner.partitioners": "GreedyPerfPartitioner - ",  # thousands, where INFO is logged
    "torchrec.distributed.utils": "caching params will be ignored",
    "torch.fx._symbolic_trace": "is_fx_tracing will return true",  # TorchRec's own call of it
    "": "Sharding spec not found",  # of each data-parallel table
}
"""Logger -> text in the records that are filtered out: TorchRec's own calls cause them, users cannot act on them."""

KNOWN_WARNINGS = (  # beginnings of the warnings that are filtered out
    r"HeuristicalStorageReservation is known to cause issues",
    r"fbgemm\S+ an autograd kernel was not registered",
    r".broadcast_buffers. is deprecated",
    r"Please use DTensor instead and we are deprecating ShardedTensor",  # at each save and load
    r"torch\.distributed is disabled, unavailable or uninitialized",  # the same on one rank, which needs no group
    r".isinstance\(treespec, LeafSpec\). is deprecated",  # Lightning's own call
)


_FILTERS = {
    name: partial(lambda text, record: text not in str(record.msg), text) for name, text in KNOWN_RECORDS.items()
}


def calm_libraries(wanted: bool = True) -> None:
    """Filter out `KNOWN_RECORDS` and `KNOWN_WARNINGS` in this process from now on; with False, let records through."""
    for name, kept_back in _FILTERS.items():
        logger = logging.getLogger(name)
        (logger.addFilter if wanted else logger.removeFilter)(kept_back)  # adds it once
    for message in KNOWN_WARNINGS if wanted else ():
        warnings.filterwarnings("ignore", message=message)


def of_mode(mode: Mode) -> str:
    """Return a mode's name, its staleness if it is not 0, and the batches that train exactly."""
    schedule = mode.schedule
    words = schedule.name + f", staleness {schedule.staleness}" * bool(schedule.staleness)
    exact = [f"before batch {mode.start_batch}"] if mode.start_batch else []
    exact += [] if mode.end_batch is None else [f"from batch {mode.end_batch} on"]
    return words + f" (fused_sparse_dist {' and '.join(exact)})" * bool(exact)


def tell(text: str) -> None:
    """Log a text of this package."""
    logging.getLogger(LOGGER).info(text)


def warn(text: str) -> None:
    """Log a warning of this package."""
    logging.getLogger(LOGGER).warning(text)


def tell_nobody(text: str) -> None:
    """Take the place of `tell` on other ranks; a copy of the strategy can be pickled with it."""
