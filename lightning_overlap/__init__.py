"""Overlap sharded embedding lookups with the dense part of a step, under PyTorch Lightning and TorchRec."""

from . import versions as versions
from .modes import MODES as MODES
from .modes import STREAMS as STREAMS
from .optim import combined_optimizer as combined_optimizer
from .schedule import Schedule as Schedule
from .schedule import ScheduleError as ScheduleError
from .schedule import Step as Step
from .stages import Stage as Stage
from .stages import StreamName as StreamName

try:
    from .callbacks import OverlapMonitor as OverlapMonitor
    from .strategy import OverlapEmbeddingStrategy as OverlapEmbeddingStrategy
    from .timeline_callback import OverlapTimeline as OverlapTimeline
except ImportError as err:
    err.add_note(versions.what_is_supported())
    raise

__version__ = "0.1.0"
