"""Law 10 on a user's own module: two short fits, one in the mode and one of the unsharded module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule

from ..distributed import gather_objects
from ..tables import check_fused_optimizer, find_tables
from .unsharded import ALL, Answers, Weights, different_weights, materialize, of_all_ranks
from .watched_fit import Setting, fit, fit_unsharded, make_seeded

_MOST_STEPS = 4
"""Steps of the short fits, to which the staleness is added."""


def compare_with_unsharded(setting: Setting, pipeline: Any, staleness: int) -> tuple[str, str]:
    """Compare a fit in a mode with the unsharded module; return what differs, or '', and what was compared.

    All ranks call this. Each compares the answers to its own batches; the names of changed weights are gathered.
    """
    batches = setting.batches[: _MOST_STEPS + staleness]
    # Released ids are gone when their module is called: there would be nothing to give to the unsharded one. And what
    # a codec rounds is more than the rounding meant here: in full precision the same columns go the same way.
    left = ("release_features", "quantized_comms")
    strategy_options = {name: value for name, value in setting.strategy_options.items() if name not in left}
    short = replace(setting, batches=batches, strategy_options=strategy_options)
    answers, weights = Answers(_make(short)), _changed_unsharded(short)
    validation = {"limit_val_batches": 2, "val_check_interval": max(1, len(batches) // 2)}
    validated = replace(short, trainer_options={**validation, **setting.trainer_options})
    fit(validated, pipeline, every_state=False, answers=answers)
    left_out = dict(answers.left_out)
    problems = list(answers.problems.values())
    if not isinstance(weights, str):
        problems += different_weights(answers.weights, weights, answers.modules)
    else:
        left_out["the weights that training changes"] = weights
    said = f"{answers.num_outputs} outputs, {len(answers.weights[ALL])} weights"
    said += "".join(f"; left out: {name} ({reason})" for name, reason in left_out.items())
    return "; ".join(problems), said


def _changed_unsharded(setting: Setting) -> Weights | str:
    """Return what training the unsharded module changes, or why that is not known."""
    module = _make(setting)
    problem, weights = "", Weights()
    try:
        for name in {table.module for table in find_tables(module)}:
            materialize(module.get_submodule(name))
        if any(weight.is_meta for weight in module.parameters()):
            raise RuntimeError("it has weights on the meta device beside the tables")
        fused = check_fused_optimizer(setting.strategy_options.get("fused_optimizer"))
        if fused is not None:
            for table in find_tables(module):
                table.apply_fused_optimizer(*fused)
        weights = fit_unsharded(setting, module).weights
    except Exception as err:  # whatever a training step needs that only the strategy has
        problem = f"unsharded training fails: {type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"
    failed = next(filter(None, gather_objects(problem)), None)
    return of_all_ranks(weights) if failed is None else failed


def _make(setting: Setting) -> LightningModule:
    module = make_seeded(setting)
    module.configure_model()
    return module
