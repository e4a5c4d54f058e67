"""Law 17: a fit that exchanges samples equals `base` on batches that were exchanged before; nothing else changes."""

from pathlib import Path
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_overlap import MODES

from ..balance import balanced
from ..deltas.histories import updated
from ..support.cases import MIXED, SEQUENCE, TABLE_WISE, WEIGHTED, Case
from ..support.draws import few
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from ..support.reference import differences

EXACT = [name for name, schedule in MODES.items() if not schedule.staleness]


def _results(of_ranks: list[Any]) -> list[Any]:
    return [result for result, _ in of_ranks]


CASES = [TABLE_WISE, MIXED, SEQUENCE, WEIGHTED]


@pytest.mark.parametrize(
    ("pipeline", "case"), in_turn([*EXACT, "auto"], CASES), ids=lambda one: getattr(one, "name", one)
)
def test_a_balanced_fit_equals_base_on_the_same_batches(two_ranks: Ranks, pipeline: str, case: Case) -> None:
    expected = two_ranks.run_once(balanced.fit, case, "base", balances=False)
    actual = two_ranks.run(balanced.fit, case, pipeline)
    assert differences(_results(actual), _results(expected)) == [[], []]
    first, second = (found for _, found in actual)
    for mine, theirs in zip(first, second, strict=True):
        assert (mine.before, mine.after, mine.num_moved) == (theirs.before, theirs.after, theirs.num_moved)
        assert mine.num_moved > 0
        assert max(mine.after) < max(mine.before)
        assert sum(mine.after) == sum(mine.before)


@pytest.mark.parametrize("pipeline", [name for name in MODES if name not in EXACT])
def test_a_stale_mode_is_as_stale_on_balanced_batches(two_ranks: Ranks, pipeline: str) -> None:
    expected = two_ranks.run(balanced.fit, TABLE_WISE, pipeline, balances=False)
    actual = two_ranks.run(balanced.fit, TABLE_WISE, pipeline)
    assert differences(_results(actual), _results(expected)) == [[], []]


def test_the_global_batch_stays_the_same(two_ranks: Ranks) -> None:
    """Mean losses, weights and optimizer states are those without balancing, to rounding."""
    first, second = _results(two_ranks.run_once(balanced.fit, TABLE_WISE, "fused_sparse_dist"))
    plain, other = two_ranks.run(balanced.fit_unbalanced, TABLE_WISE)
    assert not torch.equal(first.losses, plain.losses)
    torch.testing.assert_close(first.losses + second.losses, plain.losses + other.losses, rtol=1e-4, atol=1e-5)
    for part in ("tables", "dense", "dense_state"):
        torch.testing.assert_close(getattr(first, part), getattr(plain, part), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("lengths", "pipeline"), in_turn([(7, 5), (5, 7), (5, 6), (2, 4), (6, 6)], ["fused_sparse_dist", "base"]), ids=str
)
def test_ranks_end_together(two_ranks: Ranks, lengths: tuple[int, ...], pipeline: str) -> None:
    """With lengths that are known and not, with batches that are None on all ranks, in two epochs."""
    for data in ({}, {"sized": False}, {"sized": False, "nones": (0, 2)}):
        kwargs = {"data": data, "max_epochs": 2}
        expected = two_ranks.run_once(
            balanced.fit, TABLE_WISE, "base", balances=False, lengths=(min(lengths),), **kwargs
        )
        actual = two_ranks.run(balanced.fit, TABLE_WISE, pipeline, lengths=lengths, **kwargs)
        assert differences(_results(actual), _results(expected)) == [[], []], data


@pytest.mark.parametrize(
    "kwargs", [{"accumulate_grad_batches": 3}, {"max_steps": 3}, {"limit_train_batches": 4}], ids=str
)
def test_accumulation_and_ends_of_a_fit(two_ranks: Ranks, kwargs: dict[str, Any]) -> None:
    kwargs = {"max_epochs": 2, **kwargs}
    expected = two_ranks.run(balanced.fit, TABLE_WISE, "base", balances=False, **kwargs)
    actual = two_ranks.run(balanced.fit, TABLE_WISE, "fused_sparse_dist", **kwargs)
    assert differences(_results(actual), _results(expected)) == [[], []]


