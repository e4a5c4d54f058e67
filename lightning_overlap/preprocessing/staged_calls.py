"""Call staged methods before their batch's step, and answer the step's own calls with what they returned."""

from __future__ import annotations

import warnings
from collections.abc import Iterator
from contextlib import ExitStack, contextmanager
from dataclasses import dataclass
from typing import Any, TypeAlias

import torch
from torch import nn

from ..runtime import InFlightBatch, Path, leaves, resolve
from .decorator import staged_methods
from .unchanged import CONSTANTS, Parts, differences, is_same_part, parts_of_batch
from .watched_call import NotStagedError, Reads, state_read, watch

Key: TypeAlias = "tuple[str, int]"
"""A call in a step: name of the method, and how many calls of it come before."""


class StagedMethod:
    """What a module has in the place of a staged method while a pipeline is attached."""

    def __init__(self, name: str, owner: nn.Module, attribute: str, calls: StagedCalls) -> None:
        self.name, self.owner, self._attribute, self._calls = name, owner, attribute, calls
        self.reads: Reads = {}
        """Attributes of modules that it has read in the calls that were watched."""
        self.num_calls = 0
        """Calls in the step that runs."""

    def attach(self) -> None:
        """Take the method's place."""
        self._before = vars(self.owner).get(self._attribute)
        present = getattr(self.owner, self._attribute)
        self.call: Any = present.call if isinstance(present, StagedMethod) else present
        object.__setattr__(self.owner, self._attribute, self)

    def detach(self) -> None:
        """Put back what was there."""
        if vars(self.owner).get(self._attribute) is not self:
            return
        if self._before is None:
            object.__delattr__(self.owner, self._attribute)
        else:
            object.__setattr__(self.owner, self._attribute, self._before)

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        """Return what the method returns."""
        return self._calls.answer(self, args, kwargs)


@dataclass(slots=True)
class Made:
    """What a staged method has returned for a batch, and what has to stay the same for it to hold."""

    method: StagedMethod
    given: tuple[tuple[Any, ...], dict[str, Any]]
    """Positional and keyword arguments."""
    result: Any
    parts: tuple[Parts, Parts, Parts]
    """Parts of the arguments, of what it has read of modules, and of the result."""
    modes: _Modes
    served: bool = False
    """Whether a call of the step got it; `checkpoint()` repeats that call in the backward."""

    def why_not(self, given: tuple[tuple[Any, ...], dict[str, Any]]) -> str | None:
        """Return why a call with these arguments may return something else now; None: it does not."""
        if not _is_same(self.given, given):
            return "it was called with other arguments"
        for before, now, what in (
            (self.parts[0], parts_of_batch(given), "its arguments were changed after that"),
            (self.parts[1], state_read(self.method.reads), "what it reads of its module was changed after that"),
            (self.parts[2], parts_of_batch(self.result), "its result was changed"),
        ):
            if differences(before, now):
                return what
        return None if self.modes.autocast == _Modes.now().autocast else "it was called under another autocast"


