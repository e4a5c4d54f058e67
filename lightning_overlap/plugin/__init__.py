"""The Lightning side: the strategy and its hooks; `loops/` has what feeds and ends Lightning's loops.

`private_names.py` lists what it uses of Lightning beyond its public interface.
"""

from . import first_words as first_words
from .host_memory import keep_freed_memory as keep_freed_memory
from .loops import logged_step as logged_step
from .strategy import OverlapEmbeddingStrategy as OverlapEmbeddingStrategy
