"""The callback that sends updated rows: it marks rows, copies them, and writes cuts.

A row is marked when its update is made, also a deferred update, and not when it is looked up: lookups run ahead of
updates, and some are dropped. Only `lightning_overlap.EmbeddingDeltas` imports this.
"""

from .callback import EmbeddingDeltas as EmbeddingDeltas
from .touched_rows import TouchedRows as TouchedRows
from .writer import CutWriter as CutWriter