class StagedCalls:
    """The staged methods of a model, and which of their calls can be made before a batch's step.

    The first step shows which objects of the batch, or of what calls before return, each call gets; later batches are
    staged so. Ranks need not agree: lookups compare where their inputs stand (`PipelinedForwards.discover`).

    Args:
        model: The model; None: there are no staged methods.
        step: Name of the user's method that calls them.
        trains: Whether an optimizer steps between two batches.
        rank: This process's rank; rank 0 prints warnings.
        warned: Warnings given so far.
    """

    def __init__(
        self, model: nn.Module | None, *, step: str, trains: bool, rank: int, warned: set[tuple[str, str | None]]
    ) -> None:
        found = {} if model is None else staged_methods(model)
        self.methods = [StagedMethod(name, owner, method, self) for name, (owner, method) in found.items()]
        self._step, self._trains, self._rank, self._warned = step, trains, rank, warned
        self._inflight: InFlightBatch | None = None  # the batch whose step runs, until its backward is over
        self._watched: set[Key] = set()
        self._known = False
        self._sources: dict[Key, tuple[StagedMethod, Any]] = {}  # where the arguments of each call come from
        self._modes = _Modes.now()
        self._last_read: Parts = []

    @property
    def is_used(self) -> bool:
        """Whether calls are made before their batch's step."""
        return bool(self._sources)

    def attach(self) -> None:
        """Take the methods' places."""
        for method in self.methods:
            method.attach()

    def detach(self) -> None:
        """Put the methods back, and forget the step."""
        for method in self.methods:
            method.detach()
        self._inflight = None

    # -- the step ---------------------------------------------------------------------------------------------------

    def begin(self, inflight: InFlightBatch) -> None:
        """Begin a forward of a batch's step."""
        self._inflight = inflight if self.methods else None
        for method in self.methods:
            method.num_calls = 0

    def end(self) -> None:
        """End the forward. If a backward follows it may repeat calls, until `forget`."""
        if not self._trains:
            self._inflight = None

    def forget(self, inflight: InFlightBatch) -> None:
        """Let go of what was made for a batch whose backward is over."""
        if self._inflight is inflight:
            self._inflight = None
        if self._known:
            inflight.made.clear()

    def answer(self, method: StagedMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return what was made for a call if it still holds; else call the method.

        Raises:
            RuntimeError: The method cannot be staged.
        """
        inflight, given = self._inflight, (args, kwargs)
        if inflight is None:
            return method.call(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:  # in a backward
            for made in inflight.made.values():
                if made.method is method and made.served and made.why_not(given) is None:
                    return made.result
            return method.call(*args, **kwargs)
        key = (method.name, method.num_calls)
        method.num_calls += 1
        first: Made | None = inflight.made.get(key)
        if first is None and not self._known:
            with self._outside_the_step():  # a staged method that this one calls is part of it
                inflight.made[key] = self._make_first(key, method, given)
            return inflight.made[key].result
        if first is not None and not first.served:
            reason = first.why_not(given)
            first.served = reason is None
            if reason is None:
                return first.result
            self._leave(key, f"{reason} in {self._step} of batch {inflight.index}")
        return method.call(*args, **kwargs)

    @contextmanager
    def _outside_the_step(self) -> Iterator[None]:
        """Within this context all calls are made."""
        inflight, self._inflight = self._inflight, None
        try:
            yield
        finally:
            self._inflight = inflight

    def _make_first(self, key: Key, method: StagedMethod, given: Any) -> Made:
        """Make a call before it is known where its arguments come from; watch it, if it is the first such one."""
        args, kwargs = given
        if key in self._watched:
            result = method.call(*args, **kwargs)
        else:
            try:
                result, reads = watch(lambda: method.call(*args, **kwargs), given, method.owner, trains=self._trains)
            except NotStagedError as err:
                raise RuntimeError(
                    f"rank {self._rank}: {method.name!r} is @staged, that is, called before its batch's step, but it "
                    f"{err}; or take the decorator away."
                ) from None
            self._watched.add(key)
            method.reads.update(reads)
        return self._note(method, given, result, served=True)

    def _note(self, method: StagedMethod, given: Any, result: Any, *, served: bool = False) -> Made:
        parts = parts_of_batch(given), state_read(method.reads), parts_of_batch(result)
        return Made(method, given, result, parts, _Modes.now(), served)

    # -- which call gets what ---------------------------------------------------------------------------------------

    def searched(self, inflight: InFlightBatch) -> Any:
        """Return what inputs of modules are looked for in: the batch and what staged methods have made of it."""
        if not self.methods:
            return inflight.batch
        return inflight.batch, {key: made.result for key, made in inflight.made.items()}

    def are_alike(self, path: Path, other: Path | None) -> bool:
        """Whether both paths in what is searched lead into the batch, or both into what was made of it."""
        return not self.methods or path[:1] == (other or ())[:1]

    def discover(self, inflight: InFlightBatch) -> None:
        """Find the arguments of the calls of a batch's step in the batch, by identity."""
        self._known = True
        results: dict[Key, Any] = {}
        for key, made in inflight.made.items():
            try:
                self._sources[key] = made.method, _source_of(made.given, (inflight.batch, results))
            except LookupError as err:
                self._warn(made.method.name, str(err))
            else:
                self._modes = made.modes
                results[key] = made.result

    def _leave(self, key: Key, reason: str) -> None:
        """Let a call be made in its step from now on."""
        if key in self._sources:
            del self._sources[key]
            self._warn(key[0], reason)

    def _warn(self, name: str, reason: str) -> None:
        if self._rank == 0 and (name, reason) not in self._warned:
            self._warned.add((name, reason))
            text = f"{name!r} is @staged, but is called in {self._step} from now on: {reason}."
            warnings.warn(text, UserWarning, stacklevel=2)

    # -- before the step --------------------------------------------------------------------------------------------

    def state_has_changed(self) -> bool:
        """Whether what the methods read of their modules has changed since this was asked last."""
        reads: Reads = {}
        for method in self.methods:
            reads |= method.reads
        before, self._last_read = self._last_read, state_read(reads)
        return bool(differences(before, self._last_read))

    def make(self, inflight: InFlightBatch) -> list[Any]:
        """Make the calls of a batch, in the order of its step; return the results."""
        for key, (method, source) in self._sources.items():
            try:
                args, kwargs = _found(source, self.searched(inflight))
            except LookupError:
                continue  # this batch lacks a part: its step may make no such call
            with self._outside_the_step(), self._modes.entered(), _naming(method):
                result = method.call(*args, **kwargs)
                inflight.made[key] = self._note(method, (args, kwargs), result)
        return [made.result for made in inflight.made.values()]


@contextmanager
def _naming(method: StagedMethod) -> Iterator[None]:
    try:
        yield
    except Exception as err:
        err.add_note(f"raised in the staged method {method.name!r}")
        raise


@dataclass(frozen=True, slots=True)
class _Modes:
    """Modes of the caller that change what a method computes. Inference mode counts as no_grad."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> _Modes:
        devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        autocast = ((one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in devices)
        return cls(torch.is_grad_enabled(), tuple(autocast))

    @contextmanager
    def entered(self) -> Iterator[None]:
        """Within this context these modes hold."""
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


# -- arguments --------------------------------------------------------------------------------------------------------


@dataclass(frozen=True, slots=True)
class _Part:
    path: Path
    kind: type


@dataclass(frozen=True, slots=True)
class _Constant:
    value: Any


def _source_of(given: Any, searched: Any) -> Any:
    """Return where an argument comes from: a part of what is searched, a constant, or a container of such sources.

    Raises:
        LookupError: It comes from elsewhere.
    """
    if isinstance(given, CONSTANTS):
        return _Constant(given)
    for path, leaf in leaves(searched, lambda node: node is given):
        if leaf is given:
            return _Part(path, type(given))
    if type(given) in (list, tuple):
        return type(given)(_source_of(one, searched) for one in given)
    if type(given) is dict:
        return {key: _source_of(one, searched) for key, one in given.items()}
    raise LookupError(
        f"an argument ({type(given).__name__}) is made in the step, it is no object of the batch, no result of another "
        "staged method, and no constant"
    )


def _found(source: Any, searched: Any) -> Any:
    """Return an argument from its source in another batch.

    Raises:
        LookupError: This batch has nothing there, or something of another type.
    """
    if isinstance(source, _Constant):
        return source.value
    if isinstance(source, _Part):
        found = resolve(searched, source.path)
        if type(found) is not source.kind:
            raise LookupError(source.path)
        return found
    if isinstance(source, dict):
        return {key: _found(one, searched) for key, one in source.items()}
    return type(source)(_found(one, searched) for one in source)


def _is_same(staged: Any, given: Any) -> bool:
    """Whether an argument is the staged one, or a container of the same type with the same entries."""
    if is_same_part(staged, given):
        return True
    if type(staged) is not type(given) or type(given) not in (list, tuple, dict) or len(staged) != len(given):
        return False
    if isinstance(given, dict):
        return all(key in staged and _is_same(staged[key], one) for key, one in given.items())
    return all(map(_is_same, staged, given))
