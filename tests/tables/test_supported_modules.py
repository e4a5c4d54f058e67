"""Every kind of TorchRec module against plain DistributedModelParallel: looked up early or not, equal bit for bit."""

import re
from collections.abc import Callable
from pathlib import Path
from unittest import mock

import pytest
import torch

from lightning_overlap import MODES, Schedule

from ..support.pairs import rotated
from ..support.ranks import RankError, Ranks
from . import foreign, supported_modules, torchrec_models
from .supported_modules import CASES, NUM_STEPS, Outcome

PIPELINED = [name for name, mode in MODES.items() if mode.has_sparse_stages]
EXACT = [name for name in PIPELINED if MODES[name].staleness == 0]
PAIRINGS = [
    *rotated([name for name, case in CASES.items() if not case.exact_only], PIPELINED),
    # Their rows cannot be taken apart from the dense part, as the reference of a stale mode does.
    *rotated([name for name, case in CASES.items() if case.exact_only], EXACT),
]


def _expected(ranks: Ranks, name: str, staleness: int = 0) -> list[Outcome]:
    return ranks.run_once(supported_modules.train, name, staleness)


def _differences(actual: list[Outcome], expected: list[Outcome]) -> list[list[str]]:
    return [mine.differences(theirs) for mine, theirs in zip(actual, expected, strict=True)]


@pytest.mark.parametrize(("name", "pipeline", "num_ranks"), PAIRINGS)
def test_same_as_the_plain_loop(get_ranks: Callable[..., Ranks], name: str, pipeline: str, num_ranks: int) -> None:
    case, staleness, ranks = CASES[name], MODES[pipeline].staleness, get_ranks(num_ranks)
    actual = ranks.run(supported_modules.fit, name, pipeline)
    assert _differences(actual, _expected(ranks, name, staleness)) == [[]] * ranks.world_size
    for rank, outcome in enumerate(actual):
        if case.plain:
            assert (outcome.num_early, len(outcome.messages)) == (0, int(rank == 0))
            continue
        assert outcome.messages == []
        # A batch's ids come early for each module, but for the first batch's, which shows what feeds what.
        num_modules = 2 if name == "towers" else len(case.parts)
        assert outcome.num_early == (NUM_STEPS - 1) * num_modules


@pytest.mark.parametrize("name", CASES)
def test_every_step_counts(ranks: Ranks, name: str) -> None:
    """Guards the test above: losses move with every update, and the last step leaves other weights."""
    for outcome in _expected(ranks, name):
        assert len(outcome.losses.unique()) == NUM_STEPS
        assert Outcome(outcome.losses, outcome.before).differences(outcome)


