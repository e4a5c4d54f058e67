"""What is known of a batch in flight in all sharded modules of a model."""

from dataclasses import dataclass, field
from typing import Any

from ..runtime import Flight
from .module_flight import ModuleFlight


@dataclass(slots=True, kw_only=True)
class SparseBatch(Flight):
    """A batch in flight, and what is under way of it in each sharded module; `SparseFlight` has the stages."""

    modules: dict[str, ModuleFlight] = field(default_factory=dict)  # by the module's name in the model
    missing: frozenset[str] = frozenset()  # modules whose input only some ranks have; known once sizes are read
    sizes: Any = None  # the exchange of sizes of all modules, while it is under way
    counted: Any = None  # the count of its stale rows (`StaleCounts`), which may be under way
