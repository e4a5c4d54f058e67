"""Overlap sharded embedding lookups with the dense part of a step, under PyTorch Lightning and TorchRec."""

from . import versions as versions
from .schedules import MODES as MODES
from .schedules import STREAMS as STREAMS
from .schedules import Mode as Mode
from .schedules import Schedule as Schedule
from .schedules import ScheduleError as ScheduleError
from .schedules import Stage as Stage
from .schedules import Step as Step
from .schedules import StreamName as StreamName

versions.check_needed()
try:
    versions.check_installed()
    from .balance import Balance as Balance
    from .callbacks import ExponentialMovingAverage as ExponentialMovingAverage
    from .callbacks import OverlapMonitor as OverlapMonitor
    from .callbacks import OverlapTimeline as OverlapTimeline
    from .checkpoint import AVERAGES as AVERAGES
    from .checkpoint import open_checkpoint as open_checkpoint
    from .plugin import OverlapEmbeddingStrategy as OverlapEmbeddingStrategy
    from .tables import combined_optimizer as combined_optimizer
except (ImportError, OSError) as err:  # OSError: a shared library of FBGEMM does not load
    err.add_note(versions.what_is_supported())
    raise

# By name, as the strategy does not know `deltas/`, which is above it and needs packages of an extra.
OverlapEmbeddingStrategy.checkpoint_readers["deltas"] = "lightning_overlap.deltas.restoring:read_deltas"

TYPE_CHECKING = False
if TYPE_CHECKING:
    from .deltas import Replica as Replica
    from .deltas.recording import EmbeddingDeltas as EmbeddingDeltas


__all__ = [
    "AVERAGES",
    "MODES",
    "STREAMS",
    "Balance",
    "EmbeddingDeltas",
    "ExponentialMovingAverage",
    "Mode",
    "OverlapEmbeddingStrategy",
    "OverlapMonitor",
    "OverlapTimeline",
    "Replica",
    "Schedule",
    "ScheduleError",
    "Stage",
    "Step",
    "StreamName",
    "combined_optimizer",
    "open_checkpoint",
]


def __dir__() -> list[str]:
    return sorted({*globals(), *__all__})


def __getattr__(name: str) -> object:
    # These need packages of the extra `deltas`, and are imported when they are used.
    if name == "EmbeddingDeltas":
        from .deltas.recording import EmbeddingDeltas as EmbeddingDeltas

        return EmbeddingDeltas
    if name == "Replica":
        from .deltas import Replica as Replica

        return Replica
    raise AttributeError(f"module {__name__!r} has no attribute {name!r}")


__version__ = "0.1.0"
