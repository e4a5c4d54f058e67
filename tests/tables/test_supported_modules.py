"""Every kind of TorchRec module against plain DistributedModelParallel: looked up early or not, equal bit for bit."""

import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch
import torch.distributed as dist
from torch import Tensor
from torch.distributed.device_mesh import DeviceMesh
from torchrec.distributed.embeddingbag import EmbeddingBagCollectionSharder
from torchrec.distributed.types import ShardingEnv, ShardingEnv2D
from torchrec.modules.itep_embedding_modules import ITEPEmbeddingBagCollection
from torchrec.modules.itep_modules import GenericITEPModule

from lightning_overlap import MODES, OverlapEmbeddingStrategy, Schedule
from lightning_overlap.tables.supported_modules import why_never_early

from ..support.cases import NUM_STEPS
from ..support.fits import make_trainer
from ..support.modules import bags, plan_of, whole
from ..support.pairs import rotated
from ..support.ranks import RankError, Ranks
from ..support.reference import differences
from . import supported_modules
from .supported_modules import CASES, Batches, KindModel, Outcome, make_plan

PIPELINED = [name for name, mode in MODES.items() if mode.has_sparse_stages]
EXACT = [name for name in PIPELINED if MODES[name].staleness == 0]
PAIRINGS = [
    *rotated([name for name, case in CASES.items() if not case.exact_only], PIPELINED),
    # Their rows cannot be taken apart from the dense part, as the reference of a stale mode does.
    *rotated([name for name, case in CASES.items() if case.exact_only], EXACT),
]


def _expected(ranks: Ranks, name: str, staleness: int = 0) -> list[Outcome]:
    """Train by hand; each step has to count: losses move with every update, and the last step leaves other weights."""
    outcomes = ranks.run_once(supported_modules.train, name, staleness)
    for outcome in outcomes:
        assert len(outcome.losses.unique()) == NUM_STEPS
        assert Outcome(outcome.losses, outcome.before).differences(outcome)
    return outcomes


@pytest.mark.parametrize(("name", "pipeline", "num_ranks"), PAIRINGS)
def test_same_as_the_plain_loop(get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_ranks: int) -> None:
    case, staleness, ranks = CASES[name], MODES[pipeline].staleness, get_ranks(num_ranks)
    actual = ranks.run(supported_modules.fit, name, pipeline)
    assert differences(actual, _expected(ranks, name, staleness)) == [[]] * ranks.world_size
    for rank, outcome in enumerate(actual):
        if case.plain:
            assert (outcome.num_early, len(outcome.messages)) == (0, int(rank == 0))
            continue
        assert outcome.messages == []
        # A batch's ids come early for each module, but for the first batch's, which shows what feeds what.
        num_modules = 2 if name == "towers" else len(case.parts)
        assert outcome.num_early == (NUM_STEPS - 1) * num_modules


def _fit_looked_up_before_the_step(name: str) -> Outcome:
    with (
        mock.patch.object(Schedule, "dense_owned_lookup", None),
        mock.patch("lightning_overlap.sparse.module_flight.num_writes", return_value=()),  # else it is left aside
    ):
        return supported_modules.fit(name, Schedule("all_before_the_step", MODES["fused_sparse_dist"].steps))


@pytest.mark.parametrize("name", ["feature_processors", "bags_dense_kernel", "sequences_data_parallel"])
def test_a_lookup_before_the_step_is_seen(ranks: Ranks, name: str) -> None:
    """Weights of the dense optimizer read before its step: other losses, or autograd refuses."""
    try:
        actual = ranks.run(_fit_looked_up_before_the_step, name)
    except RankError as err:
        if "modified by an inplace operation" not in str(err):
            raise
        return
    assert all(differences(actual, _expected(ranks, name)))


@pytest.mark.parametrize("name", ["feature_processors", "feature_processors_beside_tables", "managed_bags"])
def test_a_rate_that_moves(ranks: Ranks, name: str) -> None:
    """The gradient of feature processors' weights goes through the cut at the embeddings, too."""
    expected = ranks.run(supported_modules.train, name, rates_move=True)
    assert all(differences(expected, _expected(ranks, name)))
    actual = ranks.run(supported_modules.fit, name, "fused_sparse_dist", rates_move=True)
    assert differences(actual, expected) == [[]] * ranks.world_size


@pytest.mark.parametrize("name", ["feature_processors", "managed_bags", "managed_sequences", "variable_batch"])
def test_validation_between_two_batches_leaves_training_alone(ranks: Ranks, name: str) -> None:
    actual = ranks.run(supported_modules.fit, name, "fused_sparse_dist", limit_val_batches=3, val_check_interval=4)
    assert differences(actual, _expected(ranks, name)) == [[]] * ranks.world_size


@pytest.mark.parametrize("name", ["feature_processors", "feature_processors_data_parallel", "managed_bags"])
def test_a_checkpoint_goes_on_as_if_there_were_none(ranks: Ranks, name: str, tmp_path: Path) -> None:
    runs = ranks.run(supported_modules.fit_at_once_and_in_two, name, "fused_sparse_dist", str(tmp_path))
    assert [rest.differences(at_once) for at_once, rest in runs] == [[]] * ranks.world_size


