"""Runs that go on from a checkpoint of DDPStrategy, whose optimizers number whole tables among their parameters."""

import warnings
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any

import pytest
import torch
from lightning.pytorch.strategies import DDPStrategy
from torch.optim import lr_scheduler
from torchrec.optim import RowWiseAdagrad
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy, combined_optimizer
from lightning_overlap.checkpoint.plain_state import _how_to_keep, _orders

from ..support.cases import ADAGRAD as CASE
from ..support.cases import Batches, Model
from ..support.fits import make_trainer
from ..support.ranks import Ranks
from .checkpoints import evaluate, parts_of, whole, zeroed

EPOCH = 6
Optimizer = tuple[str, dict[str, Any]]
SCHEDULES: dict[str, Callable[[Any], Any]] = {
    "StepLR": lambda optimizer: lr_scheduler.StepLR(optimizer, 1, 0.5),
    "LinearLR": lambda optimizer: lr_scheduler.LinearLR(optimizer, 0.1, total_iters=1),
    "LambdaLR": lambda optimizer: lr_scheduler.LambdaLR(optimizer, lambda epoch: (epoch + 1) / 4),
}


class Plain(Model):
    """Trains its tables with the optimizer of the dense part, but for those that a strategy trains in backward."""

    def __init__(self, optimizer: Optimizer, groups: str, schedule: str) -> None:
        super().__init__(CASE, fused_optimizer=False)
        self.optimizer, self.groups, self.schedule = optimizer, groups, schedule

    def configure_optimizers(self) -> Any:
        name, kwargs = self.optimizer
        named = dict(in_backward_optimizer_filter(self.named_parameters()))
        tables = [weight for key, weight in named.items() if key.startswith("ebc.")]
        dense = [weight for key, weight in named.items() if not key.startswith("ebc.")]
        of_tables = [{"params": tables, "lr": 0.5}] if tables else []
        groups: dict[str, list[Any]] = {
            "one": [*tables, *dense],
            "tables last": [*dense, *tables],
            "two": [{"params": dense}, *of_tables],
            "other order": [*dense[::-1], *tables],
        }
        optimizer = combined_optimizer(self, getattr(torch.optim, name)(groups[self.groups], **kwargs))
        if not self.schedule:
            return optimizer
        return [optimizer], [SCHEDULES[self.schedule](optimizer)]


def train_plain(path: str, optimizer: Optimizer, groups: str = "one", schedule: str = "") -> Any:
    """Train two epochs under DDPStrategy; save after the first. Return losses and weights of the second."""
    model = Plain(optimizer, groups, schedule)
    for epochs in (1, 2):
        trainer = make_trainer(DDPStrategy(), max_epochs=epochs)
        trainer.fit(model, datamodule=Batches(CASE, EPOCH), ckpt_path=path if epochs == 2 else None)
        if epochs == 1:
            trainer.save_checkpoint(path)
    weights = {name: weight.detach() for name, weight in model.named_parameters()}
    return model.losses[EPOCH:], weights


def go_on(
    path: str,
    optimizer: Optimizer,
    fused: tuple[Any, dict[str, Any]] | None,
    groups: str = "one",
    sharding: Any = "table_wise",
    epochs: int = 2,
    schedule: str = "",
    replicated: Any = False,
) -> Any:
    model: Any = zeroed(Plain(optimizer, groups, schedule))
    strategy = OverlapEmbeddingStrategy(sharding=sharding, fused_optimizer=fused, replicate_tables=replicated)
    trainer = make_trainer(strategy, max_epochs=epochs)
    with warnings.catch_warnings(record=True, action="always") as said:
        try:
            trainer.fit(model, datamodule=Batches(CASE, EPOCH), ckpt_path=path)
        except (RuntimeError, ValueError) as err:
            return f"{type(err).__name__}: {err}"
    rates = [group["lr"] for group in trainer.optimizers[0].param_groups]
    dense = {n: w.detach().clone() for n, w in model.named_parameters() if not n.startswith("ebc.")}
    parts = {} if replicated else parts_of(model)  # which looks for shards
    texts = [str(each.message) for each in said]
    return SimpleNamespace(losses=model.losses, whole=parts, dense=dense, said=texts, rates=rates)


ADAGRAD = ("Adagrad", {"lr": 0.3, "eps": 1e-8})
ADAM = ("Adam", {"lr": 0.05})
FUSED_ADAGRAD = (torch.optim.Adagrad, {"lr": 0.3, "eps": 1e-8})


def close(ours: torch.Tensor, theirs: torch.Tensor) -> bool:
    return torch.allclose(ours, theirs, rtol=1e-4, atol=1e-5)


