"""Methods that make a module's inputs from a batch: called when their batch is staged, before its step.

`decorator.py` marks them, `staged_calls.py` calls them and answers the step's own calls, `watched_call.py` looks at the
first call, and refuses methods whose early result could differ.
"""

from .decorator import staged as staged
from .staged_calls import StagedCalls as StagedCalls
