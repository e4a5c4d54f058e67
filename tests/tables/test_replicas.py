"""Replicated tables: trained as the sharded ones are, and alike on all ranks."""

import re
from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any

import pytest
import torch
from fbgemm_gpu.split_table_batched_embeddings_ops_training import DenseTableBatchedEmbeddingBagsCodegen
from torch import Tensor

from lightning_overlap import MODES, OverlapEmbeddingStrategy
from lightning_overlap.tables.replicas import ReplicaKernel

from ..support.cases import NUM_STEPS
from ..support.ranks import RankError, Ranks
from ..support.reference import Result
from ..support.windows import train_windows, windows_of
from . import replicas
from .replicas import OPTIMIZERS, SMALL, case_of

ALL = ["s0", "s1", "s2", "t0", "t1"]


def whole(results: list[Result], part: str) -> dict[str, Tensor]:
    """Return what the ranks hold, tables whole; what several hold has to be the same bit for bit."""
    found: dict[str, Tensor] = {}
    for result in results:
        for key, value in getattr(result, part).items():
            name = key.partition(" [")[0]
            assert torch.equal(found.setdefault(name, value), value), f"ranks differ in {name}"
    return found


def assert_close(ours: list[Result], theirs: list[Result]) -> None:
    """Equal to rounding: gradients are summed in another order."""
    for mine, other in zip(ours, theirs, strict=True):
        torch.testing.assert_close(mine.losses, other.losses, rtol=1e-4, atol=1e-5)
    for part in ("tables", "fused_state", "dense", "dense_state"):
        torch.testing.assert_close(whole(ours, part), whole(theirs, part), rtol=1e-3, atol=1e-4)


@pytest.mark.parametrize(
    ("optimizer", "pipeline", "model", "replicated"),
    [
        ("sgd", "base", "Model", SMALL),
        ("sgd", "fused_sparse_dist", "Model", SMALL),
        ("adagrad", "sparse_dist", "Model", SMALL),
        ("adagrad", "semi_sync_deferred", "Model", SMALL),
        ("rowwise", "fused_sparse_dist", "Model", SMALL),
        ("adagrad", "semi_sync", "Scheduled", SMALL),
        ("adagrad", "fused_sparse_dist", "Scheduled", ALL),
        ("adagrad", "fused_sparse_dist_after_optimizer", "Scheduled", ALL),
    ],
)
def test_trained_as_in_the_plain_loop_that_shards_all_tables(
    two_ranks: Ranks, optimizer: str, pipeline: str, model: str, replicated: Sequence[str]
) -> None:
    """Replicas are never stale. Where all are, no kernel of another table asks for the rates of a backward."""
    case = case_of(optimizer)
    ours = two_ranks.run(replicas.fit, case, pipeline, model, {"replicated": replicated})
    scheduled = model == "Scheduled"
    assert_close(ours, two_ranks.run_once(replicas.reference, case, MODES[pipeline].staleness, scheduled=scheduled))
    assert set(whole(ours, "tables")) == {table.name for table in case.tables}
    assert all(set(replicated) <= set(result.tables) for result in ours), "every rank has them whole"


def test_exact_modes_are_equal_bit_for_bit(two_ranks: Ranks) -> None:
    first, *others = [
        two_ranks.run(replicas.fit, case_of("rowwise"), pipeline)
        for pipeline, schedule in MODES.items()
        if not schedule.staleness
    ]
    for other in others:
        assert [mine.differences(theirs) for mine, theirs in zip(other, first, strict=True)] == [[], []]


@pytest.mark.parametrize(
    ("model", "optimizer", "kwargs"),
    [
        ("Model", "adagrad", {"accumulate_grad_batches": 3}),
        ("TwoBackwards", "rowwise", {}),
        ("TwoCalls", "adagrad", {}),
        ("Frozen", "rowwise", {}),
        ("Writes", "rowwise", {}),
        ("Model", "rowwise", {"precision": "bf16-mixed"}),
    ],
)
def test_updated_whenever_a_sharded_table_is(
    two_ranks: Ranks, model: str, optimizer: str, kwargs: dict[str, Any]
) -> None:
    """In the backward of every batch, once for each call."""
    case = case_of(optimizer)
    sharded = two_ranks.run(replicas.fit, case, "base", model, {"replicated": None}, **kwargs)
    assert_close(two_ranks.run(replicas.fit, case, "fused_sparse_dist", model, **kwargs), sharded)


