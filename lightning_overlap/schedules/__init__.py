"""Pipeline modes as tables: stages, the order in which a step issues them, and the properties derived from it."""

from .mode import Mode as Mode
from .mode import Schedules as Schedules
from .mode import mode_printed_as as mode_printed_as
from .mode import resolve_mode as resolve_mode
from .mode import resolve_stream as resolve_stream
from .mode import unknown_mode_message as unknown_mode_message
from .modes import MODES as MODES
from .modes import STREAMS as STREAMS
from .modes import ModeName as ModeName
from .modes import StreamPolicy as StreamPolicy
from .schedule import Schedule as Schedule
from .schedule import ScheduleError as ScheduleError
from .schedule import Step as Step
from .stages import EARLY_OWNERS as EARLY_OWNERS
from .stages import SPARSE_STAGES as SPARSE_STAGES
from .stages import TRAINING_STAGES as TRAINING_STAGES
from .stages import Stage as Stage
from .stages import StreamName as StreamName
from .stages import WeightOwner as WeightOwner
