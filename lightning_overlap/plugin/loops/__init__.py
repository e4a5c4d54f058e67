"""Lightning's loops with a lookahead: where their batches come from, and how all ranks end together."""

from . import evaluation_loops as evaluation_loops
from . import fit_loop as fit_loop
from . import sigterm as sigterm
from .batch_stream import BatchStream as BatchStream
from .fetcher import LookaheadFetcher as LookaheadFetcher
from .fetcher import StagedBatch as StagedBatch
from .fetcher import StepArguments as StepArguments
from .fit_loop import logged_step as logged_step
