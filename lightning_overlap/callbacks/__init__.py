"""Callbacks that users add to the Trainer: two observe a run and do not change it, one averages its weights."""

from .monitor import OverlapMonitor as OverlapMonitor
from .moving_average import ExponentialMovingAverage as ExponentialMovingAverage
from .timeline import OverlapTimeline as OverlapTimeline