def _fit_looked_up_before_the_step(name: str) -> Outcome:
    with (
        mock.patch.object(Schedule, "dense_owned_lookup", None),
        mock.patch("lightning_overlap.sparse.module_context.num_writes", return_value=()),  # else it is left aside
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
    assert all(_differences(actual, _expected(ranks, name)))


@pytest.mark.parametrize("name", ["feature_processors", "feature_processors_beside_tables", "managed_bags"])
def test_a_rate_that_moves(ranks: Ranks, name: str) -> None:
    """The gradient of feature processors' weights goes through the cut at the embeddings, too."""
    expected = ranks.run(supported_modules.train, name, rates_move=True)
    assert all(_differences(expected, _expected(ranks, name)))
    actual = ranks.run(supported_modules.fit, name, "fused_sparse_dist", rates_move=True)
    assert _differences(actual, expected) == [[]] * ranks.world_size


@pytest.mark.parametrize("pipeline", MODES)
def test_two_managed_collections_beside_buffers_of_the_dense_part(two_ranks: Ranks, pipeline: str) -> None:
    """Buffers that a managed collision module registers in its first lookup are no other rank's."""
    expected = two_ranks.run_once(torchrec_models.train)
    for mine, theirs in zip(two_ranks.run(torchrec_models.fit, pipeline), expected, strict=True):
        assert len({loss.item() for loss in theirs}) == torchrec_models.NUM_STEPS
        assert mine == theirs


@pytest.mark.parametrize("name", ["feature_processors", "managed_bags", "managed_sequences", "variable_batch"])
def test_validation_between_two_batches_leaves_training_alone(ranks: Ranks, name: str) -> None:
    actual = ranks.run(supported_modules.fit, name, "fused_sparse_dist", limit_val_batches=3, val_check_interval=4)
    assert _differences(actual, _expected(ranks, name)) == [[]] * ranks.world_size


@pytest.mark.parametrize("name", ["feature_processors", "feature_processors_data_parallel", "managed_bags"])
def test_a_checkpoint_goes_on_as_if_there_were_none(ranks: Ranks, name: str, tmp_path: Path) -> None:
    for whole, rest in ranks.run(supported_modules.fit_at_once_and_in_two, name, "fused_sparse_dist", str(tmp_path)):
        assert rest.differences(whole) == []


def test_a_checkpoint_of_assigned_rows_is_for_as_many_ranks(get_ranks: Callable[..., Ranks], tmp_path: Path) -> None:
    get_ranks(1).run(supported_modules.train_assigned_rows, str(tmp_path / "one"))
    with pytest.raises(RankError, match="managed collision modules of 1 ranks, this run has 2"):
        get_ranks(2).run(supported_modules.train_assigned_rows, str(tmp_path / "one"), loads=True)


def test_assigned_rows_are_not_saved_as_one_file(two_ranks: Ranks, tmp_path: Path) -> None:
    with pytest.raises(RankError, match="checkpoint_format='full' cannot hold managed collision modules"):
        two_ranks.run(supported_modules.train_assigned_rows, str(tmp_path / "one"), "full")


# -- modules that the strategy does not shard, or not by its own ranks --------------------------------------------

_PLAIN = {"sharded_by_another": "pec", "pool": "pool", "quantized": "quantized"}


@pytest.mark.parametrize("name", _PLAIN)
def test_others_run_in_their_own_forward(ranks: Ranks, name: str) -> None:
    expected = ranks.run(foreign.train, _PLAIN[name])
    actual = ranks.run(foreign.fit, _PLAIN[name], "fused_sparse_dist")
    assert _differences(actual, expected) == [[]] * ranks.world_size
    assert all(outcome.num_early == NUM_STEPS - 1 for outcome in actual)  # of the collection beside it
    if name == "sharded_by_another":
        [message] = actual[0].messages
        assert "The lookup of 'foreign' (ShardedPECEmbeddingCollection) is not overlapped: only Sharded" in message
    else:
        assert actual[0].messages == []  # whole on every rank: nothing is looked up elsewhere


def test_tables_over_other_ranks_run_in_their_own_forward(two_ranks: Ranks) -> None:
    for rank, reasons in enumerate(two_ranks.run(foreign.reasons_of_other_ranks)):
        assert reasons[0] is None
        for reason in reasons[1:]:
            assert f"sharded over ranks [{rank}], not over all ranks [0, 1] (2D sharding" in str(reason)


def test_pruning_that_would_be_lost_is_refused(ranks: Ranks) -> None:
    message = "foreign is an ITEPEmbeddingBagCollection: it prunes by what its own shards count"
    with pytest.raises(RankError, match=message):
        ranks.run(foreign.fit_unsharded_pruning)


def test_hashed_tables_are_evaluated_on_a_cpu_but_not_trained(two_ranks: Ranks) -> None:
    """MPZCH begins without ids in its shards; the table's weights are loaded into them."""
    for before, after, message in two_ranks.run(foreign.hash_on_a_cpu):
        assert torch.equal(before, after)
        assert re.match(r"mc\.\S+: HashZch.* \(MPZCH\) cannot be trained on a CPU", message)
        assert "MCHManagedCollisionModule" in message
