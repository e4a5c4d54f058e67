"""Replace attributes and forwards of TorchRec's objects within a context, and wait for its awaitables."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any

from torchrec.distributed.types import Awaitable

from ..runtime import is_profiled


@contextmanager
def replaced(owner: Any, name: str, value: Any) -> Iterator[None]:
    """Replace an attribute of an object or module of TorchRec's within this context."""
    own = getattr(owner, name)
    setattr(owner, name, value)
    try:
        yield
    finally:
        setattr(owner, name, own)


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Return `awaitable.wait()`; without a profiler, skip its profiler range, which takes 5 us."""
    if is_profiled() or type(awaitable).wait is not Awaitable.wait:
        return awaitable.wait()
    found = awaitable._wait_impl()
    for callback in awaitable.callbacks:
        found = callback(found)
    return found


@contextmanager
def other_forwards(forwards: list[tuple[Any, Callable[..., Any]]]) -> Iterator[None]:
    """Give modules without a `forward` of their own, the first of each pair, another one within this context."""
    for module, forward in forwards:
        vars(module)["forward"] = forward  # nn.Module.__setattr__ is slow
    try:
        yield
    finally:
        for module, _ in forwards:
            del vars(module)["forward"]
