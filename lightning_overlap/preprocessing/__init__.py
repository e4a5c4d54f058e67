"""Call methods that make a module's inputs when their batch is staged, before its step, if that changes no result."""

from .staged_calls import StagedCalls, staged
