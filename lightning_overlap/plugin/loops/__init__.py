"""Lightning's loops with a lookahead: where their batches come from, and how all ranks end together."""

from . import evaluation_loops, fit_loop, preemption, sigterm
from .batch_stream import BatchStream
from .fetcher import LookaheadFetcher, StagedBatch, StepArguments
from .resume import METRICS
