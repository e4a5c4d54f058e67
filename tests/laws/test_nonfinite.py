"""Law 14: a loss that is not finite on any rank trains nothing, on all ranks, in every mode."""

import dataclasses
import re
from collections.abc import Callable
from typing import Any

import pytest
import torch
from hypothesis import example, given
from hypothesis import strategies as st

from lightning_overlap import MODES, OverlapEmbeddingStrategy

from ..support.cases import (
    CASES,
    MIXED,
    NUM_STEPS,
    ROWWISE_ADAGRAD,
    TABLE_WISE,
    TWO_COLLECTIONS,
    WEIGHTED,
    Case,
)
from ..support.draws import few
from ..support.pairs import in_turn
from ..support.ranks import Ranks
from ..support.reference import differences
from ..tables.replicas import SMALL, case_of
from . import nonfinite
from .accumulated import ALL_KINDS
from .nonfinite import KINDS, Bad

EXACT = [name for name, mode in MODES.items() if not mode.staleness]

DENSE = (
    (torch.optim.SGD, {"lr": 0.2, "momentum": 0.5, "weight_decay": 0.1}),
    (torch.optim.Adam, {"lr": 0.02}),
    (torch.optim.AdamW, {"lr": 0.02, "weight_decay": 0.1}),
)


def _fit(
    case: Case, pipeline: str, bad: Bad, *, dense: int = 1, k: int = 1, by_hand: bool = False, known_late: bool = False
) -> dict[str, Any]:
    case = dataclasses.replace(case, dense=DENSE[dense])
    return {"case": case, "pipeline": pipeline, "bad": bad, "k": k, "by_hand": by_hand, "known_late": known_late}


@st.composite
def _fits(draw: Any) -> dict[str, Any]:
    case: Case = draw(st.sampled_from([*CASES, ALL_KINDS]))
    pipeline = draw(st.sampled_from([*MODES]))
    batches = draw(st.frozensets(st.integers(0, NUM_STEPS - 1), min_size=1, max_size=4))
    bad = Bad(batches, draw(st.integers(0, 1)), draw(st.sampled_from(KINDS if case.weighted else KINDS[:-1])))
    # A loop defines the delays of automatic optimization alone, and of steps of one batch.
    is_exact = MODES[pipeline].staleness == 0
    by_hand = is_exact and draw(st.booleans())
    k = draw(st.integers(1, 3)) if is_exact and not by_hand else 1
    dense = draw(st.integers(0, len(DENSE) - 1))
    return _fit(case, pipeline, bad, dense=dense, k=k, by_hand=by_hand, known_late=draw(st.booleans()))


_SOME = frozenset({0, 3, 4, 8})


@few(max_examples=14)
@given(fit=_fits())
@example(fit=_fit(WEIGHTED, "fused_sparse_dist", Bad(_SOME, 1, "weights")))
@example(fit=_fit(WEIGHTED, "semi_sync_deferred", Bad(_SOME, 0, "weights"), known_late=True))
@example(fit=_fit(ALL_KINDS, "split_backward", Bad(frozenset({0, 3, 4, 5, 7}), 1, "input"), k=2))
def test_a_batch_whose_loss_is_not_finite_is_left_out(two_ranks: Ranks, fit: dict[str, Any]) -> None:
    """Equal, bit for bit, to a plain loop that leaves it out; `known_late` is how the host learns of it on CUDA."""
    actual = two_ranks.run(nonfinite.fit, **fit)
    expected = two_ranks.run(nonfinite.left_out, fit["case"], fit["pipeline"], fit["bad"], k=fit["k"])
    assert differences([result for result, _, _ in actual], expected) == [[], []]
    assert [rest for _, *rest in actual] == [[len(fit["bad"].batches), ""]] * 2


@pytest.mark.parametrize(
    ("kind", "pipeline"),
    in_turn(
        ["feature_processors_row_wise", "bags_some_dense_kernel", "variable_batch", "towers", "fused_bags", "pool"],
        [name for name in EXACT if name != "base"],
    ),
)
def test_modules_of_other_kinds(two_ranks: Ranks, kind: str, pipeline: str) -> None:
    """Equal to the same fit on data without these batches."""
    bad = frozenset({0, 4, 5})
    actual = two_ranks.run(nonfinite.fit_kind, kind, pipeline, bad, leaves_out=False, known_late=pipeline == "prefetch")
    expected = two_ranks.run(nonfinite.fit_kind, kind, pipeline, bad, leaves_out=True, known_late=False)
    assert differences(actual, expected) == [[], []]


@pytest.mark.parametrize(("optimizer", "kind"), [("sgd", "weights"), ("adagrad", "nan"), ("rowwise", "input")])
def test_replicas(two_ranks: Ranks, optimizer: str, kind: str) -> None:
    bad = Bad(frozenset({2, 3, 7}), 1, kind)
    fits = [
        two_ranks.run(nonfinite.fit, case_of(optimizer), pipeline, bad, replicated=SMALL, leaves_out=leaves_out)
        for pipeline, leaves_out in (("fused_sparse_dist", False), ("base", True))
    ]
    for (mine, num, _), (without, _, _) in zip(*fits, strict=True):
        kept = [step for step in range(NUM_STEPS) if step not in bad.batches]
        assert dataclasses.replace(mine, losses=mine.losses[kept]).differences(without) == []
        assert num == 3


