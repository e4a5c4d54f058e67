"""The callback that sends updated rows: which rows the updates have written, copies of them, cuts, and their writer.

A row is marked when its update is made, a deferred one's too, and never when it is looked up: lookups run ahead of
updates, and some are dropped. Imported by `lightning_overlap.EmbeddingDeltas` alone.
"""

from .callback import EmbeddingDeltas as EmbeddingDeltas
from .touched_rows import TouchedRows as TouchedRows
from .writer import CutWriter as CutWriter
