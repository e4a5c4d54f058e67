"""Law checkers for a user's module or schedule.

`check_module(MyModule, data)` trains a module and checks the laws; `check_laws(my_schedule)` checks a schedule with a
small model, with each `stream` option.
"""

from .check_module import ModuleReport as ModuleReport
from .check_module import Verdict as Verdict
from .check_module import check_module as check_module
from .check_schedule import check_laws as check_laws
from .checked_streams import CheckedStreams as CheckedStreams
from .race_detector import RaceError as RaceError
