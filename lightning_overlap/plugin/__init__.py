"""Face."""

from .monitor import OverlapMonitor as OverlapMonitor
from .strategy import OverlapEmbeddingStrategy as OverlapEmbeddingStrategy
from .timeline import OverlapTimeline as OverlapTimeline
