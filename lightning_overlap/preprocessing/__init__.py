"""Call methods that make a module's inputs when their batch is staged, before its step, if that changes no result."""

from .decorator import staged as staged
from .staged_calls import StagedCalls as StagedCalls
