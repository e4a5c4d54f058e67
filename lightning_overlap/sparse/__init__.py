"""The sparse stages of a step: input dist, lookup, output dist, deferred updates, for all sharded modules of a model.

A *part* of a module is one sharding of its tables: one entry of TorchRec's `_input_dists`, `_lookups`, `_output_dists`.
"""

from .delayed_gradients import GradientStash as GradientStash
from .inputs import count_anew as count_anew
from .inputs import keyed_jagged_tensors as keyed_jagged_tensors
from .inputs import note_lengths as note_lengths
from .options import SparseOptions as SparseOptions
from .pipeline import SparsePipeline as SparsePipeline
from .pipelined_forward import EarlyEmbeddings as EarlyEmbeddings
from .stale_embeddings import StaleCounts as StaleCounts
from .stale_embeddings import StaleRows as StaleRows
