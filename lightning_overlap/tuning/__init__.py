"""What another mode would take: tried within the training by `pipeline="auto"`, or priced from a measured window.

`tuner.py` tries arms (`arms.py`) in blocks of batches (`trial.py`), and `choice.py` compares them.
"""

from .arms import TRIED as TRIED
from .arms import Arm as Arm
from .arms import following as following
from .auto import Auto as Auto
from .auto import resolve_auto as resolve_auto
from .tuner import Tuner as Tuner
