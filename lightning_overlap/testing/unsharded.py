"""Compare the embeddings of sharded modules and the weights that a fit changes with the unsharded module (law 10)."""

from __future__ import annotations

import copy
from collections.abc import Iterable, Iterator, Mapping
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from typing_extensions import override

from ..checkpoint import gather
from ..distributed import gather_objects
from ..plugin import OverlapEmbeddingStrategy
from ..schedules import WeightOwner
from ..tables import (
    apply_table_optimizers,
    owners_of,
    sharded_modules,
    spec_of,
    table_optimizers,
    tables_in_backward,
    tables_of,
)

Weights = dict[str, set[str]]
"""`CHANGED`, `WITH_GRADIENT` or `ALL` -> names of weights."""

CHANGED, WITH_GRADIENT, ALL = "changed by training", "with a gradient", "all"


class Changes(Callback):
    """Notes the weights that a fit changes."""

    def __init__(self) -> None:
        self.weights: Weights = {CHANGED: set(), WITH_GRADIENT: set(), ALL: set()}
        self._first: dict[str, Tensor] = {}

    def _weights_of(self, module: LightningModule) -> dict[str, Tensor]:
        return {name: weight.detach().clone() for name, weight in module.named_parameters()}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = self._weights_of(pl_module)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.weights[WITH_GRADIENT] |= {
            name for name, weight in pl_module.named_parameters() if weight.grad is not None
        }

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = self._weights_of(pl_module)
        self.weights[ALL] = set(last)
        self.weights[CHANGED] = {name for name, value in last.items() if not torch.equal(value, self._first[name])}


class GradientShares(Callback):
    """Notes the size of each gradient as a share of the largest gradient of the same backward."""

    def __init__(self) -> None:
        self.most: dict[str, float] = {}
        """Weight -> its largest share in the fit."""

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sizes = {
            name: weight.grad.to_dense().abs().sum().item()
            for name, weight in pl_module.named_parameters()
            if weight.grad is not None
        }
        largest = max(sizes.values(), default=0.0) or 1.0
        for name, size in sizes.items():
            self.most[name] = max(self.most.get(name, 0.0), size / largest)


