"""Walk a schedule: batches in flight, streams and events, and when each row is run."""

from .batch_memory import BatchMemory, allocates_batches
from .batch_tree import Path, leaves, path_text, resolve, tensors_in
from .batches import free_abandoned
from .flight import FetchedBatch, Flight, ModulePart, Rates
from .interfaces import BatchSource, Observer, SparseStages, StageTimer
from .streams import NOTHING, BatchCopies, CudaStreams, Made, Streams, make_streams
from .table_access import TableAccess
from .telemetry import Telemetry
from .walker import Walker

__all__ = [
    *("NOTHING", "BatchCopies", "BatchMemory", "BatchSource", "CudaStreams", "FetchedBatch", "Flight", "Made"),
    *("ModulePart", "Observer", "Path", "Rates", "SparseStages", "StageTimer", "Streams", "TableAccess"),
    *("Telemetry", "Walker", "allocates_batches", "free_abandoned", "leaves", "make_streams", "path_text", "resolve"),
    "tensors_in",
]
