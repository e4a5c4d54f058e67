"""`pipeline="auto"`: `tuner.py` tries arms in blocks of batches, which `trial.py` compares."""

from .arms import TRIED, Arm, Auto, resolve_auto
from .tuner import Tuner
