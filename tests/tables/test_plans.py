"""The plan that TorchRec's planner makes: the same in every process, by names of types, kept and given back."""

import copy
import dataclasses
import io
import random
from collections.abc import Callable
from typing import Any

import pytest
import torch
from torch import nn
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.planner import Topology
from torchrec.distributed.planner.enumerators import EmbeddingEnumerator
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, row_wise, table_wise
from torchrec.distributed.types import ShardingPlan

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables import plans

from ..support import reference
from ..support.cases import TABLE_WISE, Batches, Case, Model
from ..support.fits import make_trainer
from ..support.ranks import RankError, Ranks
from .supported_modules import KindModel


def test_options_that_come_in_another_order_make_the_same_plan(monkeypatch: pytest.MonkeyPatch) -> None:
    """As where Python's hash seed is another: TorchRec's lists are made of sets of names."""
    tables = [
        EmbeddingBagConfig(name=f"t{place}", num_embeddings=rows, embedding_dim=16, feature_names=[f"f{place}"])
        for place, rows in enumerate((100, 1_000, 50_000, 200))
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
        planner, sharders = plans.make_planner(Topology(2, "cpu", local_world_size=2), {}, None)
        plan = planner.plan(model, sharders)
        made.append({name: (each.sharding_type, each.ranks) for name, each in plan.plan["ebc"].items()})
    assert made == made[:1] * 8


def test_the_tables_of_each_rank_are_divided_into_two_parts_of_equal_traffic() -> None:
    """What a table sends for a sample: its columns for each feature. Other sharding types stay as they are."""
    columns_and_features = {
        **{"a": (8, 1), "b": (8, 4), "c": (16, 1), "d": (8, 1)},  # on rank 0: 8, 32, 16, 8 columns
        **{"e": (8, 1), "f": (8, 1), "g": (64, 1)},  # on rank 1
        **{"rows": (8, 1), "dense": (8, 1)},
    }
    configs = [
        EmbeddingBagConfig(64, dim, name=name, feature_names=[f"{name}_{n}" for n in range(num)])
        for name, (dim, num) in columns_and_features.items()
    ]
    model = nn.ModuleDict({"ebc": EmbeddingBagCollection(tables=configs)})
    kinds = {name: table_wise(rank=int(name in "efg"), compute_kernel="fused") for name in "abcdefg"}
    kinds |= {"rows": row_wise(), "dense": table_wise(rank=1, compute_kernel="dense")}
    of_ebc = construct_module_sharding_plan(model["ebc"], kinds, EmbeddingBagCollectionSharder(), 2, 2, "cpu")
    before = copy.deepcopy(of_ebc)
    divided = plans.divide_in_two(ShardingPlan({"ebc": of_ebc}), model)
    second = {"a", "c", "d", "e", "f"}
    assert {name: set(of_module) for name, of_module in divided.items()} == {"ebc": second}
    for name, how in of_ebc.items():
        expected = "column_wise" if name in second else before[name].sharding_type
        assert (how.sharding_type, how.ranks) == (expected, before[name].ranks), name
        assert how.sharding_spec == before[name].sharding_spec


def kinds_in(plan: plans.KeptPlan) -> set[str]:
    return {how.sharding_type for how in plan.plan["ebc"].values()}


def test_tables_are_not_divided_on_one_host_nor_by_a_plan_of_the_users(get_ranks: Callable[..., Ranks]) -> None:
    sharding: Any = "table_wise"
    for num_nodes in (1, 2):
        fits = get_ranks(2, num_nodes=num_nodes).run(fit_by_name, TABLE_WISE, sharding, pipeline="split_backward")
        assert [kinds_in(plan) for _, plan in fits] == [{"table_wise"}] * 2
        [(_, sharding), _] = fits


@pytest.mark.parametrize(("precision", "num_parts"), [(None, 2), ("fp16", 2), ("int8", 1), ("mx4", 1)])
def test_the_parts_do_not_change_how_embeddings_are_rounded_for_sending(
    get_ranks: Callable[..., Ranks], precision: str | None, num_parts: int
) -> None:
    """Numbers of `int8` and `mx4` share a scale with their neighbours: two parts would give them other neighbours."""
    ranks, options = get_ranks(2, num_nodes=2), {"quantized_comms": precision}
    expected = ranks.run(fit_by_name, TABLE_WISE, "table_wise", pipeline="base", **options)
    actual = ranks.run(fit_by_name, TABLE_WISE, "table_wise", pipeline="split_backward", **options)
    assert reference.differences([result for result, _ in actual], [result for result, _ in expected]) == [[], []]
    assert [len(kinds_in(plan)) for _, plan in (*expected, *actual)] == [1, 1, num_parts, num_parts]


def fit_by_name(case: Case, sharding: Any, **options: Any) -> tuple[reference.Result, plans.KeptPlan]:
    """Fit; return what it did and its plan, as a file keeps it."""
    model = Model(case)
    trainer = make_trainer(OverlapEmbeddingStrategy(sharding=sharding, **options))
    trainer.fit(model, datamodule=Batches(case))
    kept = io.BytesIO()
    torch.save(trainer.strategy.sharding_plan, kept)  # type: ignore[attr-defined]
    kept.seek(0)
    return reference.collect(model, trainer.optimizers[0], model.losses), torch.load(kept, weights_only=False)


def test_a_kept_plan_shards_in_the_same_way_again(two_ranks: Ranks) -> None:
    [(first, plan), (other, _)] = two_ranks.run(fit_by_name, TABLE_WISE, None, replicate_tables=["t1"])
    for expected, (second, again) in zip((first, other), two_ranks.run(fit_by_name, TABLE_WISE, plan), strict=True):
        assert second.differences(expected) == []
        assert plan.replicated == again.replicated == ("t1",)
        assert str(plan.plan) == str(again.plan)
        assert plan.plan["ebc"]["t1"].sharding_type == "data_parallel"


def test_there_is_no_plan_before_a_fit() -> None:
    with pytest.raises(RuntimeError, match="no module yet: read the plan in fit"):
        _ = OverlapEmbeddingStrategy().sharding_plan
    with pytest.raises(RuntimeError, match="no table is sharded yet"):
        plans.plan_of(Model(TABLE_WISE))


ROWS = dataclasses.replace(
    TABLE_WISE,
    name="rows",
    tables=tuple(dataclasses.replace(table, sharding="row_wise") for table in TABLE_WISE.tables),
)


def test_row_wise_by_name_trains_as_the_plain_loop_on_a_cpu(two_ranks: Ranks) -> None:
    fits = two_ranks.run(fit_by_name, ROWS, "row_wise")
    assert [kinds_in(plan) for _, plan in fits] == [{"row_wise"}] * 2
    assert reference.differences([result for result, _ in fits], reference.on_ranks(two_ranks, ROWS)) == [[], []]


def fit_managed_bags() -> None:
    make_trainer(OverlapEmbeddingStrategy()).fit(KindModel("managed_bags"))


def test_what_the_planner_refuses_of_managed_collision_names_a_plan(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"planner rejects most modules like mc: pass .* row_wise\(compute_kernel="):
        two_ranks.run(fit_managed_bags)
