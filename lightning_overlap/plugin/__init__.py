"""The Lightning side: the strategy, its hooks and loops.

Lightning's private names occur in `fit_loop.py`, `fetcher.py`, `evaluation_loops.py`, `sigterm.py`, `processes.py`,
`checkpoint_links.py` and `shortcuts.py`.
"""

from . import first_words as first_words
from .fit_loop import logged_step as logged_step
from .strategy import OverlapEmbeddingStrategy as OverlapEmbeddingStrategy
