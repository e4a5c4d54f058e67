"""Face."""

from .modes import MODES as MODES
from .modes import STREAMS as STREAMS
from .options import check_lookup_threads as check_lookup_threads
from .options import check_stash as check_stash
from .options import resolve_schedule as resolve_schedule
from .options import resolve_stream as resolve_stream
from .schedule import Schedule as Schedule
from .schedule import ScheduleError as ScheduleError
from .schedule import Step as Step
from .sequential import SwitchedSchedule as SwitchedSchedule
from .sequential import exact_outside as exact_outside
from .stages import BEFORE as BEFORE
from .stages import BEFORE_WITH_PREFETCH as BEFORE_WITH_PREFETCH
from .stages import EARLY_OWNERS as EARLY_OWNERS
from .stages import SPARSE_STAGES as SPARSE_STAGES
from .stages import STAGE_ORDER as STAGE_ORDER
from .stages import TRAINING_STAGES as TRAINING_STAGES
from .stages import Stage as Stage
from .stages import StreamName as StreamName
from .stages import WeightOwner as WeightOwner