@pytest.mark.parametrize("checkpoint_format", ["sharded", "incremental"])
def test_a_resumed_fit_equals_one_that_was_not_stopped(
    two_ranks: Ranks, tmp_path: Path, checkpoint_format: str
) -> None:
    """The loaders' states are those of the batches before their samples were exchanged."""
    kwargs = {"data": {"stateful": True}, "max_epochs": 2, "options": {"checkpoint_format": checkpoint_format}}
    whole = two_ranks.run(
        balanced.fit, TABLE_WISE, "fused_sparse_dist", save_after=(2, 3, 4), folder=tmp_path, **kwargs
    )
    resumed = two_ranks.run(balanced.fit, TABLE_WISE, "fused_sparse_dist", ckpt_path=tmp_path / "4.ckpt", **kwargs)
    for (expected, _), (actual, _) in zip(whole, resumed, strict=True):
        assert torch.equal(actual.losses, expected.losses[4:])
        actual.losses = expected.losses
        assert actual.differences(expected) == []


@st.composite
def _fits(draw: Any) -> dict[str, Any]:
    pipeline, num_ranks = draw(st.sampled_from([*EXACT, "auto"])), draw(st.integers(2, 3))
    case, poisons, by_hand = draw(st.sampled_from(CASES)), draw(st.booleans()), draw(st.booleans())
    lengths = tuple(draw(st.lists(st.integers(4, 8), min_size=3, max_size=3)))
    k = 1 if by_hand else draw(st.integers(1, 3))
    return {"pipeline": pipeline, "num_ranks": num_ranks, "case": case, "poisons": poisons} | {
        "by_hand": by_hand,
        "lengths": lengths,
        "k": k,
        "sends": draw(st.booleans()),
    }


@few(max_examples=5)
@given(drawn=_fits())
@example(
    {"pipeline": "fused_sparse_dist", "num_ranks": 3, "case": MIXED, "poisons": True}
    | {"by_hand": False, "lengths": (7, 5, 8), "k": 2, "sends": True}
)
@example(
    {"pipeline": "split_backward", "num_ranks": 2, "case": TABLE_WISE, "poisons": True}
    | {"by_hand": True, "lengths": (8, 8, 8), "k": 1, "sends": True}
)
def test_whatever_else_a_fit_does_it_equals_base_on_the_same_batches(
    get_ranks: Any, tmp_path_factory: pytest.TempPathFactory, drawn: dict[str, Any]
) -> None:
    """Losses that are skipped, deltas, accumulation, optimization by hand, ranks whose data end early, three ranks."""
    ranks, lengths = get_ranks(drawn["num_ranks"]), drawn["lengths"][: drawn["num_ranks"]]
    folders = [tmp_path_factory.mktemp("deltas") for _ in range(2)] if drawn["sends"] else [None, None]
    kwargs: dict[str, Any] = {"by_hand": drawn["by_hand"], "accumulate_grad_batches": drawn["k"]}
    if drawn["poisons"]:
        kwargs |= {"make": balanced.poisoned, "options": {"nonfinite": "skip"}}
    shortest = {"lengths": (min(lengths),), "deltas": folders[0]}
    expected = ranks.run(balanced.fit, drawn["case"], "base", balances=False, **shortest, **kwargs)
    actual = ranks.run(balanced.fit, drawn["case"], drawn["pipeline"], lengths=lengths, deltas=folders[1], **kwargs)
    assert differences(_results(actual), _results(expected)) == [[]] * len(lengths)
    assert any(one.num_moved for one in actual[0][1])
    if drawn["sends"]:
        first, second = (updated(None, folder).state_dict() for folder in folders)
        assert first.keys() == second.keys()
        assert [name for name in first if not torch.equal(first[name], second[name])] == []


def test_batches_of_unequal_sizes_stay_as_they_are(two_ranks: Ranks) -> None:
    first, second = two_ranks.run(balanced.fit_unequal, (16, 12))
    for found, _, watched in (first, second):
        assert found == []
        assert watched == [None] * 6
    [said], nothing = first[1], second[1]
    assert "unequal numbers of samples on the ranks (here [16, 12]) stay as they are" in said
    assert nothing == []


def test_evaluations_are_balanced_where_asked(two_ranks: Ranks) -> None:
    plain, other = two_ranks.run(balanced.evaluate, False)
    first, second = two_ranks.run(balanced.evaluate, True)
    assert first["predict"] == plain["predict"]
    assert second["predict"] == other["predict"]
    for name in ("fit", "validate", "test"):
        sums = [(mine[0] + theirs[0], mine[1]) for mine, theirs in zip(plain[name], other[name], strict=True)]
        assert sums == [(mine[0] + theirs[0], mine[1]) for mine, theirs in zip(first[name], second[name], strict=True)]
        apart = [abs(mine[0] - theirs[0]) for mine, theirs in zip(plain[name], other[name], strict=True)]
        closer = [abs(mine[0] - theirs[0]) for mine, theirs in zip(first[name], second[name], strict=True)]
        assert len(closer) == {"fit": 10}.get(name, 5)
        assert sum(closer) < sum(apart) / 4
