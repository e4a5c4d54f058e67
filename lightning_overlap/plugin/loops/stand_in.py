"""Put a loop of this package in the place of one of Lightning's, for a run."""

from contextlib import ExitStack
from typing import Any


def stand_in(owner: Any, name: str, mixin: type, undo: ExitStack) -> None:
    """Put a loop with the methods of `mixin` in the place of `owner.name`, until `undo` is closed.

    Args:
        owner: A trainer, or a loop that has inner loops.
        name: Attribute of `owner` that holds a loop, perhaps one of the user's own class.
        mixin: Overrides methods of the loop's class. Where it calls `super()`, the loop's own class answers.
        undo: Gives `owner` its own loop back.
    """
    own = getattr(owner, name)
    cls = type(own)
    # Lightning's profilers and logs name a loop by its class: this class has the same name.
    kind: Any = type(cls.__name__, (mixin, cls), {"__module__": cls.__module__})
    loop = kind.__new__(kind)
    # Both have one state, not a copy of it: users, callbacks and Lightning may hold the trainer's own loop, and read
    # its progress there.
    loop.__dict__ = own.__dict__
    setattr(owner, name, loop)
    undo.callback(setattr, owner, name, own)
