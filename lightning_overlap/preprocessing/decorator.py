"""`staged`: marks a method that may be called before its batch's step."""

from __future__ import annotations

import inspect
from typing import Any, TypeVar

from torch import nn

_T = TypeVar("_T")
_MARK = "is_staged_by_lightning_overlap"


def staged(target: _T) -> _T:
    """Let the strategy call a method when its batch is staged, so that lookups of its result start early.

    `training_step` still calls the method, with the batch or parts of it, and gets the early result. If the arguments,
    the batch or the state that the method reads have changed, it is called again. Without the strategy nothing changes.

    Args:
        target: A method of the LightningModule or of a module inside it: `@staged` above
            `def make_inputs(self, batch)`. Or a module, for its `forward`: `self.preprocess = staged(Preprocess())`.

    Raises:
        TypeError: `target` is neither a function nor a module.
    """
    if not inspect.isfunction(target) and not isinstance(target, nn.Module):
        raise TypeError(
            f"staged takes a method or a module, got {target!r}. Write @staged above `def make_inputs(self, batch)` in "
            "a module's class, or self.preprocess = staged(Preprocess())."
        )
    setattr(target, _MARK, True)
    return target


def staged_methods(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the staged methods of a model and its submodules: name in the model -> (module, method)."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules():
        members: dict[str, Any] = {}
        for cls in reversed(type(module).__mro__):
            members.update(vars(cls))
        methods = [key for key, member in members.items() if _is_staged(member)]
        if _MARK in vars(module):
            methods.append("forward")
        found |= {f"{name}.{method}".lstrip("."): (module, method) for method in methods}
    return found


def _is_staged(member: Any) -> bool:
    function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    return inspect.isfunction(function) and hasattr(function, _MARK)