@pytest.mark.parametrize(
    ("optimizer", "pipeline", "model"),
    [("rowwise", "fused_sparse_dist", "Model"), ("adagrad", "sparse_dist", "MakesInput"), ("sgd", "base", "Model")],
)
def test_accumulated_gradients(two_ranks: Ranks, optimizer: str, pipeline: str, model: str) -> None:
    """Also where a module runs its own forward, and with validations between the batches of an optimizer step."""
    case, k = case_of(optimizer), 4
    kwargs = {"accumulate_grad_batches": k, "val_check_interval": 3, "limit_val_batches": 2}
    ours = two_ranks.run(replicas.fit, case, pipeline, model, **kwargs)
    expected = two_ranks.run_once(train_windows, case, windows_of(NUM_STEPS, k))
    assert_close(ours, expected)


@pytest.mark.parametrize(
    ("optimizer", "form", "saved_by", "loaded_by"),
    [
        ("rowwise", "sharded", (2, SMALL), (2, None)),
        ("rowwise", "full", (2, None), (2, SMALL)),
        ("adagrad", "full", (2, SMALL), (1, None)),
        ("adagrad", "sharded", (1, None), (2, SMALL)),
        ("sgd", "sharded", (2, SMALL), (2, SMALL)),
    ],
)
def test_a_checkpoint_moves(
    get_ranks: Callable[..., Ranks], tmp_path: Path, optimizer: str, form: str, saved_by: Any, loaded_by: Any
) -> None:
    """What is loaded is what was saved, to the bit."""
    case, path = case_of(optimizer), str(tmp_path / "saved")

    def save(who: tuple[int, Any], path: str, resume: str | None = None) -> Any:
        return get_ranks(who[0]).run(replicas.save, case, path, who[1], resume, checkpoint_format=form)

    saved, loaded = save(saved_by, path), save(loaded_by, str(tmp_path / "again"), path)
    for part in ("tables", "fused_state"):
        torch.testing.assert_close(whole(loaded, part), whole(saved, part), rtol=0, atol=0)
    if form == "full":
        unsharded = replicas.load_unsharded(case, path)
        torch.testing.assert_close(unsharded, whole(saved, "tables"), rtol=0, atol=0)


SGD = OPTIMIZERS["sgd"]
EPS_0 = (torch.optim.Adagrad, {"lr": 1.0, "eps": 0.0})


@pytest.mark.parametrize(
    ("optimizer", "replicated", "options", "expected"),
    [
        (SGD, None, {"batch_size": 121}, ALL),  # of 120 rows
        (SGD, None, {"batch_size": 120}, []),
        (SGD, None, {}, []),
        (SGD, 121, {"batch_size": 16}, ALL),
        (SGD, 120, {"batch_size": 1000}, []),
        (SGD, False, {"batch_size": 1000}, []),
        (SGD, ["s1"], {}, ["s1"]),
        (SGD, None, {"batch_size": 1000, "sharding": "table_wise"}, []),
        (SGD, None, {"batch_size": 1000, "sharding": {"t0": "table_wise", "t1": "column_wise"}}, list(SMALL)),
        (SGD, ["s1"], {"sharding": {"s1": "data_parallel"}}, ["s1"]),
        (EPS_0, None, {"batch_size": 1000}, []),
        (None, None, {"batch_size": 1000, "fused_optimizer": SGD}, ALL),
        # A planner cannot tell tables of one name apart: the one that cannot be replicated decides.
        (SGD, None, {"batch_size": 1000, "second": SGD}, ["s0", *ALL]),
        (SGD, None, {"batch_size": 1000, "second": EPS_0}, ALL[1:]),
        (SGD, ["s9"], {}, "replicate_tables: .*'s9'.*s0"),
        (SGD, ["s1"], {"sharding": "table_wise"}, "replicate_tables has 's1', .* 'table_wise'"),
        (EPS_0, ["s1"], {}, "replicate_tables: ebc.s1 cannot be replicated: .*eps=0"),
        (SGD, ["s0"], {"second": EPS_0}, "replicate_tables: second.s0 cannot be replicated: .*eps=0"),
        (SGD, ["s1"], {"sharding": {"s0": "data_parallel"}}, r"ebc\.s0.* \(ebc\.s1\).*: replicate all of them"),
        (SGD, ["s1"], {"sequence": True}, "ebc.s1 cannot be replicated: it belongs to an EmbeddingCollection"),
        (None, ["s1"], {}, "ebc.s1 cannot be replicated: it has no fused optimizer"),
    ],
)
def test_a_table_with_fewer_rows_than_a_batch_is_replicated_or_one_that_is_named(
    two_ranks: Ranks, optimizer: Any, replicated: Any, options: dict[str, Any], expected: list[str] | str
) -> None:
    """What cannot be replicated is refused by name."""
    for found in two_ranks.run(replicas.replicated_in, optimizer, replicated, **options):
        assert found == expected or (isinstance(expected, str) and re.search(expected, str(found))), found


