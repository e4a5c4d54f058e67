"""`benchmarks/operators.py`: the operators of a step, ours beside TorchRec's pipeline, on a tiny model."""

import re
import warnings
from collections.abc import Sequence
from typing import Any

import torch.distributed as dist

from benchmarks import operators

from ..support.ranks import Ranks

ARMS = ("fused_sparse_dist", "torchrec/sparse_dist")
TINY = ("data.batch_size=8", "data.num_tables=2", "data.rows_per_table=50", "model.embedding_dim=8", "num_batches=2")


def configs_of(arms: Sequence[str]) -> dict[str, Any]:
    num_ranks = dist.get_world_size()
    return {arm: operators.config_of("two_cpu_ranks", num_ranks, [*TINY, *operators.others_in(arm)]) for arm in arms}


def table_of_a_tiny_model() -> str:
    with warnings.catch_warnings(action="ignore"):
        return operators.table(operators.measure(configs_of(ARMS), operators.profiled, 1, num_steps=2), top=1000)


def times_of_a_tiny_model(*arms: str) -> str:
    with warnings.catch_warnings(action="ignore"):
        return operators.timed_table(operators.measure(configs_of(arms), operators.timed, 2, num_steps=2))


def test_a_table_has_every_operator_with_its_calls_in_a_step_of_each_arm(two_ranks: Ranks) -> None:
    found, _ = two_ranks.run(table_of_a_tiny_model)
    head, _, *lines = (re.split(" {2,}", line.strip()) for line in found.splitlines())
    assert head == ["operator", ARMS[0], "calls", ARMS[1], "calls"]
    rows = {line[0]: line[1:] for line in lines}
    calls = {name: (int(row[1]), int(row[3])) for name, row in rows.items() if name != "all"}
    assert calls["## backward ##"] == (1, 1)
    assert calls["fbgemm::split_embedding_backward_codegen_rowwise_adagrad_cpu"] == (1, 1)
    ours, theirs = calls["c10d::alltoall_base_"]
    assert 0 < ours < theirs
    times = [[float(row[at].removesuffix(" ms")) for name, row in rows.items() if name != "all"] for at in (0, 2)]
    for own, total in zip(times, (rows["all"][0], rows["all"][1]), strict=True):
        assert abs(sum(own) - float(total.removesuffix(" ms"))) < 0.01 * len(own)


def test_bare_steps_are_timed_with_what_an_arm_sets_for_itself(two_ranks: Ranks) -> None:
    arms = ("base at_rate_0=1", "fused_sparse_dist frozen=1", "base", "base frozen=2 model.learning_rate=0.5")
    found, _ = two_ranks.run(times_of_a_tiny_model, *arms)
    head, _, *lines = (re.split(" {2,}", line.strip()) for line in found.splitlines())
    assert head == ["arm", "CPU of a step", "of the first", "step", "of the first", "same losses"]
    assert [(line[0], line[-1]) for line in lines] == list(zip(arms, ("yes", "yes", "no", "no"), strict=True))
    assert lines[0][2] == lines[0][4] == "1.000 (1.000 to 1.000)"
    for line in lines:
        for cell in (line[1], line[3]):
            assert float(cell.removesuffix(" ms")) > 0
