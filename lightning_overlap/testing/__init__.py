"""Law checkers for a user's module (`check_module`) or schedule (`check_laws`)."""

from .check_module import ModuleReport as ModuleReport
from .check_module import Verdict as Verdict
from .check_module import check_module as check_module
from .check_schedule import check_laws as check_laws
from .checked_streams import CheckedStreams as CheckedStreams
from .race_detector import RaceError as RaceError
