"""The callback that sends updated rows: it marks rows when they are updated, copies them, and writes cuts."""

from .callback import EmbeddingDeltas, state_after
