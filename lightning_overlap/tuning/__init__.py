"""`pipeline="auto"`: `tuner.py` tries arms in blocks of batches, which `arms.py` compares."""

from .arms import TRIED as TRIED
from .arms import Arm as Arm
from .arms import Auto as Auto
from .arms import resolve_auto as resolve_auto
from .tuner import Tuner as Tuner
