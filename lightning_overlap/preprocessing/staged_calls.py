"""`staged` marks methods; call them before their batch's step, and answer calls in the step with the early results."""

from __future__ import annotations

import inspect
import warnings
from collections.abc import Callable, Iterator
from contextlib import ExitStack, contextmanager
from functools import partial
from typing import Any, NamedTuple, TypeAlias, TypeVar

import torch
from torch import nn

from ..runtime import InFlightBatch, Path, leaves, resolve
from .watched_call import CONSTANTS, NotStagedError, Reads, differences, is_same, parts_of_batch, state_read, watch

Key: TypeAlias = "tuple[str, int]"  # a call in a step: name of the method, and number of earlier calls of it
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


def _staged_methods(model: nn.Module) -> dict[str, tuple[nn.Module, str]]:
    """Return the staged methods of a model and its submodules: name in the model -> (module, method)."""
    found: dict[str, tuple[nn.Module, str]] = {}
    for name, module in model.named_modules():
        owners = [cls for cls in reversed(type(module).__mro__) if cls is not nn.Module]  # it has 150 members
        members = {key: member for cls in owners for key, member in vars(cls).items()}
        methods = [key for key, member in members.items() if _is_staged(member)]
        if _MARK in vars(module):
            methods.append("forward")
        found |= {f"{name}.{method}".lstrip("."): (module, method) for method in methods}
    return found


def _is_staged(member: Any) -> bool:
    function = member.__func__ if isinstance(member, (staticmethod, classmethod)) else member
    return inspect.isfunction(function) and hasattr(function, _MARK)


class _StagedMethod:
    """Replaces a staged method of a module while a pipeline is attached."""

    def __init__(self, name: str, owner: nn.Module, attribute: str, calls: StagedCalls) -> None:
        self.name, self.owner, self._attribute, self._calls = name, owner, attribute, calls
        self.reads: Reads = {}  # attributes of modules that the method read in watched calls
        self.num_calls = 0  # calls in the current step

    def attach(self) -> None:
        present, own = getattr(self.owner, self._attribute), vars(self.owner)
        self.call: Any = present.call if isinstance(present, _StagedMethod) else present
        self._before = own.get(self._attribute)
        own[self._attribute] = self

    def detach(self) -> None:
        own = vars(self.owner)
        if own.get(self._attribute) is self:
            del own[self._attribute]
            if self._before is not None:
                own[self._attribute] = self._before

    def __call__(self, *args: Any, **kwargs: Any) -> Any:
        return self._calls.answer(self, args, kwargs)


class _Made:
    """The result of a staged method for a batch, the state on which it depends, and whether the step has got it."""

    def __init__(self, method: _StagedMethod, given: Any, result: Any, *, served: bool = False) -> None:
        self.method, self.given, self.result, self.served = method, given, result, served
        self.modes = _Modes.now()
        self._parts = parts_of_batch(given), state_read(method.reads), parts_of_batch(result)

    def why_not(self, given: Any) -> str | None:
        """Return why a call with these arguments may return another result now, or None."""
        if not is_same(self.given, given):
            return "it was called with other arguments"
        arguments, state, result = self._parts
        if differences(arguments, parts_of_batch(given)):
            return "its arguments were changed after the early call"
        if differences(state, state_read(self.method.reads)):
            return "module state that it reads was changed after the early call"
        if differences(result, parts_of_batch(self.result)):
            return "its early result was changed"
        return None if self.modes.autocast == _Modes.now().autocast else "it was called with another autocast mode"


