"""The Lightning side: the strategy and its hooks; `loops/` feeds and ends Lightning's loops.

`private_names.py` lists the private names of Lightning that it uses.
"""

from . import first_words as first_words
from .host_memory import keep_freed_memory as keep_freed_memory
from .loops import logged_step as logged_step
from .strategy import OverlapEmbeddingStrategy as OverlapEmbeddingStrategy
