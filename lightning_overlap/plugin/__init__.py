"""The Lightning side: the strategy, its hooks and loops, and the callbacks that users add.

Lightning's private names occur in `fit_loop.py`, `fetcher.py`, `evaluation_loops.py`, `sigterm.py`, `processes.py` and
`checkpoint_links.py`.
"""

from . import first_words as first_words
from .monitor import OverlapMonitor as OverlapMonitor
from .strategy import OverlapEmbeddingStrategy as OverlapEmbeddingStrategy
from .timeline import OverlapTimeline as OverlapTimeline
