"""Tables that no gradient reaches are warned of in every mode, and no other tables are."""

import dataclasses
import warnings
from collections.abc import Callable
from typing import Any
from unittest import mock

import pytest
import torch
import torch.distributed as dist

from lightning_overlap import MODES, OverlapEmbeddingStrategy
from lightning_overlap.compat.torchrec import LazyResult
from lightning_overlap.sparse.deferred_update import DeferredUpdate
from lightning_overlap.sparse.watchers.gradient_watch import NUM_BACKWARDS

from ..plugin.compiled import Compiled
from ..support import cases
from ..support.cases import TABLE_WISE, TWO_COLLECTIONS, Batch, Case, Model, make_plan
from ..support.fits import make_trainer
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from .callers import MODELS, NoGrad
from .test_callers import _CALLS
from .variants import Manual, Variant, no_embeddings

WORDS = "no gradient reaches"
REPLICAS = dataclasses.replace(TABLE_WISE, name="replicas")


class Detached(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        return {key: value.detach() for key, value in super().embeddings(collection, batch).to_dict().items()}


class DetachedValues(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        found = super().embeddings(collection, batch)
        columns = found.values().detach().split(found.length_per_key(), dim=1)
        return dict(zip(found.keys(), columns, strict=True))


class OneDetached(Model):
    """One collection is detached, the other one is trained."""

    def embeddings(self, collection: str, batch: Batch) -> Any:
        found = super().embeddings(collection, batch).to_dict()
        return {key: value.detach() if collection == "second" else value for key, value in found.items()}


class OneNotCalled(Model):
    def embeddings(self, collection: str, batch: Batch) -> Any:
        if collection == "second":
            return no_embeddings(self.case, collection, batch)
        return super().embeddings(collection, batch)


class OneSequenceUnused(Model):
    """Of a collection of sequences the second table is looked up and left out of the loss."""

    def _pool(self, embeddings: Any, table: Any, feature: str) -> Any:
        pooled = super()._pool(embeddings, table, feature)
        return pooled.detach() if table.name == "t1" else pooled


class Penalized(Model):
    """Computes the gradient of embeddings within the step, and trains them in some steps only."""

    def training_step(self, batch: Batch, batch_idx: int) -> Any:
        found = super().embeddings("ebc", batch)
        values = found.values()
        [gradient] = torch.autograd.grad(values.square().mean(), values)
        self.norm = gradient.norm()
        values = values if batch_idx % 3 else values.detach()
        loss = self.top(torch.cat([self.bottom(batch.dense), values], dim=1)).square().mean()
        self.losses.append(loss.detach())
        return loss


class DenseAlone(Manual):
    """Its backward leaves the tables out on purpose in most steps."""

    def go_backward(self, loss: Any) -> None:
        dense = [*self.bottom.parameters(), *self.top.parameters()]
        every = len(self.losses) % 4 == 0
        self.manual_backward(loss, **({} if every else {"inputs": dense}))


class Fetches(Model):
    """Fetches its batches itself, and so runs without lookahead."""

    def training_step(self, dataloader_iter: Any) -> Any:  # type: ignore[override]
        batch, batch_idx, _ = next(dataloader_iter)
        return super().training_step(batch, batch_idx)


class FetchesWithoutGradients(Fetches, NoGrad):
    pass


WARNED: dict[str, tuple[type[Model], Case, str]] = {
    "no_grad": (NoGrad, TABLE_WISE, "'ebc' (t0, t1, t2): training_step calls the module without gradients"),
    "inference_mode": (*MODELS["inference_mode"], "'ebc' (t0, t1, t2): training_step calls the module without"),
    "no_grad, replicas": (NoGrad, REPLICAS, "'ebc' (t0, t1, t2): training_step calls the module without gradients"),
    "detached": (Detached, TABLE_WISE, "'ebc' (t0, t1, t2): their embeddings do not reach the loss"),
    "detached values": (DetachedValues, TABLE_WISE, "'ebc' (t0, t1, t2): their embeddings do not reach the loss"),
    "one detached": (OneDetached, TWO_COLLECTIONS, "'second' (u0, u1): their embeddings do not reach the loss"),
    "one not called": (OneNotCalled, TWO_COLLECTIONS, "'second' (u0, u1): training_step does not call the module"),
    "fetches": (FetchesWithoutGradients, TABLE_WISE, "'ebc' (t0, t1, t2): training_step calls the module without"),
    "one sequence": (OneSequenceUnused, cases.SEQUENCE, "'ebc' (t1): their embeddings do not reach the loss"),
}
TRAINED = [name for name, *_ in _CALLS if name not in ("no_grad", "inference_mode")]


def fit(model: type[Model], case: Case, kind: str, pipeline: str, num_steps: int = NUM_BACKWARDS) -> list[str]:
    """Return the warnings about gradients that this rank gives in a fit."""
    module = model(case)
    options: dict[str, Any] = {"sharding": make_plan(case, module, dist.get_world_size())}
    if case is REPLICAS:
        options = {"replicate_tables": ["t0", "t1", "t2"]}
    trainer = make_trainer(OverlapEmbeddingStrategy(pipeline, **options), limit_val_batches=0)
    with warnings.catch_warnings(record=True, action="always") as caught:
        trainer.fit(module, datamodule=Variant(case, kind, num_steps))
    return [text for one in caught if WORDS in (text := str(one.message))]


def fit_named(name: str, pipeline: str, **options: Any) -> list[str]:
    model, case, _ = WARNED[name]
    return fit(model, case, name, pipeline, **options)


def fit_legitimate(pipelines: list[str]) -> list[list[str]]:
    models = {"penalized": Penalized, "dense alone": DenseAlone}
    return [
        fit(model, TABLE_WISE, name, pipeline, NUM_BACKWARDS + 3)
        for pipeline in pipelines
        for name, model in models.items()
    ]


def fit_with_lost_gradients(pipeline: str, lost: str) -> tuple[str, list[str]]:
    """Return the error and the warnings of a fit whose gaps lose gradients, or whose embeddings are traced."""
    torch._dynamo.reset()
    losing = mock.patch.object(DeferredUpdate, "_keep_gradient", return_value=None)
    tracing = mock.patch.object(LazyResult, "wait", LazyResult.wait.__wrapped__)
    with {"gap": losing, "traced": tracing}[lost]:
        try:
            return "", fit(Traced if lost == "traced" else Model, TABLE_WISE, "plain", pipeline, NUM_BACKWARDS + 3)
        except RuntimeError as err:
            return str(err), []


class Traced(Compiled):
    def __init__(self, case: Case) -> None:
        super().__init__(case, "values", False, False)
        self.head.compile(backend="eager")


def fit_trained(names: list[tuple[str, str]]) -> list[list[str]]:
    return [fit(*MODELS[name], name, pipeline) for name, pipeline in names]


def test_tables_without_a_gradient_are_named_by_one_rank(ranks: Ranks, mode: Any) -> None:
    for name in ("no_grad", "detached"):
        [message], *others = ranks.run(fit_named, name, mode.name)
        assert f"no gradient reaches tables of {WARNED[name][2]}" in message
        assert others == [[]] * (ranks.world_size - 1)


@pytest.mark.parametrize(("name", "pipeline"), in_turn(WARNED, MODES))
def test_the_reason_is_told(two_ranks: Ranks, name: str, pipeline: str) -> None:
    [message], others = two_ranks.run(fit_named, name, pipeline, num_steps=NUM_BACKWARDS + 3)
    assert f"no gradient reaches tables of {WARNED[name][2]}" in message
    assert "To leave tables untrained, set requires_grad=False before fit." in message
    assert others == []


@pytest.mark.parametrize("num_ranks", [1, 2])
def test_tables_that_train_are_not_warned_of(get_ranks: Callable[..., Ranks], num_ranks: int) -> None:
    """However their module is called: twice, in checkpoint(), in some steps only, with ids of its own."""
    calls = in_turn(TRAINED, list(MODES)[num_ranks:] + list(MODES)[:num_ranks])
    for found in get_ranks(num_ranks).run(fit_trained, calls, timeout_s=180):
        assert [call for call, messages in zip(calls, found, strict=True) if messages] == []


def test_a_module_that_fetches_its_batches_and_trains_is_not_warned_of(two_ranks: Ranks) -> None:
    assert two_ranks.run(fit, Fetches, TABLE_WISE, "plain", "fused_sparse_dist") == [[], []]


DEFERRED = ["split_backward", "semi_sync_deferred"]


def test_gradients_that_a_step_leaves_out_on_purpose_are_no_error(two_ranks: Ranks) -> None:
    for messages in two_ranks.run(fit_legitimate, DEFERRED, timeout_s=180):
        assert messages == [[]] * 4


@pytest.mark.parametrize("pipeline", DEFERRED)
def test_a_gradient_of_embeddings_that_does_not_reach_the_tables_ends_the_fit(two_ranks: Ranks, pipeline: str) -> None:
    for error, _ in two_ranks.run(fit_with_lost_gradients, pipeline, "gap"):
        assert (
            "has computed the gradient of the embeddings of 'ebc', and none has reached its tables (t0, t1, t2)"
            in error
        )


def test_embeddings_that_lose_their_graph_from_the_second_batch_on_are_warned_of(two_ranks: Ranks) -> None:
    """The first batch trains them: the module runs in its own forward."""
    [(_, [message]), _] = two_ranks.run(fit_with_lost_gradients, "semi_sync_deferred", "traced")
    assert "no gradient reaches tables of 'ebc' (t0, t1, t2) any more since they are looked up early" in message


def test_few_steps_are_not_judged(two_ranks: Ranks) -> None:
    assert two_ranks.run(fit_named, "no_grad", "fused_sparse_dist", num_steps=NUM_BACKWARDS - 1) == [[], []]
