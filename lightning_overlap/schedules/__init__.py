"""Pipeline modes as tables: stages, the order in which a step issues them, and the properties derived from it."""

from .mode import Mode, Schedules, resolve_mode, resolve_stream
from .modes import MODES, STREAMS, ModeName, StreamPolicy
from .schedule import Schedule, ScheduleError, Step
from .stages import EARLY_OWNERS, SPARSE_STAGES, TRAINING_STAGES, Stage, StreamName, WeightOwner
