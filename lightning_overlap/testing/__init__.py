"""Law checkers and fakes, for a user's own module, data, schedule or stages.

`check_module(MyModule, data)` trains a module and checks the laws on what it did. `check_laws(my_schedule)` runs a
schedule over fake batches, without tables, TorchRec, Lightning or a GPU, and raises with a drawing where a law breaks.
"""

from .fakes import FakeModuleInFlight as FakeModuleInFlight
from .fakes import FakeSparse as FakeSparse
from .fakes import InjectedError as InjectedError
from .fakes import Served as Served
from .module_laws import ModuleReport as ModuleReport
from .module_laws import Verdict as Verdict
from .module_laws import check_module as check_module
from .pools import CachingAllocator as CachingAllocator
from .pools import PooledStreams as PooledStreams
from .races import Access as Access
from .races import RaceError as RaceError
from .races import Races as Races
from .recorded import FAKE_MODULES as FAKE_MODULES
from .recorded import LOADED_WEIGHTS as LOADED_WEIGHTS
from .recorded import FakeBatch as FakeBatch
from .recorded import Mark as Mark
from .recorded import RecordedEvent as RecordedEvent
from .recorded import RecordingStreams as RecordingStreams
from .recorded import Timeline as Timeline
from .recorded import TimelineEvent as TimelineEvent
from .schedule_laws import check_in_flight as check_in_flight
from .schedule_laws import check_laws as check_laws
from .schedule_laws import check_stages as check_stages
from .schedule_laws import check_staleness as check_staleness
from .schedule_laws import check_stream_order as check_stream_order
from .tensor_races import CheckedStreams as CheckedStreams
from .trainer import FakeTrainer as FakeTrainer
from .trainer import Run as Run
from .trainer import random_schedule as random_schedule
from .trainer import run_schedule as run_schedule
