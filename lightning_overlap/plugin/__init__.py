"""The Lightning side: the strategy, its hooks and loops.

`private_names.py` lists what it uses of Lightning beyond its public interface.
"""

from . import first_words as first_words
from .fit_loop import logged_step as logged_step
from .strategy import OverlapEmbeddingStrategy as OverlapEmbeddingStrategy
