"""An executor over fake batches, tables and streams, without TorchRec and Lightning, and the laws of such runs."""

from .fake_sparse import FakeSparse as FakeSparse
from .fake_sparse import InjectedError as InjectedError
from .fake_trainer import FakeTrainer as FakeTrainer
from .fake_trainer import Run as Run
from .laws import check_in_flight as check_in_flight
from .laws import check_laws as check_laws
from .laws import check_stages as check_stages
from .laws import check_staleness as check_staleness
from .recording import Mark as Mark
from .recording import RecordingStreams as RecordingStreams
from .recording import Timeline as Timeline
