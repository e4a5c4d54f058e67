"""Walk a schedule: batches in flight, streams and events, and when each stage is issued."""

from .batch_memory import BatchMemory, allocates_batches
from .batch_tree import Path, leaves, resolve
from .executor import Executor
from .interfaces import (
    BatchSource,
    FetchedBatch,
    InFlightBatch,
    ModulePart,
    Observer,
    Rates,
    SparseStages,
    StageTimer,
    Updates,
)
from .lookup_order import LookupOrder
from .profiler_ranges import is_profiled
from .streams import NOTHING, BatchCopies, CudaStreams, Streams, make_streams, tensors_in
