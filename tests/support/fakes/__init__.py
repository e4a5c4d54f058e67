"""An walker over fake batches, tables and streams, without TorchRec and Lightning, and the laws of such runs."""

from .fake_sparse import FakeSparse, InjectedError
from .fake_trainer import FakeTrainer, Run
from .laws import check_in_flight, check_laws, check_stages, check_staleness
from .recording import Mark, RecordingStreams, Timeline

__all__ = [
    *("FakeSparse", "FakeTrainer", "InjectedError", "Mark", "RecordingStreams", "Run", "Timeline"),
    *("check_in_flight", "check_laws", "check_stages", "check_staleness"),
]
