"""The sparse stages of a step: input dist, lookup, output dist, deferred updates, for all sharded modules of a model.

A *part* of a module is one sharding of its tables: one entry of TorchRec's `_input_dists`, `_lookups`, `_output_dists`.
"""

from .batch_inputs import count_anew, keyed_jagged_tensors, note_lengths
from .embeddings import EarlyEmbeddings
from .options import SparseOptions
from .padding import without_batches
from .pipeline import SparsePipeline
from .watchers.loss_guard import LossGuard
from .watchers.stale_rows import StaleCounts, StaleRows
from .watchers.watcher import Arguments, CalledModule, Watcher
