"""The Lightning side: the strategy, its hooks and loops, and the callbacks that users add.

Lightning's private names occur in `fit_loop.py`, `fetcher.py`, `evaluation_loops.py`, `sigterm.py`, `processes.py`,
`checkpoint_links.py` and `shortcuts.py`.
"""

from .fit_loop import logged_step as logged_step
from .monitor import OverlapMonitor as OverlapMonitor
from .strategy import OverlapEmbeddingStrategy as OverlapEmbeddingStrategy
from .timeline import OverlapTimeline as OverlapTimeline
