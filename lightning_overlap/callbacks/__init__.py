"""Callbacks that users add to the Trainer; they observe a run and do not change it."""

from .monitor import OverlapMonitor as OverlapMonitor
from .timeline import OverlapTimeline as OverlapTimeline