def _evaluate_hashed(load: str | None, save: str | None = None) -> None:
    model = KindModel("hashed")
    trainer = make_trainer(OverlapEmbeddingStrategy("base", sharding=make_plan(model)))
    trainer.validate(model, datamodule=Batches(model.case), verbose=False, ckpt_path=load)
    if save is not None:
        trainer.save_checkpoint(save)


def test_hashed_ids_stay_on_as_many_ranks(get_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    path = str(tmp_path / "one.ckpt")
    get_ranks(1).run(_evaluate_hashed, None, path)
    get_ranks(1).run(_evaluate_hashed, path)
    with pytest.raises(
        RankError, match=r"mc\.\S+ \(HashZch.*these managed collision modules of 1 ranks, this run has 2"
    ):
        get_ranks(2).run(_evaluate_hashed, path)


# -- modules that the strategy does not shard, or not by its own ranks --------------------------------------------


@pytest.mark.parametrize("name", ["sharded_by_another", "pool", "quantized"])
def test_others_run_in_their_own_forward(ranks: Ranks, name: str) -> None:
    actual = ranks.run(supported_modules.fit, name, "fused_sparse_dist")
    assert differences(actual, _expected(ranks, name)) == [[]] * ranks.world_size
    assert all(outcome.num_early == NUM_STEPS - 1 for outcome in actual)  # of the collection beside it
    if name == "sharded_by_another":
        [message] = actual[0].messages
        assert "The lookup of 'other' (ShardedPECEmbeddingCollection) is not overlapped: only Sharded" in message
    else:
        assert actual[0].messages == []  # whole on every rank: nothing is looked up elsewhere


def _reasons_of_other_ranks() -> list[str | None]:
    """Tables sharded over all ranks, over this one alone, and in two dimensions."""
    world_size, rank = dist.get_world_size(), dist.get_rank()
    alone = [dist.new_group([other]) for other in range(world_size)][rank]
    module, sharder = bags(2), EmbeddingBagCollectionSharder()
    plan = plan_of(module, {"t0": whole(0), "t1": whole(1)})
    sharded = sharder.shard(module, plan, ShardingEnv.from_process_group(dist.group.WORLD), torch.device("cpu"))
    mesh = DeviceMesh("cpu", torch.arange(world_size).reshape(world_size, 1), mesh_dim_names=("replicate", "shard"))
    two_dimensions = ShardingEnv2D(alone, dist.group.WORLD, dist.group.WORLD, mesh, node_group_size=1)
    found = [why_never_early(sharded, dist.group.WORLD)]
    for sharded._env in (ShardingEnv.from_process_group(alone), two_dimensions):
        found.append(why_never_early(sharded, dist.group.WORLD))
    return found


def test_tables_over_other_ranks_run_in_their_own_forward(two_ranks: Ranks) -> None:
    for rank, reasons in enumerate(two_ranks.run(_reasons_of_other_ranks)):
        assert reasons[0] is None
        for reason in reasons[1:]:
            assert f"sharded over ranks [{rank}], not over all ranks [0, 1] (2D sharding" in str(reason)


def _fit_unsharded_pruning() -> None:
    model = KindModel("quantized")
    pruning = GenericITEPModule(table_name_to_unpruned_hash_sizes={}, lookups=[], enable_pruning=False)
    model.other = ITEPEmbeddingBagCollection(bags(2), pruning)
    make_trainer(OverlapEmbeddingStrategy()).fit(model, datamodule=Batches(model.case, 2))


def test_pruning_that_would_be_lost_is_refused(ranks: Ranks) -> None:
    message = "other is an ITEPEmbeddingBagCollection: it prunes by what its own shards count"
    with pytest.raises(RankError, match=message):
        ranks.run(_fit_unsharded_pruning)


def _hash_on_a_cpu() -> tuple[Tensor, Tensor, str]:
    """Return a table's rows before and after an evaluation has sharded it, of this rank, and the error of a fit."""
    model = KindModel("hashed")
    key = "mc._embedding_module.embedding_bags.t0.weight"
    before = model.get_parameter(key).detach().clone().tensor_split(dist.get_world_size())[dist.get_rank()]
    strategy = OverlapEmbeddingStrategy("base", sharding=make_plan(model))
    make_trainer(strategy).validate(model, datamodule=Batches(model.case), verbose=False)
    after = model.state_dict()[key].local_shards()[0].tensor
    with pytest.raises(ValueError) as caught:  # noqa: PT011
        supported_modules.fit("hashed", "base")
    return before, after, str(caught.value)


def test_hashed_tables_are_evaluated_on_a_cpu_but_not_trained(two_ranks: Ranks) -> None:
    """MPZCH begins without ids in its shards; the table's weights are loaded into them."""
    for before, after, message in two_ranks.run(_hash_on_a_cpu):
        assert torch.equal(before, after)
        assert re.match(r"mc\.\S+: HashZch.* \(MPZCH\) cannot be trained on a CPU.*MCHManagedCollisionModule", message)
