"""Awaitables: what `wait` runs, and the collectives inside the awaitable of a module's embeddings."""

import functools
from collections.abc import Iterator, Mapping
from typing import Any, TypeAlias

from torch import Tensor
from torch import distributed as dist
from torchrec.distributed.comm_ops import Request
from torchrec.distributed.types import Awaitable, LazyAwaitable, LazyGetItemMixin, NoWait

from ..torch import is_profiled, never_compiled

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "Awaitable": ("_wait_impl",),
    "NoWait": ("_obj",),
    "Request": ("dummy_tensor", "req"),
}

Collective: TypeAlias = Any  # `Request` or `NoWait`, of embeddings


def wait_for(awaitable: Awaitable[Any]) -> Any:
    """Return `awaitable.wait()`; without a profiler, skip its profiler range, which takes 5 us."""
    if is_profiled() or type(awaitable).wait is not Awaitable.wait:
        return awaitable.wait()
    found = awaitable._wait_impl()
    for callback in awaitable.callbacks:
        found = callback(found)
    return found


class LazyResult(LazyGetItemMixin[str, Any], LazyAwaitable[Any]):  # type: ignore[misc]
    """A lazy awaitable of TorchRec's, for a subclass that says in `result` what its first use gives."""

    def result(self) -> Any:
        """Return what stands behind it; called by `wait`."""
        raise NotImplementedError

    @never_compiled
    def wait(self) -> Any:
        """Return the result; without a profiler, skip TorchRec's `wait`, whose profiler range takes 5 us."""
        return super().wait() if is_profiled() or self.callbacks else self.result()

    def _wait_impl(self) -> Any:
        return self.result()


def collectives_in(started: Any) -> Iterator[Collective]:
    """Yield the collectives that an awaitable of embeddings waits for, in order; on one rank nothing is sent."""
    kind = _kind_of(started.__class__)
    if kind is Request or kind is NoWait:
        yield started
    elif kind is not None:
        for part in started if kind is list else vars(started).values():
            if _kind_of(part.__class__) is not None:  # thirty objects a step have no kind
                yield from collectives_in(part)


@functools.cache
def _kind_of(cls: type) -> Any:
    """Return how `collectives_in` treats objects of a class; cached: `isinstance` is slow for abstract classes."""
    return next((kind for kind in (Request, NoWait, Awaitable, list) if issubclass(cls, kind)), None)


def is_sent(collective: Collective) -> bool:
    """Whether a collective sends its tensors to other ranks."""
    return isinstance(collective, Request)


def joint_of(collective: Collective) -> Tensor | None:
    """Return the tensor that joins the graph before a collective and the graph after it; None if there is none.

    TorchRec makes a collective of two autograd functions that an empty tensor joins: the first starts it, the second
    waits for it. In the backward the second starts the all-to-all of gradients, and the first waits for it. On one rank
    the embeddings themselves join the graphs.
    """
    joint = collective.dummy_tensor if isinstance(collective, Request) else collective._obj
    return joint if isinstance(joint, Tensor) else None


def set_joint(collective: Collective, joint: Tensor) -> None:
    """Let the graph after a collective begin at another tensor; called before the collective is waited for."""
    if isinstance(collective, Request):
        collective.dummy_tensor = joint
    else:
        collective._obj = joint


def work_of(collective: Collective) -> dist.Work | None:
    """Return the work of a collective that is sent; None once it was waited for."""
    work: dist.Work | None = collective.req
    return work
