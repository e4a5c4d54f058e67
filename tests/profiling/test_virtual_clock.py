"""What each mode hides, as the order of issues (>) and waits (<) of one steady step on two ranks."""

from collections.abc import Callable
from typing import Any

import pytest

from lightning_overlap import Schedule
from lightning_overlap.schedules.stages import WeightOwner

from ..support.cases import MIXED, TABLE_WISE, Case, TableSpec
from ..support.ranks import Ranks
from . import virtual

ORDERS = {  # pipeline, number of hosts, milliseconds of a step -> log; drawn: what the step spends its time with
    # ms   0        50       100      150      200      250      300
    #      |splits|ids  |embed.|forward |backward|grads |step    |    exposed: splits, ids, embeddings, grads
    ("base", 1, 310): "> splits 4,< splits 4 exposed 40,> lengths 4,> ids 4,< lengths 4 exposed 40,< ids 4,"
    "> embeddings 4,< embeddings 4 exposed 40,forward,backward,> gradients,< gradients exposed 40,step",
    #      |embed.|forward |backward|grads |step    |                     exposed: embeddings, grads
    #               splits 5 |ids 5 ...|
    ("sparse_dist", 1, 230): "< embeddings 4 exposed 40,forward,< splits 5,> ids 5,backward,> gradients,"
    "< gradients exposed 40,step,< ids 5,> embeddings 5,> splits 6",
    #      |forward |backward|grads |step    |                            exposed: grads
    #                |ids 5 ...|     |emb. 5 .|    with the ids the sizes of batch 6
    ("fused_sparse_dist", 1, 190): "< embeddings 4,forward,> ids 5,backward,> gradients,< gradients exposed 40,"
    "< ids 5,> embeddings 5,step",
    #       |ids 5 ...              |emb. 5 .|    sent within the forward; waited for after the gradients
    ("fused_sparse_dist", 2, 190): "< embeddings 4,> ids 5,forward,backward,> gradients,< gradients exposed 40,"
    "< ids 5,> embeddings 5,step",
    #      |forward |bwd |weights |grads|step    |                            exposed: 15 ms of grads
    #                |ids 5 ...|grads ....|emb. 5 .|
    ("split_backward", 1, 165): "< embeddings 4,forward,> ids 5,backward,> gradients,weights,"
    "< gradients exposed 15,< ids 5,> embeddings 5,step",
    #       |ids 5 ...|grads ....|emb. 5 .|
    ("split_backward", 2, 165): "< embeddings 4,> ids 5,forward,backward,> gradients,weights,"
    "< gradients exposed 15,< ids 5,> embeddings 5,step",
    #      |embed.|forward |backward|grads |step    |            exposed: embeddings (sent after the step), grads
    ("fused_sparse_dist_after_optimizer", 1, 230): "< embeddings 4 exposed 40,forward,> ids 5,backward,> gradients,"
    "< gradients exposed 40,step,< ids 5,> embeddings 5",
    #      |forward |backward|grads |step    |                            exposed: grads
    #                        |emb. 5 ...........  looked up in the backward, while that waits for gradients
    #                              |ids 6 ......  after the gradients, with the sizes of batch 7
    **dict.fromkeys(
        (("semi_sync", 1, 190), ("semi_sync", 2, 190)),
        "< embeddings 4,forward,backward,> gradients,< ids 5,> embeddings 5,< gradients exposed 40,> ids 6,step",
    ),
    #      |forward |backward|step    |                                  exposed: nothing
    #               |emb. 5 .| grads 4 .......  waited for after the next forward; then the ids are sent
    #                        | splits 7 ......  overlapped with the dense all-reduce, which the backward waits for
    ("semi_sync_deferred", 1, 150): "< embeddings 4,forward,< splits 6,> ids 6,< gradients,< ids 5,> embeddings 5,"
    "backward,> splits 7,> gradients,step",
    #                        |emb. 5, splits 7  both overlapped with the dense all-reduce
    #                        | grads 4 .......  waited for before that lookup
    ("semi_sync_deferred", 2, 150): "< embeddings 4,forward,< splits 6,> ids 6,backward,< gradients,< ids 5,"
    "> embeddings 5,> splits 7,> gradients,step",
    #      |forward |backward|grads |step    |                            exposed: grads
    #       ids 5 ............. assembled in the backward, as a CPU's tables have no cache
    #                                |emb. 5, splits 6
    ("prefetch", 1, 190): "< embeddings 4,forward,backward,> gradients,< ids 5,< gradients exposed 40,"
    "> splits 6,> embeddings 5,step,< splits 6,> ids 6",
    #       ids 5 .. waited for above the backward
    ("prefetch", 2, 190): "< embeddings 4,forward,< ids 5,backward,> gradients,< gradients exposed 40,"
    "> splits 6,> embeddings 5,step,< splits 6,> ids 6",
}