@pytest.mark.parametrize("known_late", [False, True])
@pytest.mark.parametrize("set_to_none", [False, True])
def test_zeros_of_an_earlier_backward_are_kept(get_ranks: Any, set_to_none: bool, known_late: bool) -> None:
    """Adam moves a weight on a gradient of zeros, and leaves one without a gradient alone."""
    fits = [
        get_ranks(1).run(nonfinite.fit_gated, kind, set_to_none=set_to_none, known_late=known_late)
        for kind in ("nan", "zero")
    ]
    assert differences(*fits) == [[]]


@pytest.mark.parametrize(
    ("case", "pipeline", "scheduled", "k"),
    [
        (ROWWISE_ADAGRAD, "fused_sparse_dist", True, 1),
        (TWO_COLLECTIONS, "split_backward", True, 2),
        (dataclasses.replace(MIXED, comms=("fp16", "fp16")), "fused_sparse_dist", False, 1),
        (dataclasses.replace(TABLE_WISE, comms=("fp16", "int8")), "semi_sync_deferred", False, 1),
    ],
    ids=["scheduled", "scheduled windows", "quantized", "quantized and deferred"],
)
def test_beside_schedulers_and_quantized_comms(
    two_ranks: Ranks, case: Case, pipeline: str, scheduled: bool, k: int
) -> None:
    """A step that trains nothing counts for the scheduler."""
    case, bad = dataclasses.replace(case, dense=DENSE[1]), Bad(frozenset({0, 3, 4}), 1)
    actual = two_ranks.run(nonfinite.fit, case, pipeline, bad, k=k, scheduled=scheduled)
    expected = two_ranks.run(nonfinite.left_out, case, pipeline, bad, k=k, scheduled=scheduled)
    assert differences([result for result, _, _ in actual], expected) == [[], []]


@pytest.mark.parametrize(
    ("pipeline", "kind", "rank"), [("fused_sparse_dist", "nan", 2), ("split_backward", "input", 1)]
)
def test_on_three_ranks(get_ranks: Any, pipeline: str, kind: str, rank: int) -> None:
    """Equal, bit for bit, to `base` on data without these batches: a sum of three depends on its order."""
    bad, ranks = Bad(frozenset({2, 3, 7}), rank, kind), get_ranks(3)
    actual = ranks.run(nonfinite.fit, ALL_KINDS, pipeline, bad)
    expected = ranks.run_once(nonfinite.fit, ALL_KINDS, "base", Bad(bad.batches), leaves_out=True)
    kept = [step for step in range(NUM_STEPS) if step not in bad.batches]
    for (mine, num, _), (without, _, _) in zip(actual, expected, strict=True):
        assert dataclasses.replace(mine, losses=mine.losses[kept]).differences(without) == []
        assert num == 3


def test_a_module_without_tables(two_ranks: Ranks) -> None:
    bad = frozenset({0, 5})
    with_them = two_ranks.run(nonfinite.fit_without_tables, bad, leaves_out=False)
    without = two_ranks.run(nonfinite.fit_without_tables, bad, leaves_out=True)
    for mine, theirs in zip(with_them, without, strict=True):
        assert all(torch.equal(a, b) for a, b in zip(mine, theirs, strict=True))


@pytest.mark.parametrize("known_late", [False, True])
@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "split_backward", "semi_sync", "semi_sync_deferred"])
def test_an_error_leaves_all_as_it_was(two_ranks: Ranks, pipeline: str, known_late: bool) -> None:
    """On all ranks after the same batch; batches before it have trained, their deferred updates too."""
    bad = Bad(frozenset({6}), 1)
    actual = two_ranks.run(nonfinite.fit, TABLE_WISE, pipeline, bad, nonfinite="error", known_late=known_late)
    expected = two_ranks.run_once(nonfinite.left_out, TABLE_WISE, pipeline, bad, num_steps=7)
    assert differences([result for result, _, _ in actual], expected) == [[], []]
    place = r"the loss of batch 6 of epoch 0 \(global step 6\) is not finite on rank 1\. Tables"
    assert all(re.match(place, error) for _, _, error in actual)


def test_an_unknown_choice_is_refused() -> None:
    with pytest.raises(ValueError, match=r"nonfinite: unknown choice 'skp'\. Did you mean 'skip'"):
        OverlapEmbeddingStrategy(nonfinite="skp")  # type: ignore[arg-type]


def test_skips_are_counted_in_the_log(get_ranks: Callable[..., Ranks]) -> None:
    """The 1st, 2nd, 4th and so on as they come, and all at the end."""
    [messages] = get_ranks(1).run(nonfinite.messages, Bad(frozenset({1, 2, 4, 5, 6}), 0))
    *found, last = messages
    assert [re.findall(r"batch (\d) .* on rank 0.*; (\d) so far", text) for text in found] == [
        [("1", "1")],
        [("2", "2")],
        [("5", "4")],
    ]
    assert "the loss of 5 backwards of this fit was not finite; they trained nothing" in last
