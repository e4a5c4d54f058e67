"""The Lightning side: the strategy and its hooks; `loops/` feeds and ends Lightning's loops."""

from ..compat.lightning import logged_step
from . import first_words
from .strategy import OverlapEmbeddingStrategy