class StagedCalls:
    """The staged methods of a model (or none), and their calls that can be made before a batch's step.

    The first `step`, the user's method, shows where the arguments of each call come from: the batch, or results of
    earlier calls. Ranks need not agree: lookups compare the places of their inputs (`PipelinedForwards.discover`).
    """

    def __init__(
        self, model: nn.Module | None, *, step: str, trains: bool, rank: int, warned: set[tuple[str, str | None]]
    ) -> None:
        found = {} if model is None else _staged_methods(model)
        self.methods = [_StagedMethod(name, owner, method, self) for name, (owner, method) in found.items()]
        self._step, self._trains, self._rank, self._warned = step, trains, rank, warned
        self._inflight: InFlightBatch | None = None  # the batch of the current step, until its backward is over
        self._watched: set[Key] = set()
        self._known = False
        self._sources: dict[Key, tuple[_StagedMethod, Any]] = {}  # the sources of each call's arguments
        self._modes = _Modes.now()
        self._last_read = state_read({})

    @property
    def is_used(self) -> bool:
        """Whether calls are made before their batch's step."""
        return bool(self._sources)

    def attach(self) -> None:
        """Replace the methods."""
        for method in self.methods:
            method.attach()

    def detach(self) -> None:
        """Restore the methods, and forget the step."""
        for method in self.methods:
            method.detach()
        self._inflight = None

    def begin(self, inflight: InFlightBatch) -> None:
        """Begin the forward of a batch's step."""
        self._inflight = inflight if self.methods else None
        for method in self.methods:
            method.num_calls = 0

    def end(self) -> None:
        """End the forward. In training the backward may repeat calls, until `forget`."""
        if not self._trains:
            self._inflight = None

    def forget(self, inflight: InFlightBatch) -> None:
        """Drop the results of a batch whose backward is over."""
        if self._inflight is inflight:
            self._inflight = None
        if self._known:
            inflight.made.clear()

    def answer(self, method: _StagedMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Return the early result of a call if it is still valid; else call the method."""
        inflight, given = self._inflight, (args, kwargs)
        if inflight is None:
            return method.call(*args, **kwargs)
        if torch._C._current_graph_task_id() != -1:  # in a backward: `checkpoint()` repeats a call
            for made in inflight.made.values():
                if made.method is method and made.served and made.why_not(given) is None:
                    return made.result
            return method.call(*args, **kwargs)
        key = (method.name, method.num_calls)
        method.num_calls += 1
        first: _Made | None = inflight.made.get(key)
        if first is None and not self._known:
            with self._outside_the_step():  # nested staged methods are part of this call
                result = self._call_watched(key, method, args, kwargs)
                inflight.made[key] = _Made(method, given, result, served=True)
            return result
        if first is not None and not first.served:
            reason = first.why_not(given)
            first.served = reason is None
            if reason is None:
                return first.result
            if self._sources.pop(key, None) is not None:
                self._warn(method, f"{reason} in {self._step} of batch {inflight.index}")
        return method.call(*args, **kwargs)

    @contextmanager
    def _outside_the_step(self) -> Iterator[None]:
        inflight, self._inflight = self._inflight, None
        try:
            yield
        finally:
            self._inflight = inflight

    def _call_watched(self, key: Key, method: _StagedMethod, args: tuple[Any, ...], kwargs: dict[str, Any]) -> Any:
        """Call a method in the first step; watch the first call of each key."""
        if key in self._watched:
            return method.call(*args, **kwargs)
        try:
            result, reads = watch(
                lambda: method.call(*args, **kwargs), (args, kwargs), method.owner, trains=self._trains
            )
        except NotStagedError as err:
            raise RuntimeError(
                f"rank {self._rank}: {method.name!r} is @staged, that is, called before its batch's step, but it "
                f"{err}; or remove the decorator."
            ) from None
        self._watched.add(key)
        method.reads.update(reads)
        return result

    def searched(self, inflight: InFlightBatch) -> Any:
        """Return the objects in which inputs of modules are searched: the batch, and results of staged methods."""
        if not self.methods:
            return inflight.batch
        return inflight.batch, self.made_in(inflight)[1]

    def made_in(self, inflight: InFlightBatch) -> Any:
        """Return `searched` with the results of staged methods only."""
        return None, {key: made.result for key, made in inflight.made.items()}

    def are_alike(self, path: Path, other: Path | None) -> bool:
        """Return whether both paths lead into the batch, or both into results of staged methods."""
        return not self.methods or path[:1] == (other or ())[:1]

    def discover(self, inflight: InFlightBatch) -> None:
        """Find the arguments of the step's calls in the batch and in earlier results, by identity."""
        self._known = True
        results: dict[Key, Any] = {}
        for key, made in inflight.made.items():
            try:
                self._sources[key] = made.method, _source_of(made.given, (inflight.batch, results))
            except LookupError as err:
                self._warn(made.method, str(err))
            else:
                self._modes = made.modes
                results[key] = made.result

    def _warn(self, method: _StagedMethod, reason: str) -> None:
        if self._rank == 0 and (method.name, reason) not in self._warned:
            self._warned.add((method.name, reason))
            text = f"{method.name!r} is @staged, but from now on it is only called in {self._step}: {reason}."
            warnings.warn(text, stacklevel=2)

    def state_has_changed(self) -> bool:
        """Return whether module state that the methods read has changed since the last call."""
        reads: Reads = {attribute: None for method in self.methods for attribute in method.reads}
        before, self._last_read = self._last_read, state_read(reads)
        return bool(differences(before, self._last_read))

    def make(self, inflight: InFlightBatch) -> list[Any]:
        """Make the calls of a batch, in the order of its step; return the results."""
        for key, (method, source) in self._sources.items():
            try:
                args, kwargs = source(self.searched(inflight))
            except LookupError:
                continue  # this batch lacks an argument: its step may skip the call
            with self._outside_the_step(), self._modes.entered():
                try:
                    result = method.call(*args, **kwargs)
                except Exception as err:
                    err.add_note(f"raised in the staged method {method.name!r}")
                    raise
                inflight.made[key] = _Made(method, (args, kwargs), result)
        return [made.result for made in inflight.made.values()]


class _Modes(NamedTuple):
    """Modes of the caller that affect a method's result. Inference mode counts as no_grad."""

    grad: bool
    autocast: tuple[tuple[str, bool, torch.dtype], ...]

    @classmethod
    def now(cls) -> _Modes:
        devices = ("cpu", "cuda") if torch.cuda.is_initialized() else ("cpu",)
        autocast = ((one, torch.is_autocast_enabled(one), torch.get_autocast_dtype(one)) for one in devices)
        return cls(torch.is_grad_enabled(), tuple(autocast))

    @contextmanager
    def entered(self) -> Iterator[None]:
        with ExitStack() as stack:
            stack.enter_context(torch.inference_mode(False))
            stack.enter_context(torch.set_grad_enabled(self.grad))
            for device, enabled, dtype in self.autocast:
                stack.enter_context(torch.autocast(device, dtype=dtype, enabled=enabled))
            yield


def _source_of(given: Any, searched: Any) -> Any:
    """Return a function that finds an argument in `searched`, of other batches too; or raise a LookupError."""
    if isinstance(given, CONSTANTS):
        return lambda _: given
    for path, leaf in leaves(searched, lambda node: node is given):
        if leaf is given:
            return partial(_resolve, path=path, kind=type(given))
    if type(given) in (list, tuple, dict):
        sources = _map(lambda one: _source_of(one, searched), given)
        return lambda searched: _map(lambda source: source(searched), sources)
    raise LookupError(
        f"an argument ({type(given).__name__}) is made in the step: it is not an object of the batch, a result of "
        "another staged method, or a constant"
    )


def _resolve(searched: Any, path: Path, kind: type) -> Any:
    found = resolve(searched, path)
    if type(found) is not kind:
        raise LookupError(path)
    return found


def _map(call: Callable[[Any], Any], container: Any) -> Any:
    if isinstance(container, dict):
        return {key: call(one) for key, one in container.items()}
    return type(container)(map(call, container))
