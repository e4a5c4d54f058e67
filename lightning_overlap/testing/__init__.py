"""Law checkers and fakes, for a user's own module, data, schedule or stages.

`check_module(MyModule, data)` trains a module and checks the laws on what it did. `check_laws(my_schedule)` runs a
schedule over fake batches, without tables, TorchRec, Lightning or a GPU, and raises with a drawing where a law breaks.
"""

from .check_module import ModuleReport as ModuleReport
from .check_module import Verdict as Verdict
from .check_module import check_module as check_module
from .check_schedule import check_in_flight as check_in_flight
from .check_schedule import check_laws as check_laws
from .check_schedule import check_stages as check_stages
from .check_schedule import check_staleness as check_staleness
from .checked_streams import CheckedStreams as CheckedStreams
from .fake_sparse import FakeSparse as FakeSparse
from .fake_sparse import InjectedError as InjectedError
from .fake_trainer import FakeTrainer as FakeTrainer
from .fake_trainer import Run as Run
from .race_detector import RaceError as RaceError
from .race_detector import Races as Races
from .race_detector import RecordedEvent as RecordedEvent
from .recording import Mark as Mark
from .recording import RecordingStreams as RecordingStreams
from .recording import Timeline as Timeline
