"""The Lightning side: the strategy and its hooks; `loops/` feeds and ends Lightning's loops."""

from . import first_words
from .loops import logged_step
from .strategy import OverlapEmbeddingStrategy
