"""Batch sizes that differ by rank: trained as by the unsharded module, or refused by name."""

from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import Tensor, nn
from torchrec import KeyedJaggedTensor

from ..support.cases import BATCH_SIZE, Batch, Batches, Case, Model, TableSpec, make_batch, make_plan
from ..support.ranks import RankError, Ranks
from . import caller_fits

NUM_STEPS = 8
SMALL = 3  # the batch that is smaller on the last rank


def _case(kind: str, *, sequence: bool = False) -> Case:
    dim = {"column_wise": 16}.get(kind, 8)
    return Case(kind, tuple(TableSpec(f"t{at}", (f"f{at}",), kind, dim=dim) for at in range(2)), sequence=sequence)


def make(case: Case, index: int, rank: int, size: int) -> Batch:
    """Return a batch of which the last rank has `size` samples in one step."""
    batch = make_batch(case, index, rank)
    if (index, rank) != (SMALL, 1):
        return batch
    kjt = batch.inputs["sparse"][0]
    lengths = kjt.lengths().view(-1, BATCH_SIZE)[:, :size]
    ids = [kjt[key].values()[: int(lengths[at].sum())] for at, key in enumerate(kjt.keys())]
    less = KeyedJaggedTensor(kjt.keys(), torch.cat(ids), lengths=lengths.reshape(-1))
    return Batch(batch.dense[:size], {"sparse": (less, index)}, batch.labels[:size])


class Uneven(Model):
    """Its loss of no samples is 0."""

    def dense(self, batch: Batch, embeddings: Any) -> Tensor:
        merged = [self.bottom(batch.dense)]
        for table in self.case.tables:
            merged += [self._pool(embeddings["ebc"], table, feature) for feature in table.features]
        logits = self.top(torch.cat(merged, dim=1)).squeeze(1)
        losses = nn.functional.binary_cross_entropy_with_logits(logits, batch.labels, reduction="none")
        return losses.sum() / max(1, len(losses))


class _Data(Batches):
    def __init__(self, case: Case, size: int) -> None:
        super().__init__(case, NUM_STEPS)
        self.make = lambda case, index, rank: make(case, index, rank, size)

    def val_dataloader(self) -> Any:
        return self.loader_of(range(SMALL - 1, SMALL + 2))


def train(case: Case, size: int, pipeline: str, num_validated: int = 0, **kwargs: Any) -> tuple[Tensor, Any]:
    """Train on this rank; return its losses, and all tables and dense weights."""
    module = Uneven(case)
    plan = make_plan(case, module, torch.distributed.get_world_size())
    kwargs["limit_val_batches"] = num_validated
    result = caller_fits.fit(module, plan, _Data(case, size), pipeline, **kwargs).result
    return result.losses, result.dense


def train_unsharded(case: Case, size: int) -> tuple[Tensor, dict[str, Tensor]]:
    """Train the unsharded module on the batches of both ranks, by the mean of their losses."""
    module = Uneven(case)
    optimizer = module.configure_optimizers()
    losses = []
    for index in range(NUM_STEPS):
        optimizer.zero_grad()
        of_ranks = [_loss(module, make(case, index, rank, size)) for rank in range(2)]
        torch.stack(of_ranks).mean().backward()
        optimizer.step()
        losses.append(torch.stack(of_ranks).detach())
    return torch.stack(losses, dim=1), dict(module.named_parameters())


def _loss(module: Uneven, batch: Batch) -> Tensor:
    if not len(batch.labels):  # which the unsharded module refuses
        return 0 * torch.stack([weight.sum() for weight in module.top.parameters()]).sum()
    found = module.ebc(batch.inputs["sparse"][0])
    return module.dense(batch, {"ebc": found})


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist", "split_backward"])
@pytest.mark.parametrize(
    ("case", "size"),
    [
        *((_case(kind), size) for kind in ("table_wise", "column_wise") for size in (5, 0)),
        *((_case(kind, sequence=True), 5) for kind in ("table_wise", "column_wise", "row_wise")),
    ],
    ids=lambda value: f"{value.name}-{value.sequence}" if isinstance(value, Case) else str(value),
)
def test_trained_as_by_the_unsharded_module(two_ranks: Ranks, case: Case, size: int, pipeline: str) -> None:
    losses, weights = train_unsharded(case, size)
    for mine, (actual, dense) in zip(losses, two_ranks.run(train, case, size, pipeline), strict=True):
        torch.testing.assert_close(actual, mine, atol=1e-5, rtol=1e-5)
        for name, weight in dense.items():
            torch.testing.assert_close(weight, weights[name].detach(), atol=1e-5, rtol=1e-5)


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist", "semi_sync_deferred"])
@pytest.mark.parametrize("size", [5, 0])
def test_row_wise_tables_name_the_sizes_and_what_to_do(two_ranks: Ranks, size: int, pipeline: str) -> None:
    said = (
        rf"RuntimeError: the batch sizes differ by rank \(16 on rank 0, {size} on rank 1\), and gloo gathers the "
        r"gradients of the row-wise tables t0, t1 of 'ebc' only if they are equal(.|\n)* backward of batch 3"
    )
    with pytest.raises(RankError, match=said):
        two_ranks.run(train, _case("row_wise"), size, pipeline)


def test_an_evaluation_of_row_wise_tables_takes_any_sizes(two_ranks: Ranks) -> None:
    """Nothing is gathered without a backward."""
    for losses, _ in two_ranks.run(train, _case("row_wise"), 5, "fused_sparse_dist", 3, limit_train_batches=SMALL):
        assert len(losses) == SMALL


@pytest.mark.parametrize("pipeline", ["base", "fused_sparse_dist"])
@pytest.mark.parametrize("num_ranks", [1, 2])
def test_sequences_of_no_samples_are_refused(get_ranks: Callable[..., Ranks], num_ranks: int, pipeline: str) -> None:
    said = "ValueError: rank . calls 'ebc' in training_step of batch . with an input of no samples"
    with pytest.raises(RankError, match=said):
        get_ranks(num_ranks).run(
            _train_none if num_ranks == 1 else train, _case("row_wise", sequence=True), 0, pipeline
        )


def _train_none(case: Case, size: int, pipeline: str) -> None:
    module = Uneven(case)
    data = _Data(case, size)
    data.make = lambda case, index, rank: make(case, index, 1, size)
    caller_fits.fit(module, make_plan(case, module, 1), data, pipeline, limit_val_batches=0)
