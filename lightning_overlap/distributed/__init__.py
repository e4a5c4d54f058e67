"""Communication between ranks besides the tables' collectives: process groups, consensus, the cause of a failure."""

from . import groups
from .consensus import (
    ASK_FOR_LAST,
    MAX_INTERVAL,
    SKIP_ALIKE,
    Answer,
    Consensus,
    Group,
    Lowest,
    PollInterval,
    StepFlags,
    check_none_batches,
    gather_objects,
    together,
    warn_on_rank_zero,
)
from .failures import FirstCause, Store, default_store, is_told_last, remember_sockets, tell_last, timed_out
from .groups import CONSENSUS
from .mismatches import Mismatches
from .packed_alltoall import PackedExchange, Part
from .wrapped_work import Issue, WrappedWork, wrap_collectives
