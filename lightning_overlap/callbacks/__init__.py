"""Callbacks that users add to the Trainer: they ask the strategy what a run does, and change nothing of it."""

from .monitor import OverlapMonitor as OverlapMonitor
from .timeline import OverlapTimeline as OverlapTimeline
