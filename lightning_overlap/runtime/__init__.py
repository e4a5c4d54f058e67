"""Walk a schedule: batches in flight, streams and events, and when each stage is issued."""

from .batch_copies import BatchCopies as BatchCopies
from .batch_memory import BatchMemory as BatchMemory
from .batch_memory import keeps_its_data as keeps_its_data
from .batch_tree import Path as Path
from .batch_tree import leaves as leaves
from .batch_tree import resolve as resolve
from .executor import Executor as Executor
from .interfaces import BatchSource as BatchSource
from .interfaces import FetchedBatch as FetchedBatch
from .interfaces import InFlightBatch as InFlightBatch
from .interfaces import ModulePart as ModulePart
from .interfaces import Observer as Observer
from .interfaces import SparseStages as SparseStages
from .interfaces import StageTimer as StageTimer
from .interfaces import Updates as Updates
from .interfaces import observe_nothing as observe_nothing
from .lookup_order import LookupOrder as LookupOrder
from .profiler_ranges import RangesLeftOut as RangesLeftOut
from .profiler_ranges import is_profiled as is_profiled
from .streams import CudaStreams as CudaStreams
from .streams import Streams as Streams
from .streams import make_streams as make_streams
