"""Law 10: a sharded module computes what the unsharded module computes, and trains the same weights."""

from __future__ import annotations

import copy
from collections.abc import Callable, Iterable, Iterator, Mapping
from contextlib import suppress
from dataclasses import replace
from typing import Any

import torch
from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor, nn
from torchrec.distributed.types import Awaitable, LazyAwaitable
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedJaggedTensor, KeyedTensor
from typing_extensions import override

from .. import tables
from ..checkpoint import gather
from ..distributed import gather_objects
from ..schedules import WeightOwner
from ..sparse import Arguments, CalledModule, EarlyEmbeddings
from .watched_fit import Setting, Watched, fit, fit_unsharded, is_in, make_seeded

_MOST_STEPS = 4  # steps of the short fits; the staleness is added
_ROUNDING = 1e-10
"""In float64 a gradient below this share of the largest gradient counts as zero; rounding leaves about 1e-15."""

Weights = dict[str, set[str]]  # `CHANGED`, `WITH_GRADIENT` or `ALL` -> names of weights
CHANGED, WITH_GRADIENT, ALL = "changed by training", "with a gradient", "all"


def num_short_steps(num_steps: int, staleness: int) -> int:
    """Return the number of steps of each of the two short fits, if the others have `num_steps`."""
    return min(num_steps, _MOST_STEPS + staleness)