@pytest.mark.parametrize(("pipeline", "num_nodes", "step_ms"), ORDERS)
def test_order_of_issues_and_waits(
    get_ranks: Callable[..., Ranks], pipeline: str, num_nodes: int, step_ms: int
) -> None:
    for actual, steps_ms in get_ranks(2, num_nodes=num_nodes).run(virtual.run, TABLE_WISE, pipeline):
        assert actual == ORDERS[pipeline, num_nodes, step_ms].split(",")
        assert set(steps_ms[1:]) == {step_ms}  # the first step finds out which input feeds which module


@pytest.mark.parametrize(
    ("pipeline", "case"),
    [("semi_sync", TABLE_WISE), ("async_lookup", TABLE_WISE), ("semi_sync", MIXED)],
    ids=["semi_sync", "async_lookup", "mixed"],
)
def test_a_lookup_is_made_while_the_backward_waits_for_gradients(two_ranks: Ranks, pipeline: str, case: Case) -> None:
    """The 10 ms that it takes are of the 40 that gradients travel. Anomaly detection would keep the backward alive."""
    options: dict[str, Any] = {"timed_lookups": WeightOwner.FUSED_BACKWARD}
    for log, _ in two_ranks.run(virtual.run, case, pipeline, **options):
        gradients, lookup = log.index("> gradients"), log.index("model-parallel lookup")
        assert gradients < lookup < log.index("< gradients exposed 30")
        assert log[lookup + 1].startswith("> embeddings")
    for log, _ in two_ranks.run(virtual.run, case, pipeline, detect_anomaly=True, **options):
        assert log.index("model-parallel lookup") < log.index("backward")


def test_no_batch_outlives_its_step(mode: Schedule, two_ranks: Ranks) -> None:
    """What a backward is told to call keeps nothing alive, and needs no garbage collector to be gone."""
    assert max(two_ranks.run(virtual.batches_alive, TABLE_WISE, mode.name)) <= mode.depth + 1


DATA_PARALLEL_FIRST, IN_TWO_MODULES = (
    Case(
        name,
        (
            TableSpec("d0", ("f0",), "data_parallel"),
            TableSpec("t0", ("f1",), collection=collection),
            TableSpec("t1", ("f2",), collection=collection),
        ),
    )
    for name, collection in (("data_parallel_first", "ebc"), ("in_two_modules", "second"))
)


@pytest.mark.parametrize("case", [DATA_PARALLEL_FIRST, IN_TWO_MODULES], ids=lambda case: case.name)
@pytest.mark.parametrize("pipeline", ["sparse_dist", "fused_sparse_dist_after_optimizer", "fused_sparse_dist"])
def test_a_data_parallel_lookup_comes_after_the_step_and_lies_inside_the_time_of_the_all_to_all(
    two_ranks: Ranks, pipeline: str, case: Case
) -> None:
    """Embeddings travel for 40 ms; the lookup that takes 10 of them is done when 30 are left."""
    for log, steps_ms in two_ranks.run(virtual.run, case, pipeline, timed_lookups=WeightOwner.DENSE_OPTIMIZER):
        sent, looked_up = log.index("> embeddings 5"), log.index("data-parallel lookup")
        if pipeline == "fused_sparse_dist":  # sends them before the step
            assert sent < log.index("step") == looked_up - 1
        else:
            assert sent == looked_up - 1
            assert log[0] == "< embeddings 4 exposed 30"
            assert set(steps_ms[1:]) == {230}
