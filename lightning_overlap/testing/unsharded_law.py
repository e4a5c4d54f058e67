"""Law 10 on a user's own module: two short fits, one in the mode and one of the unsharded module."""

from __future__ import annotations

from dataclasses import replace
from typing import Any

from lightning.pytorch import LightningModule

from ..distributed import gather_objects
from ..tables import check_fused_optimizer, find_tables
from .unsharded import ALL, Answers, Weights, different_weights, materialize, of_all_ranks
from .verdict import Verdict
from .watched_fit import Setting, fit, fit_unsharded, seed_all

_LAW = "law 10: computes what the unsharded module computes"
_MOST_STEPS = 4
"""Steps of the short fits, to which the staleness is added."""


def computes_what_the_unsharded_computes(setting: Setting, pipeline: Any, staleness: int = 0) -> Verdict:
    """Compare a fit in a mode with the unsharded module: what is answered, and what training changes.

    All ranks call this. Each compares the answers to its own batches; the names of changed weights are gathered.

    Args:
        setting: What the fits of a check have in common.
        pipeline: A mode's name or a schedule.
        staleness: The staleness of the mode, in batches.
    """
    batches = setting.batches[: _MOST_STEPS + staleness]
    # Released ids are gone when their module is called: there would be nothing to give to the unsharded one. And what
    # a codec rounds is more than the rounding meant here: in full precision the same columns go the same way.
    left = ("release_features", "quantized_comms")
    strategy_options = {name: value for name, value in setting.strategy_options.items() if name not in left}
    validation = {"limit_val_batches": 2, "val_check_interval": max(1, len(batches) // 2)}
    short = replace(
        setting,
        batches=batches,
        strategy_options=strategy_options,
        trainer_options={**validation, **setting.trainer_options},
    )
    unsharded, weights = _train_unsharded(replace(short, trainer_options=setting.trainer_options))
    answers = Answers(unsharded)
    fit(short, pipeline, every_state=False, answers=answers)
    left_out = dict(answers.left_out)
    problems = list(answers.problems.values())
    if not isinstance(weights, str):
        problems += different_weights(answers.weights, weights, answers.modules)
    else:
        left_out["the weights that training changes"] = weights
    said = f"{answers.num_outputs} outputs, {len(answers.weights[ALL])} weights"
    said += "".join(f"; left out: {name} ({reason})" for name, reason in left_out.items())
    return Verdict(_LAW, "; ".join(problems), said)


def _train_unsharded(setting: Setting) -> tuple[LightningModule, Weights | str]:
    """Return an untrained unsharded module, and what training another one changes, or why that is not known."""
    untrained, module = _make(setting), _make(setting)  # a deep copy would tear kernels' weights from their parameters
    fused = check_fused_optimizer(setting.strategy_options.get("fused_optimizer"))
    problem, weights = "", Weights()
    try:
        materialize(module, {table.module for table in find_tables(module)})
        if any(weight.is_meta for weight in module.parameters()):
            raise RuntimeError("it has weights on the meta device beside the tables")
        if fused is not None:
            for table in find_tables(module):
                table.apply_fused_optimizer(*fused)
        weights = fit_unsharded(setting, module).weights
    except Exception as err:  # whatever a training step needs that only the strategy has
        problem = f"unsharded training fails: {type(err).__name__}: {str(err).splitlines()[0] if str(err) else ''}"
    failed = next(filter(None, gather_objects(problem)), None)
    return untrained, of_all_ranks(weights) if failed is None else failed


def _make(setting: Setting) -> LightningModule:
    seed_all(setting.seed)
    module = setting.make_module()
    module.configure_model()
    return module