def test_a_kernel_has_the_state_of_the_dense_one_and_makes_no_weights() -> None:
    dense = DenseTableBatchedEmbeddingBagsCodegen([(10, 4), (6, 8)], feature_table_map=[0, 1, 1], use_cpu=True)
    random = torch.get_rng_state()
    kernel = ReplicaKernel(dense, [], None)  # type: ignore[arg-type]  # no backward needs the group
    assert torch.equal(torch.get_rng_state(), random)
    assert kernel.weights is dense.weights
    lookup = torch.tensor([9, 0, 5, 1]), torch.tensor([0, 2, 3, 4])
    with torch.no_grad():
        assert torch.equal(kernel(*lookup), dense(*lookup))


def test_one_rank_replicates_nothing_by_itself(get_ranks: Callable[..., Ranks]) -> None:
    run = get_ranks(1).run
    assert run(replicas.replicated_in, SGD, ["s1"], 1000) == [[]]
    assert run(replicas.replicated_in, SGD, ["s1"], 1000, sharding={"s1": "data_parallel"}) == [["s1"]]


def test_the_log_and_a_combined_optimizer_name_the_rates_of_replicas(two_ranks: Ranks) -> None:
    lines = [
        "  ebc: t0, t1: table_wise, trained by SGD in the backward, lr 2",
        "  ebc: s0, s1: replicated, trained by SGD in the backward, lr 2",
        "  ebc: s2: replicated, trained by SGD in the backward, lr 0.7",
    ]
    for text, groups in two_ranks.run(replicas.words_and_groups, case_of("sgd")):
        assert groups == [("fused_0.7", 0.7), ("fused_2.0", 2.0)]
        assert [line for line in lines if line not in text and text] == []


def test_a_penalty_is_refused_after_a_backward_with_another_error(get_ranks: Callable[..., Ranks]) -> None:
    other, message = get_ranks(1).run(replicas.errors_of_penalties, case_of("sgd"))[0]
    assert other == "another error"
    assert "the loss uses the weight of" in message


def test_batch_sizes_that_vary_are_refused(get_ranks: Callable[..., Ranks]) -> None:
    with pytest.raises(RankError, match="replicate_tables=False"):
        get_ranks(2).run(replicas.fit_variable_batches)


@pytest.mark.parametrize(("given", "error"), [(True, TypeError), ("s0", TypeError), ([1], TypeError), (-1, ValueError)])
def test_arguments(given: Any, error: type[Exception]) -> None:
    with pytest.raises(error, match="replicate_tables"):
        OverlapEmbeddingStrategy(replicate_tables=given)


def test_the_error_of_a_penalty_names_replicated_tables(two_ranks: Ranks) -> None:
    with pytest.raises(RankError, match=r"the loss uses the weight of .*s0, .*s1, .*s2.* directly"):
        two_ranks.run(replicas.fit, case_of("sgd"), "fused_sparse_dist", "PenalizesReplicas")
