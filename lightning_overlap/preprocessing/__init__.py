"""Call methods that make a module's inputs when their batch is staged, before its step.

`decorator.py` marks such methods, `staged_calls.py` calls them, `watched_call.py` rejects methods whose early result
could differ.
"""

from .decorator import staged as staged
from .staged_calls import StagedCalls as StagedCalls