@pytest.mark.parametrize(
    ("optimizer", "fused", "groups", "options"),
    [
        (ADAGRAD, FUSED_ADAGRAD, "one", {}),
        (ADAGRAD, FUSED_ADAGRAD, "tables last", {}),
        (("SGD", {"lr": 0.3}), (torch.optim.SGD, {"lr": 0.3}), "one", {}),
        (ADAGRAD, (torch.optim.Adagrad, {"lr": 0.5, "eps": 1e-8}), "two", {}),
        (ADAM, None, "one", {"sharding": "data_parallel"}),
        (ADAGRAD, FUSED_ADAGRAD, "one", {"sharding": {"t1": "table_wise"}, "replicated": ["t0"]}),
    ],
    ids=["adagrad", "tables last", "sgd", "two groups", "adam, data-parallel", "replicas"],
)
def test_it_goes_on_as_ddp_would(
    two_ranks: Ranks, optimizer: Any, fused: Any, groups: str, options: Any, tmp_path: Path
) -> None:
    path = str(tmp_path / "ddp.ckpt")
    expected = two_ranks.run(train_plain, path, optimizer, groups)
    found = two_ranks.run(go_on, path, optimizer, fused, groups, **options)
    tables = whole(found)
    for rank, (losses, weights) in zip(found, expected, strict=True):
        assert len(rank.losses) == EPOCH
        assert all(map(close, rank.losses, losses))
        assert all(close(value, weights[name]) for name, value in rank.dense.items())
        assert not any("is reset" in said for said in rank.said)
    for name in () if "replicated" in options else ("t0", "t1"):
        assert close(tables[name], expected[0][1][f"ebc.embedding_bags.{name}.weight"])


def test_what_does_not_fit_is_said(two_ranks: Ranks, tmp_path: Path) -> None:
    path = str(tmp_path / "ddp.ckpt")
    two_ranks.run(train_plain, path, ADAM)
    first, second = two_ranks.run(go_on, path, ADAM, FUSED_ADAGRAD, epochs=1)
    [said] = [said for said in first.said if "is reset" in said]
    assert "ebc.embedding_bags.t0.weight, ebc.embedding_bags.t1.weight: saved with exp_avg, exp_avg_sq" in said
    assert "To keep exp_avg, exp_avg_sq: fused_optimizer=(torch.optim.Adam, {'lr': ...}), on CUDA only." in said
    assert said.endswith("whole on every rank: sharding='data_parallel', and no fused_optimizer.")
    assert not any("is reset" in said for said in second.said)
    saved = torch.load(path, weights_only=True)["state_dict"]
    assert all(torch.equal(value, saved[name]) for name, value in first.dense.items())
    tables = whole([first, second])
    assert torch.equal(tables["t1"], saved["ebc.embedding_bags.t1.weight"])
    assert not tables["t1 momentum1"].any()

    said = two_ranks.run(go_on, path, ADAM, FUSED_ADAGRAD, "other order")[0]
    assert "these numbers cannot be matched with this run's parameters" in said
    assert "torch.load(PATH, weights_only=True)['state_dict']" in said
    assert "\n  saved group 0: 0 (120, 8), 1 (120, 8), " in said
    assert "\n  this run's fused tables: ebc.embedding_bags.t0.weight (120, 8), ebc.embedding_bags.t1" in said
    expected = two_ranks.run(evaluate, CASE, None, "validate", saved)
    for fn in ("validate", "test"):
        assert all(map(torch.equal, two_ranks.run(evaluate, CASE, path, fn), expected))


def test_nothing_keeps_adams_state_of_sequences_on_a_cpu() -> None:
    names = ["ec.embeddings.t0.weight"]
    said = _how_to_keep({(("exp_avg", "exp_avg_sq"), "ROWWISE_ADAGRAD"): names}, names)
    assert said.endswith("If Adam trained them, give RowWiseAdagrad about ten times its rate.")


def test_orders_that_are_alike_are_tried_once() -> None:
    """All orders of all groups are tried together: without this, 26 groups of a table have 3**26."""
    assert _orders(["t0"], [], {"t0"}, ["t0"]) == [["t0"]]


@pytest.mark.parametrize(("sharding", "width"), [("table_wise", 8), ("column_wise", 4)])
def test_row_wise_adagrad_takes_the_mean_of_adagrad(
    two_ranks: Ranks, sharding: str, width: int, tmp_path: Path
) -> None:
    path = str(tmp_path / "ddp.ckpt")
    two_ranks.run(train_plain, path, ADAGRAD)
    tables = whole(two_ranks.run(go_on, path, ADAGRAD, (RowWiseAdagrad, {"lr": 0.3}), "one", sharding, 1))
    sums = torch.load(path, weights_only=True)["optimizer_states"][0]["state"]
    for position, name in enumerate(("t0", "t1")):
        shards = sums[position]["sum"].split(width, dim=1)
        expected = torch.cat([shard.mean(1, keepdim=True).expand(-1, width) for shard in shards], dim=1)
        assert sums[position]["sum"].any()
        assert torch.allclose(tables[f"{name} momentum1"], expected)


@pytest.mark.parametrize(("schedule", "factor"), [("StepLR", 1 / 4), ("LinearLR", 1), ("LambdaLR", 3 / 4)])
def test_a_schedule_moves_the_fused_rates_from_where_it_was(
    two_ranks: Ranks, schedule: str, factor: float, tmp_path: Path
) -> None:
    """After one epoch under DDPStrategy and one here; the warm-up of `LinearLR` was over after the first epoch."""
    path = str(tmp_path / "ddp.ckpt")
    two_ranks.run(train_plain, path, ADAGRAD, schedule=schedule)
    for rank in two_ranks.run(go_on, path, ADAGRAD, (torch.optim.SGD, {"lr": 0.8}), schedule=schedule):
        assert rank.rates == pytest.approx([0.3 * factor, 0.8 * factor])
