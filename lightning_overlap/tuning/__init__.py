"""`pipeline="auto"`: `tuner.py` tries arms (`arms.py`) in blocks of batches, which `trial.py` compares."""

from .arms import TRIED as TRIED
from .arms import Arm as Arm
from .auto import Auto as Auto
from .auto import resolve_auto as resolve_auto
from .tuner import Tuner as Tuner
