"""Give modules of TorchRec's another forward within a context."""

from collections.abc import Callable, Iterator
from contextlib import contextmanager
from typing import Any


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
