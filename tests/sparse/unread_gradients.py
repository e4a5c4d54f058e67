"""Steps and fits whose kernels tell of which lookups they compute gradients of weights. Functions that ranks run."""

from collections.abc import Sequence
from typing import Any, NamedTuple

import torch
import torch.distributed as dist
from lightning.pytorch import Callback
from torchrec import KeyedJaggedTensor

from lightning_overlap.compat.torchrec import kernels_in, lookups_of
from lightning_overlap.sparse.unread_gradients import leave_out_unread_gradients
from lightning_overlap.tables import local_part, table_modules

from ..compat.sharded import Sharded, received, shard, step
from ..support.cases import Case, Model
from ..support.fits import make_strategy, make_trainer
from ..support.modules import plain_ids, variable_batch_alike
from .variants import Variant


class Call(NamedTuple):
    """What a kernel was asked for in one lookup."""

    has_backward: bool
    trains_weights: bool
    needed: list[int] | None  # its `feature_requires_grad`; None: all
    num_features: int


def kernels_of(model: Any) -> list[tuple[int, Any]]:
    """Return (number of features, kernel) of each kernel on this rank."""
    lookups = [lookup for one in table_modules(model).values() for lookup in lookups_of(one)]
    found = [pair for lookup in lookups for pair in kernels_in(lookup)]
    return [(sum(table.num_features() for table in tables), kernel) for tables, kernel in found]


def noted(model: Any) -> list[Call]:
    """Return a list to which every lookup of a model's kernels is added from now on."""
    calls: list[Call] = []

    def note(num_features: int, forward: Any) -> Any:
        def look_up(*args: Any, **kwargs: Any) -> Any:
            weights, mask = kwargs["per_sample_weights"], kwargs.get("feature_requires_grad")
            needed = None if mask is None else mask.tolist()
            calls.append(Call(torch.is_grad_enabled(), weights.requires_grad, needed, num_features))
            return forward(*args, **kwargs)

        return look_up

    for num_features, kernel in kernels_of(model):
        kernel.forward = note(num_features, kernel.forward)
    return calls


# -- steps of TorchRec's own modules ---------------------------------------------------------------------------------


def ids(*, weighted: bool, variable: bool = False, trains_weights: bool = False) -> KeyedJaggedTensor:
    generator = torch.Generator().manual_seed(5 + dist.get_rank())
    kjt = variable_batch_alike(generator) if variable else plain_ids(generator)
    if not weighted:
        return kjt
    weights = torch.rand(kjt.values().numel(), generator=generator).requires_grad_(trains_weights)
    sizes = {"stride_per_key_per_rank": kjt.stride_per_key_per_rank(), "inverse_indices": kjt.inverse_indices_or_none()}
    return KeyedJaggedTensor(kjt.keys(), kjt.values(), weights, kjt.lengths(), **(sizes if variable else {}))


def all_weights(module: Any) -> list[Any]:
    """Return the tables, the dense weights and their gradients, as numbers."""
    parts = [
        one for table in table_modules(module).values() for lookup in lookups_of(table) for one in lookup.modules()
    ]
    tables = [weight for part in parts for weight in part.parameters(recurse=False)]
    weights = [*tables, *module.parameters()]
    return [(local_part(one).tolist(), None if one.grad is None else one.grad.tolist()) for one in weights]


def steps(places: Sequence[str], *, variable: bool) -> list[Call]:
    """Train a weighted collection with and without unread gradients; both have to be the same, bit for bit."""
    of = Sharded("weighted", places, variable=variable)
    expected, module = shard(of), shard(of)
    hooks = leave_out_unread_gradients([module])
    calls = noted(module)
    for _ in range(2):
        kjt = ids(weighted=True, variable=variable)
        theirs, ours = (step(one.compute_and_output_dist(*received(one, kjt)).wait()) for one in (expected, module))
        assert ours == theirs
        assert all_weights(module) == all_weights(expected)
    for hook in hooks:
        hook.remove()
    module.compute_and_output_dist(*received(module, kjt)).wait()
    assert all(call.needed is None for call in calls[len(calls) // 3 * 2 :])  # the third lookup of each kernel
    return calls[: len(calls) // 3 * 2]


def gradients_of_weights(pattern: Sequence[bool], *, leaves_out: bool) -> tuple[list[Call], list[Any]]:
    """Train replicas where the weights of some calls' ids need gradients; return the calls, and these gradients."""
    module = shard(Sharded("weighted", ["copies"] * 3))
    if leaves_out:
        leave_out_unread_gradients([module])
    calls, found = noted(module), []
    for trains_weights in pattern:
        kjt = ids(weighted=True, trains_weights=trains_weights)
        step(module.compute_and_output_dist(*received(module, kjt)).wait())
        found.append(None if kjt.weights().grad is None else kjt.weights().grad.tolist())
    return calls, [found, all_weights(module)]


def processed(*, frozen: bool, leaves_out: bool) -> tuple[list[Call], Any]:
    """Train tables whose feature processors set the weights of ids; return the calls, and all gradients."""
    module = shard(Sharded("position_weighted", ["rows", "whole", "rows"]))
    if frozen:
        module._feature_processors.requires_grad_(False)
    if leaves_out:
        leave_out_unread_gradients([module])
    calls = noted(module)
    for _ in range(2):
        step(module.compute_and_output_dist(*received(module, ids(weighted=False))).wait())
    return calls, all_weights(module)


# -- fits ------------------------------------------------------------------------------------------------------------


class MakesItsInput(Model):
    """No input of the batch: the module runs in its own forward."""

    def embeddings(self, collection: str, batch: Any) -> Any:
        kjt = batch.inputs["sparse"][0]
        made = KeyedJaggedTensor(kjt.keys(), kjt.values().clone(), kjt.weights().clone(), kjt.lengths().clone())
        return getattr(self, collection)(made)


class _Notes(Callback):
    def on_train_start(self, trainer: Any, module: Any) -> None:
        module.calls = noted(module)


def fit(case: Case, pipeline: str, *, makes_its_input: bool = False, num_steps: int = 6) -> tuple[list[Call], int]:
    """Fit with two evaluations; return the lookups, and how many hooks are left on kernels."""
    model = (MakesItsInput if makes_its_input else Model)(case)
    kwargs = {"val_check_interval": 3, "limit_val_batches": 1, "callbacks": [_Notes()]}
    trainer = make_trainer(make_strategy(model, pipeline), **kwargs)
    trainer.fit(model, datamodule=Variant(case, "", num_steps))
    return model.calls, sum(len(kernel._forward_pre_hooks) for _, kernel in kernels_of(model))
