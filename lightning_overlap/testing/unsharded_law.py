"""Check law 10 with two short fits, one in the mode and one of the unsharded module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import Callback, LightningModule
from torchrec.sparse.jagged_tensor import JaggedTensor, KeyedTensor

from ..distributed import gather_objects
from ..tables import check_fused_optimizer, find_tables
from .unsharded import (
    ALL,
    CHANGED,
    WITH_GRADIENT,
    Answers,
    Changes,
    GradientShares,
    Weights,
    different_weights,
    materialize,
    of_all_ranks,
)
from .watched_fit import Setting, fit, fit_unsharded, make_seeded

_MOST_STEPS = 4
"""Steps of the short fits, without the staleness, which is added."""
_ROUNDING = 1e-10
"""In float64 a gradient below this share of the largest gradient counts as zero; rounding leaves about 1e-15."""


def compare_with_unsharded(setting: Setting, pipeline: Any, staleness: int) -> tuple[str, str]:
    """Compare a fit in a mode with the unsharded module; return the problem, or '', and what was compared.

    All ranks call this. Each rank compares the embeddings of its batches; the names of changed weights are gathered.
    """
    batches = setting.batches[: _MOST_STEPS + staleness]
    # The unsharded module needs the ids, which `release_features` frees. Quantized communication rounds too much for
    # this comparison.
    left = ("release_features", "quantized_comms")
    strategy_options = {name: value for name, value in setting.strategy_options.items() if name not in left}
    short = replace(setting, batches=batches, strategy_options=strategy_options)
    answers, changes = Answers(_make(short)), Changes()
    problem = _fit_unsharded(short, changes)
    validation = {"limit_val_batches": 2, "val_check_interval": max(1, len(batches) // 2)}
    validated = replace(short, trainer_options={**validation, **setting.trainer_options})
    fit(validated, pipeline, every_state=False, answers=answers)
    left_out = dict(answers.left_out)
    problems = list(answers.problems.values())
    if problem is None:
        weights = of_all_ranks(changes.weights)
        for name in _rounded(short, answers.weights, weights):
            left_out[f"whether training changes {name}"] = "its gradient is zero, except for rounding"
            answers.weights[CHANGED].discard(name)
            weights[CHANGED].discard(name)
        problems += different_weights(answers.weights, weights, answers.modules)
    else:
        left_out["the weights that training changes"] = problem
    said = f"{answers.num_outputs} outputs, {len(answers.weights[ALL])} weights"
    said += "".join(f"; left out: {name} ({reason})" for name, reason in left_out.items())
    return "; ".join(problems), said


def _rounded(setting: Setting, sharded: Weights, unsharded: Weights) -> list[str]:
    """Return the weights that only one of the fits changes, because their gradient is zero except for rounding.

    An example is the bias before a softmax: its gradient is sometimes exactly zero, and Adam makes a full step for any
    other value. In float64 it is tiny beside the other gradients. If the module does not train in float64, return [].
    """
    doubted = (sharded[CHANGED] ^ unsharded[CHANGED]) & sharded[WITH_GRADIENT] & unsharded[WITH_GRADIENT]
    shares = GradientShares()
    precise = replace(setting, trainer_options={**setting.trainer_options, "precision": "64-true"})
    if not doubted or _fit_unsharded(precise, shares, in_64_bits=True) is not None:
        return []
    everyone = gather_objects(shares.most)
    return sorted(name for name in doubted if all(most.get(name, 0.0) < _ROUNDING for most in everyone))


def _fit_unsharded(setting: Setting, watch: Callback, *, in_64_bits: bool = False) -> str | None:
    """Train the unsharded module with a callback; return why training fails on a rank, or None."""
    module = _make(setting)
    problem = ""
    try:
        for name in {table.module for table in find_tables(module)}:
            materialize(module.get_submodule(name))
            if in_64_bits:
                module.get_submodule(name).register_forward_hook(_widen)
        if any(weight.is_meta for weight in module.parameters()):
            raise RuntimeError("weights other than tables are on the meta device")
        fused = check_fused_optimizer(setting.strategy_options.get("fused_optimizer"))
        if fused is not None:
            for table in find_tables(module):
                table.update_in_backward(*fused)
        fit_unsharded(setting, module, watch)
    except Exception as err:  # the training step may need something that only the strategy has
        problem = f"unsharded training fails: {type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"
    return next(filter(None, gather_objects(problem)), None)


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
