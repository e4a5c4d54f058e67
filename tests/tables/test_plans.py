"""The plan that TorchRec's planner makes: the same in every process, by names of types, kept and given back."""

from __future__ import annotations

import io
import random
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables import plans

from ..support import reference
from ..support.cases import TABLE_WISE, Batches, Case, Model, TableSpec
from ..support.fits import make_trainer
from ..support.ranks import RankError, Ranks
from .supported_modules import KindModel

ROWS = Case("rows_by_name", tuple(TableSpec(f"t{number}", (f"f{number}",), "row_wise") for number in range(3)))


def test_options_that_come_in_another_order_make_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Python's hash seed is another: TorchRec's lists are made of sets of names."""
    sizes = (100, 1_000, 50_000, 200)
    tables = [
        EmbeddingBagConfig(name=f"t{place}", num_embeddings=rows, embedding_dim=16, feature_names=[f"f{place}"])
        for place, rows in enumerate(sizes)
    ]
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=tables)})
    in_order = EmbeddingEnumerator.enumerate

    def shuffled(self: Any, *args: Any) -> list[Any]:
        options = in_order(self, *args)
        place = {option.fqn: number for number, option in enumerate(options)}
        return sorted(options, key=lambda option: (place[option.fqn], random.random()))

    monkeypatch.setattr(EmbeddingEnumerator, "enumerate", shuffled)
    made = []
    for _ in range(8):
        planner = plans.make_planner(Topology(2, "cpu", local_world_size=2), {})
        plan = planner.plan(model, plans.planned_sharders(None, "cpu"))
        made.append({name: (each.sharding_type, each.ranks) for name, each in plan.plan["ebc"].items()})
    assert made == made[:1] * 8


def fit_by_name(case: Case, sharding: Any, **options: Any) -> tuple[reference.Result, plans.KeptPlan]:
    """Fit; return what it did and its plan, as a file keeps it."""
    model = Model(case)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding=sharding, **options))
    trainer.fit(model, datamodule=Batches(case))
    kept = io.BytesIO()
    torch.save(trainer.strategy.sharding_plan, kept)  # type: ignore[attr-defined]
    kept.seek(0)
    return reference.collect(model, trainer.optimizers[0], model.losses), torch.load(kept, weights_only=False)


def kept_and_given_back() -> tuple[list[str], plans.KeptPlan, plans.KeptPlan]:
    """Fit with some tables replicated, and again by the plan that it kept; return what differs, and both plans."""
    first, plan = fit_by_name(TABLE_WISE, None, replicate_tables=["t1"])
    second, again = fit_by_name(TABLE_WISE, plan)
    return second.differences(first), plan, again


def test_a_kept_plan_shards_in_the_same_way_again(two_ranks: Ranks) -> None:
    for differences, plan, again in two_ranks.run(kept_and_given_back):
        assert differences == []
        assert plan.replicated == again.replicated == ("t1",)
        assert str(plan.plan) == str(again.plan)
        assert plan.plan["ebc"]["t1"].sharding_type == "data_parallel"


def test_there_is_no_plan_before_a_fit() -> None:
    with pytest.raises(RuntimeError, match="no module yet: read the plan in fit"):
        _ = OverlapEmbeddingStrategy().sharding_plan
    with pytest.raises(RuntimeError, match="no table is sharded yet"):
        plans.plan_of(Model(TABLE_WISE))


def test_row_wise_by_name_trains_as_the_plain_loop_on_a_cpu(two_ranks: Ranks) -> None:
    expected = reference.on_ranks(two_ranks, ROWS, 0)
    actual = two_ranks.run(fit_by_name, ROWS, "row_wise")
    assert reference.differences([result for result, _ in actual], expected) == [[], []]


def fit_managed_bags() -> None:
    make_trainer(OverlapEmbeddingStrategy(fused_optimizer=(torch.optim.SGD, {"lr": 1.0}))).fit(
        KindModel("managed_bags")
    )


def test_what_the_planner_refuses_of_managed_collision_names_a_plan(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"planner rejects most modules like mc: pass a ShardingPlan with row_wise\(\)"):
        two_ranks.run(fit_managed_bags)