class Answers(Changes):
    """Compares each answer (returned embeddings) of sharded modules with the unsharded module's.

    The unsharded module is not trained: before each comparison it gets the unsharded weights that the lookup must have
    read. Embeddings are compared at the end of the step: a comparison at the call would wait for them too early.

    Args:
        unsharded: A copy of the untrained module; it is changed.
    """

    def __init__(self, unsharded: LightningModule) -> None:
        super().__init__()
        self.problems: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.num_outputs = 0
        self.updates: list[int] = []
        """The batches whose backward is over; `fit` sets this to `Watched.updates`."""
        self.seen: Mapping[int, tuple[int, ...]] = {}
        """Batch -> the updates that its early lookup saw; `fit` sets this to `Watched.seen`."""
        self._unsharded = unsharded
        self.modules: Mapping[str, Any] = {}
        """The sharded modules, by name."""
        self._states: dict[int, dict[str, dict[str, Tensor]]] = {}
        """Number of updates -> module -> its unsharded state after these updates."""
        self._calls: list[tuple[str, str, Any, Any, bool]] = []
        """Module, place, embeddings, expected embeddings, and whether gradients were enabled."""
        self._given: dict[str, Any] = {}
        """Module -> the arguments of its last call."""
        self._batch, self._state = -1, 0

    # -- events of the fit ----------------------------------------------------------------------------------------

    def answered(self, name: str, step: str, given: Any, embeddings: Any, *, early: bool) -> None:
        """Keep a sharded module's answer, to compare it at the end of the step.

        Args:
            name: The module.
            step: The user's method that called it.
            given: A copy of the positional and keyword arguments from before the call; None if they cannot be copied.
            embeddings: The returned embeddings.
            early: Whether they came from an early lookup.
        """
        if name in self.left_out or name not in self.modules:
            return
        if given is None:
            self.left_out[name] = "its arguments cannot be copied"
            return
        trains = step == "training_step"
        if trains and len(self.updates) > self._state:
            return  # a backward of the same step has already updated tables; their state is unknown
        sharded, state = self.modules[name], self._states[self._state][name]
        if early and trains and self._batch in self.seen:
            # Only fused tables are stale.
            then = self._states[len(self.seen[self._batch])][name]
            state = {key: then[key] if _is_fused(key, sharded) else value for key, value in state.items()}
        unsharded = self._unsharded.get_submodule(name).train(sharded.training)
        unsharded.load_state_dict(state, strict=False)
        self._given[name] = given
        args, kwargs = given
        with torch.no_grad():
            expected = unsharded(*args, **kwargs)
        place = f"batch {self._batch}" if trains else f"a {step}"
        self._calls.append((name, place, embeddings, expected, torch.is_grad_enabled()))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.modules = sharded_modules(pl_module)
        unsharded = dict(self._unsharded.named_modules())
        for name, module in self.modules.items():
            if (reason := _why_not_comparable(module, unsharded.get(name))) is not None:
                self.left_out[name] = reason
            if name in unsharded:
                materialize(unsharded[name])
        self._unsharded.to(pl_module.device)
        self._keep(trainer)
        super().on_train_start(trainer, pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        self._batch, self._state = batch_idx, len(self.updates)

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._compare()
        self._keep(trainer)
        self._state = len(self.updates)

    @override
    def on_validation_batch_end(self, *args: Any, **kwargs: Any) -> None:
        self._compare()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Also compare calls in evaluation mode, as a callback may make them."""
        everyone = gather_objects(sorted(self._given.keys() - self.left_out.keys()))
        for name in sorted(set(everyone[0]).intersection(*everyone)):
            sharded, given = self.modules[name], self._given[name]
            training = sharded.training
            args, kwargs = copy.deepcopy(given)
            with torch.no_grad():
                embeddings = waited(sharded.eval()(*args, **kwargs))
            self.answered(name, "call by hand in evaluation mode", given, embeddings, early=False)
            self._compare()
            sharded.train(training)
        super().on_train_end(trainer, pl_module)
        self.weights = of_all_ranks(self.weights)

    # -- states and comparisons -----------------------------------------------------------------------------------

    def _keep(self, trainer: Trainer) -> None:
        """Keep the current weights; drop old weights that no stale lookup can read any more."""
        strategy = trainer.strategy
        assert isinstance(strategy, OverlapEmbeddingStrategy)
        num = len(self.updates)
        oldest = min([num, *(len(seen) for batch, seen in self.seen.items() if batch > self._batch)])
        self._states = {at: state for at, state in self._states.items() if at >= oldest}
        with strategy.saving():  # after deferred updates and running lookups
            group = strategy.checkpoint_group
            self._states[num] = {name: _whole_state(module, group) for name, module in self.modules.items()}

    @override
    def _weights_of(self, module: LightningModule) -> dict[str, Tensor]:
        """Return the model's weights; for sharded modules from the latest state."""
        found = {
            name: weight.detach().clone()
            for name, weight in module.named_parameters()
            if not is_in(name, self.modules) and weight.requires_grad
        }
        for outer, state in self._states[max(self._states)].items():
            names = [name for name, _ in self._unsharded.get_submodule(outer).named_parameters()]
            found |= {f"{outer}.{name}": state[name] for name in names if name in state}
        return found

    def _compare(self) -> None:
        calls, self._calls = self._calls, []
        for name, place, embeddings, expected, grad_enabled in calls:
            if name not in self.problems:
                self.num_outputs += 1
                arrived = waited(embeddings)
                found = first_difference(arrived, expected)
                if not grad_enabled and any(getattr(part, "requires_grad", False) for _, part in parts(arrived)):
                    found = "its embeddings need a gradient, though it was called without one (torch.no_grad)"
                if found is not None:
                    self.problems[name] = f"{name!r} in {place}: {found}"


def of_all_ranks(weights: Weights) -> Weights:
    """Return the union over all ranks; all ranks call this."""
    everyone = gather_objects(weights)
    return {what: set().union(*(one[what] for one in everyone)) for what in weights}


def different_weights(sharded: Weights, unsharded: Weights, modules: Iterable[str]) -> list[str]:
    """Return a line for each way in which two fits, with sharded `modules` and without, treat weights differently.

    Gradients of tables are not compared: the kernels keep them.
    """
    problems = []
    both = sharded[ALL] & unsharded[ALL]
    outside = {name for name in both if not is_in(name, modules)}
    for what, names in ((CHANGED, both), (WITH_GRADIENT, outside)):
        mine, theirs = sharded[what], unsharded[what]
        for more, how in ((mine - theirs, "sharded, not unsharded"), (theirs - mine, "unsharded, not sharded")):
            problems += [f"{', '.join(sorted(more & names))}: {what} {how}"] if more & names else []
    return problems


# -- answers --------------------------------------------------------------------------------------------------------


def waited(answer: Any) -> Any:
    """Return an answer after waiting for every awaitable in it."""
    if isinstance(answer, LazyAwaitable):  # `wait()` would wait again if the step has waited
        return waited(answer.values.__self__)
    if isinstance(answer, Awaitable):
        return waited(answer.wait())
    return tuple(map(waited, answer)) if isinstance(answer, tuple) else answer


def parts(answer: Any, name: str = "") -> Iterator[tuple[str, Any]]:
    """Yield everything that a caller can read from an answer, as (expression, tensor or list of names)."""
    if isinstance(answer, KeyedTensor):
        yield f"{name}.keys()", list(answer.keys())
        yield f"{name}.length_per_key()", list(answer.length_per_key())
        yield f"{name}.values()", answer.values()
        yield from parts(answer.to_dict(), f"{name}.to_dict()")
    elif isinstance(answer, KeyedJaggedTensor):
        yield f"{name}.keys()", list(answer.keys())
        yield from parts(JaggedTensor(answer.values(), answer.weights_or_none(), lengths=answer.lengths()), name)
    elif isinstance(answer, JaggedTensor):
        yield f"{name}.values()", answer.values()
        yield f"{name}.lengths()", answer.lengths()
        yield f"{name}.weights()", answer.weights_or_none()
    elif isinstance(answer, Mapping):
        yield f"{name}.keys()", list(answer)
        for key, value in answer.items():
            yield from parts(value, f"{name}[{key!r}]")
    elif isinstance(answer, (tuple, list)):
        for at, value in enumerate(answer):
            yield from parts(value, f"{name}[{at}]")
    else:
        yield name, answer


def first_difference(mine: Any, theirs: Any) -> str | None:
    """Describe the first difference, beyond rounding, between a sharded and an unsharded answer; None if equal."""
    all_mine, all_theirs = list(parts(mine)), list(parts(theirs))
    for (name, part), (other, expected) in zip(all_mine, all_theirs, strict=False):
        if name != other:
            return f"{name} instead of the unsharded module's {other}"
        if not isinstance(part, Tensor) or not isinstance(expected, Tensor):
            if part is not expected and part != expected:
                return f"{name.removeprefix('.')} is {part}, unsharded {expected}"
            continue
        try:
            torch.testing.assert_close(part.detach(), expected.detach(), check_dtype=False, equal_nan=True)
        except AssertionError as err:
            return f"{name.removeprefix('.')}: {' '.join(str(err).split())}"
    if len(all_mine) != len(all_theirs):
        return f"{len(all_mine)} parts of an answer, unsharded {len(all_theirs)}"
    return None


# -- weights --------------------------------------------------------------------------------------------------------


def is_in(name: str, modules: Iterable[str]) -> bool:
    """Return whether a weight belongs to one of these modules."""
    return any(name.startswith(f"{outer}.") for outer in modules)


def _whole_state(module: nn.Module, group: dist.ProcessGroup | None) -> dict[str, Tensor]:
    """Return a copy of a sharded module's state, gathered into unsharded tensors; all ranks call this."""
    tensors = {key: value for key, value in module.state_dict().items() if isinstance(value, Tensor)}
    whole = {key: value.detach().clone() for key, value in gather(tensors, group)}
    on_rank_zero: dict[str, Tensor] = gather_objects(whole, group)[0]
    return on_rank_zero


def materialize(child: nn.Module) -> None:
    """Move a module from `meta` to the CPU with random values, and apply its in-backward optimizers again."""
    if any(weight.is_meta for weight in child.parameters()):
        applied = table_optimizers(child)
        child.to_empty(device="cpu")
        for weight in child.parameters():
            nn.init.normal_(weight, std=0.1)
        apply_table_optimizers(child, applied)


def _why_not_comparable(module: Any, unsharded: nn.Module | None) -> str | None:
    if unsharded is None:
        return "the unsharded model has no module of that name: the fit makes or replaces it"
    if type(unsharded) is type(module):
        return "the user shards it"
    kind = spec_of(module)
    if kind is None:
        return f"a {type(module).__name__} is of no known kind"
    if WeightOwner.LOOKUP in owners_of(module):
        return "each shard assigns rows to the ids that it has seen"
    if kind.feature_processors and list(getattr(module, kind.feature_processors).buffers()):
        return "its feature processors have buffers, which differ by rank"
    return None


def _is_fused(key: str, module: Any) -> bool:
    fused = WeightOwner.FUSED_BACKWARD in owners_of(module)
    return fused and any(f".{table}." in f".{key}." for table in tables_in_backward(tables_of(module)))
