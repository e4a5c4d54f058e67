"""Wrap collectives of `torch.distributed`, to time or delay them."""

import inspect
from collections.abc import Callable, Iterator, Sequence
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any
from unittest import mock

import torch.distributed as dist
from typing_extensions import override

COLLECTIVES = ("all_to_all_single", "all_reduce", "reduce_scatter", "reduce_scatter_tensor", "all_gather_into_tensor")
_SIGNATURES = {name: inspect.signature(getattr(dist, name)) for name in COLLECTIVES}

Issue = Callable[[], dist.Work | None]  # issues a collective; None on a rank outside the group


class WrappedWork(dist.Work):
    """A collective's work that forwards every call to the real work; subclasses add to it."""

    def __init__(self, work: dist.Work) -> None:
        super().__init__()
        self._work = work

    @override
    def wait(self, timeout: Any = None) -> bool:
        return bool(self._work.wait() if timeout is None else self._work.wait(timeout))

    @override
    def is_completed(self) -> bool:
        return bool(self._work.is_completed())

    @override
    def get_future(self) -> Any:
        return self._work.get_future()


@contextmanager
def wrap_collectives(
    wrap: Callable[[str, dict[str, Any], Issue], dist.Work | None], names: Sequence[str] = COLLECTIVES
) -> Iterator[None]:
    """Within this context, wrap these of the `COLLECTIVES` that this process issues through `torch.distributed`.

    `wrap` gets a function's name, its arguments by name, and a function that issues it. It returns the caller's work.
    """

    def call(name: str, real: Callable[..., Any], *args: Any, **kwargs: Any) -> dist.Work | None:
        given = _SIGNATURES[name].bind(*args, **kwargs).arguments
        asynchronous = given.get("async_op", False)
        given["async_op"] = True
        work = wrap(name, given, partial(real, **given))
        if work is None or asynchronous:
            return work
        work.wait()
        return None

    with ExitStack() as stack:
        for name in names:
            stack.enter_context(mock.patch.object(dist, name, partial(call, name, getattr(dist, name))))
        yield