def compare_with_unsharded(setting: Setting, pipeline: Any, staleness: int) -> tuple[str, str]:
    """Compare two short fits, in a mode and unsharded; return the problem, or '', and what was compared."""
    batches = setting.batches[: num_short_steps(len(setting.batches), staleness)]
    # The unsharded module needs the ids, which `release_features` frees. Quantized communication rounds too much for
    # this comparison.
    left = ("release_features", "quantized_comms")
    strategy_options = {name: value for name, value in setting.strategy_options.items() if name not in left}
    short = replace(setting, batches=batches, strategy_options=strategy_options)
    answers = Answers(_make(short))
    unsharded = _fit_unsharded(short)
    validation = {"limit_val_batches": 2, "val_check_interval": max(1, len(batches) // 2)}
    fit(replace(short, trainer_options={**validation, **setting.trainer_options}), pipeline, answers)
    left_out = dict(answers.left_out)
    problems = list(answers.problems.values())
    sharded = of_all_ranks(answers.changes.weights)
    if isinstance(unsharded, str):
        left_out["the weights that training changes"] = unsharded
    else:
        weights = of_all_ranks(unsharded.weights)
        for name in _rounded(short, sharded, weights):
            left_out[f"whether training changes {name}"] = "its gradient is zero, except for rounding"
            sharded[CHANGED].discard(name)
            weights[CHANGED].discard(name)
        problems += different_weights(sharded, weights, answers.modules)
    compared = f"{answers.num_outputs} outputs, {len(sharded[ALL])} weights"
    compared += "".join(f"; left out: {name} ({reason})" for name, reason in left_out.items())
    return "; ".join(problems), compared


def _rounded(setting: Setting, sharded: Weights, unsharded: Weights) -> list[str]:
    """Return the weights that only one of the fits changes, because their gradient is zero except for rounding."""
    # For example the bias before a softmax: where its gradient is not exactly zero, Adam makes a full step.
    doubted = (sharded[CHANGED] ^ unsharded[CHANGED]) & sharded[WITH_GRADIENT] & unsharded[WITH_GRADIENT]
    precise = replace(setting, trainer_options={**setting.trainer_options, "precision": "64-true"})
    changes = _fit_unsharded(precise, in_64_bits=True) if doubted else ""
    if isinstance(changes, str):
        return []
    everyone = gather_objects(changes.shares)
    return sorted(name for name in doubted if all(shares.get(name, 0.0) < _ROUNDING for shares in everyone))


def _fit_unsharded(setting: Setting, *, in_64_bits: bool = False) -> Changes | str:
    module, changes, problem = _make(setting), Changes(), ""
    try:
        for name in {table.module for table in tables.find_tables(module)}:
            materialize(module.get_submodule(name))
            if in_64_bits:
                module.get_submodule(name).register_forward_hook(_widen)
        if any(weight.is_meta for weight in module.parameters()):
            raise RuntimeError("weights other than tables are on the meta device")
        fused = tables.check_fused_optimizer(setting.strategy_options.get("fused_optimizer"))
        if fused is not None:
            for table in tables.find_tables(module):
                table.update_in_backward(*fused)
        fit_unsharded(setting, module, changes)
    except Exception as err:  # the training step may need something that only the strategy has
        problem = f"unsharded training fails: {type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"
    return next(filter(None, gather_objects(problem)), changes)


def _widen(module: Any, args: Any, answer: Any) -> Any:
    """Return embeddings in float64, as a forward hook. TorchRec's modules return float32 for tables of any dtype."""
    if isinstance(answer, KeyedTensor):
        return KeyedTensor(answer.keys(), answer.length_per_key(), answer.values().double())
    if isinstance(answer, JaggedTensor):
        return JaggedTensor(answer.values().double(), weights=answer.weights_or_none(), lengths=answer.lengths())
    return {key: _widen(module, args, one) for key, one in answer.items()} if isinstance(answer, dict) else answer


def _make(setting: Setting) -> LightningModule:
    module = make_seeded(setting)
    module.configure_model()
    return module


def _named_weights(module: LightningModule) -> dict[str, Tensor]:
    return {name: weight.detach().clone() for name, weight in module.named_parameters()}


class Changes(Callback):
    """Notes the weights that a fit changes, and how large their gradients are."""

    def __init__(self, weights_of: Callable[[LightningModule], dict[str, Tensor]] = _named_weights) -> None:
        self._weights_of = weights_of
        self.weights: Weights = {CHANGED: set(), WITH_GRADIENT: set(), ALL: set()}
        self.shares: dict[str, float] = {}  # weight -> its gradient's largest share in the largest of a backward
        self._first: dict[str, Tensor] = {}

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._first = self._weights_of(pl_module)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        sizes = {
            name: weight.grad.to_dense().abs().sum().item()
            for name, weight in pl_module.named_parameters()
            if weight.grad is not None
        }
        largest = max(sizes.values(), default=0.0) or 1.0
        self.shares |= {name: max(self.shares.get(name, 0.0), size / largest) for name, size in sizes.items()}

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        last = self._weights_of(pl_module)
        changed = {name for name, value in last.items() if not torch.equal(value, self._first[name])}
        self.weights = {CHANGED: changed, WITH_GRADIENT: set(self.shares), ALL: set(last)}


class Answers(Watched):
    """Watches a fit, and compares each answer (returned embeddings) of sharded modules with the unsharded module's.

    The unsharded module is not trained: for each call it gets the weights that the lookup must have read. Embeddings
    are compared at the end of the step: a comparison at the call would wait for them too early.
    """

    validates = True

    def __init__(self, unsharded: LightningModule) -> None:
        super().__init__(every_state=False)
        self.changes = Changes(self._weights_of)
        self.also = [self.changes]
        self.problems: dict[str, str] = {}
        self.left_out: dict[str, str] = {}
        self.num_outputs = 0
        self.modules: Mapping[str, Any] = {}  # the sharded modules, by name
        self._unsharded = unsharded
        self._states: dict[int, dict[str, dict[str, Tensor]]] = {}  # number of updates -> module -> its state
        self._calls: list[tuple[str, str, Any, Any, bool]] = []
        """Module, place, embeddings, expected embeddings, and whether gradients were enabled."""
        self._arguments: Arguments | None = None  # copies of those of the call under way
        self._given: dict[str, Any] = {}  # module -> the arguments of its last call

    @override
    def before_call(self, step: str, forward: CalledModule, arguments: Arguments) -> None:
        self._arguments = None
        with suppress(RuntimeError):  # a tensor with a graph cannot be copied
            self._arguments = copy.deepcopy(arguments)

    @override
    def after_call(self, step: str, forward: CalledModule, answer: Any) -> None:
        super().after_call(step, forward, answer)
        given, self._arguments = self._arguments, None
        self._answered(forward.name, step, given, answer)

    def _answered(self, name: str, step: str, given: Any, embeddings: Any) -> None:
        if name in self.left_out or name not in self.modules:
            return
        if given is None:
            self.left_out[name] = "its arguments cannot be copied"
            return
        trains, latest = step == "training_step", max(self._states)
        if trains and len(self.updates) > latest:
            return  # a backward of the same step has already updated tables; their state is unknown
        sharded, state = self.modules[name], self._states[latest][name]
        if trains and isinstance(embeddings, EarlyEmbeddings) and self.batch in self.seen:
            # Only fused tables are stale.
            then = self._states[len(self.seen[self.batch])][name]
            is_fused = WeightOwner.FUSED_BACKWARD in tables.owners_of(sharded)
            fused = tables.tables_in_backward(tables.tables_of(sharded)) if is_fused else ()
            state = state | {key: then[key] for key in state if any(f".{table}." in f".{key}." for table in fused)}
        unsharded = self._unsharded.get_submodule(name).train(sharded.training)
        unsharded.load_state_dict(state, strict=False)
        self._given[name] = given
        args, kwargs = given
        with torch.no_grad():
            expected = unsharded(*args, **kwargs)
        place = f"batch {self.batch}" if trains else f"a {step}"
        self._calls.append((name, place, embeddings, expected, torch.is_grad_enabled()))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        super().on_train_start(trainer, pl_module)
        self.modules = tables.sharded_modules(pl_module)
        unsharded = dict(self._unsharded.named_modules())
        for name, module in self.modules.items():
            if (reason := _why_not_comparable(module, unsharded.get(name))) is not None:
                self.left_out[name] = reason
            if name in unsharded:
                materialize(unsharded[name])
        self._unsharded.to(pl_module.device)
        self._keep(trainer.strategy)

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_end(trainer, pl_module, outputs, batch, batch_idx)
        self._compare()
        self._keep(trainer.strategy)

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        """Also compare calls in evaluation mode, as a callback may make them."""
        super().on_train_end(trainer, pl_module)
        everyone = gather_objects(self._given.keys() - self.left_out.keys())
        for name in sorted(set.intersection(*everyone)):
            sharded, given = self.modules[name], self._given[name]
            training = sharded.training
            args, kwargs = copy.deepcopy(given)
            with torch.no_grad():
                embeddings = waited(sharded.eval()(*args, **kwargs))
            self._answered(name, "call by hand in evaluation mode", given, embeddings)
            self._compare()
            sharded.train(training)

    def _keep(self, strategy: Any) -> None:
        num = len(self.updates)
        oldest = min([num, *(len(seen) for batch, seen in self.seen.items() if batch > self.batch)])
        self._states = {at: state for at, state in self._states.items() if at >= oldest}
        with strategy.saving():  # after deferred updates and running lookups
            self._states[num] = {}
            for name, module in self.modules.items():
                whole = {key: value.clone() for key, value in gather(module.state_dict(), strategy.checkpoint_group)}
                self._states[num][name] = gather_objects(whole, strategy.checkpoint_group)[0]

    def _weights_of(self, module: LightningModule) -> dict[str, Tensor]:
        found = {
            name: weight.detach().clone()
            for name, weight in module.named_parameters()
            if not is_in(name, self.modules) and weight.requires_grad
        }
        for outer, state in self._states[max(self._states)].items():
            names = [name for name, _ in self._unsharded.get_submodule(outer).named_parameters()]
            found |= {f"{outer}.{name}": state[name] for name in names if name in state}
        return found

    def _compare(self, *_: Any, **__: Any) -> None:
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

    on_validation_batch_end = _compare


def of_all_ranks(weights: Weights) -> Weights:
    """Return the union over all ranks; all ranks call this."""
    everyone = gather_objects(weights)
    return {what: set().union(*(one[what] for one in everyone)) for what in weights}


def different_weights(sharded: Weights, unsharded: Weights, modules: Iterable[str]) -> list[str]:
    """Return a line for each way in which two fits, with sharded `modules` and without, treat weights differently."""
    problems = []
    both = sharded[ALL] & unsharded[ALL]
    outside = {name for name in both if not is_in(name, modules)}
    for what, names in ((CHANGED, both), (WITH_GRADIENT, outside)):
        mine, theirs = sharded[what], unsharded[what]
        for more, how in ((mine - theirs, "sharded, not unsharded"), (theirs - mine, "unsharded, not sharded")):
            problems += [f"{', '.join(sorted(more & names))}: {what} {how}"] if more & names else []
    return problems


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
        what = name.removeprefix(".")
        if isinstance(part, Tensor) and isinstance(expected, Tensor):
            try:
                torch.testing.assert_close(part.detach(), expected.detach(), check_dtype=False, equal_nan=True)
            except AssertionError as err:
                return f"{what}: {' '.join(str(err).split())}"
        elif part is not expected and part != expected:
            return f"{what} is {part}, unsharded {expected}"
    if len(all_mine) != len(all_theirs):
        return f"{len(all_mine)} parts of an answer, unsharded {len(all_theirs)}"
    return None


def materialize(child: nn.Module) -> None:
    """Move a module from `meta` to the CPU with random values, and apply its in-backward optimizers again."""
    if any(weight.is_meta for weight in child.parameters()):
        applied = tables.table_optimizers(child)
        child.to_empty(device="cpu")
        for weight in child.parameters():
            nn.init.normal_(weight, std=0.1)
        tables.apply_table_optimizers(child, applied)


def _why_not_comparable(module: Any, unsharded: nn.Module | None) -> str | None:
    if unsharded is None:
        return "the unsharded model has no module of that name: the fit makes or replaces it"
    if type(unsharded) is type(module):
        return "the user shards it"
    kind = tables.spec_of(module)
    if kind is None:
        return f"a {type(module).__name__} is of no known kind"
    if WeightOwner.LOOKUP in tables.owners_of(module):
        return "each shard assigns rows to the ids that it has seen"
    if kind.feature_processors and list(kind.feature_processors(module).buffers()):
        return "its feature processors have buffers, which differ by rank"
    return None
