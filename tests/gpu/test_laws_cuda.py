"""Laws 1 to 5 on CUDA with NCCL, one rank per GPU: the tests of `laws/test_laws.py`, for each stream policy."""

import dataclasses
from typing import Any

import pytest
import torch
from lightning.pytorch import Callback

from lightning_overlap import MODES, STREAMS, Schedule, Stage, StreamName

from ..laws import nonfinite
from ..laws.nonfinite import Bad
from ..support import reference
from ..support.cases import CASES, NUM_STEPS, SEQUENCE, TABLE_WISE, WEIGHTED, Case, TableSpec
from ..support.fits import fit
from ..support.ranks import Ranks

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

EXACT = [name for name, schedule in MODES.items() if schedule.staleness == 0]
STALE = [name for name, schedule in MODES.items() if schedule.staleness > 0]
ADAM = dataclasses.replace(TABLE_WISE, name="adam", optimizer=(torch.optim.Adam, {"lr": 0.5}))
ROW_WISE = Case("row_wise", (TableSpec("t0", ("f0",)), TableSpec("rows", ("f1",), "row_wise")))
SENT = tuple(
    dataclasses.replace(case, name=f"{case.name}-{'-'.join(comms)}", comms=comms)
    for case, comms in ((TABLE_WISE, ("fp16", "bf16")), (ROW_WISE, ("bf16", "fp16")), (SEQUENCE, ("bf16", "fp16")))
)
CUDA_CASES = (*CASES, ADAM, ROW_WISE, *SENT)

BUSY_CYCLES = 20_000_000  # about 10 ms

_references: dict[tuple[str, int], list[reference.Result]] = {}


def _deterministic_reference(case: Case, staleness: int) -> reference.Result:
    torch.use_deterministic_algorithms(True, warn_only=True)
    if staleness:
        return reference.train_delayed(case, reference.Delayed(staleness), device_type="cuda")
    return reference.train(case, device_type="cuda")


class _Busy(Callback):
    """Keeps a stream busy, so that the host and the other streams run ahead of it, and a missing wait shows."""

    reads_tables = False

    def __init__(self, busy: StreamName) -> None:
        self._busy = busy

    def _sleep(self, trainer: Any, *args: Any) -> None:
        with trainer.strategy.streams.on(self._busy):
            torch.cuda._sleep(BUSY_CYCLES)

    on_train_batch_start = on_before_backward = on_before_optimizer_step = on_train_batch_end = _sleep


def _deterministic_fit(
    case: Case, pipeline: str | Schedule, stream: str, busy: StreamName | None = None
) -> reference.Result:
    torch.use_deterministic_algorithms(True, warn_only=True)
    callbacks = [] if busy is None else [_Busy(busy)]
    return fit(case, pipeline, stream=stream, device_type="cuda", callbacks=callbacks)


def _differences(
    gpus: Ranks,
    case: Case,
    pipeline: str | Schedule,
    stream: str,
    staleness: int = 0,
    busy: StreamName | None = None,
) -> list[list[str]]:
    key = (case.name, staleness)
    if key not in _references:
        _references[key] = gpus.run(_deterministic_reference, case, staleness)
    actual = gpus.run(_deterministic_fit, case, pipeline, stream, busy)
    assert all(len(result.losses) == NUM_STEPS for result in actual)
    return [mine.differences(theirs) for mine, theirs in zip(actual, _references[key], strict=True)]


@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("pipeline", EXACT)
def test_exact_mode_equals_the_plain_loop(gpus: Ranks, case: Case, pipeline: str, stream: str) -> None:
    assert _differences(gpus, case, pipeline, stream) == [[]] * gpus.world_size


@pytest.mark.parametrize("case", CUDA_CASES, ids=lambda case: case.name)
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("pipeline", STALE)
def test_stale_mode_equals_delayed_updates(gpus: Ranks, case: Case, pipeline: str, stream: str) -> None:
    assert _differences(gpus, case, pipeline, stream, MODES[pipeline].staleness) == [[]] * gpus.world_size


@pytest.mark.parametrize("busy", ["compute", "lookup", "data_dist", "memcpy"])
@pytest.mark.parametrize("stream", STREAMS)
@pytest.mark.parametrize("pipeline", MODES)
def test_a_busy_stream_changes_nothing(gpus: Ranks, pipeline: str, stream: str, busy: str) -> None:
    """As where the device bounds the step: the tables of the other tests are so small that the host bounds it."""
    differences = _differences(gpus, TABLE_WISE, pipeline, stream, MODES[pipeline].staleness, StreamName(busy))
    assert differences == [[]] * gpus.world_size


@pytest.mark.parametrize("stream", STREAMS)
def test_one_stale_lookup_shows(gpus: Ranks, stream: str) -> None:
    fused = MODES["fused_sparse_dist"]
    lookup = fused.step_of(Stage.EMBEDDING_LOOKUP)
    steps = [step for step in fused if step.stage is not Stage.EMBEDDING_LOOKUP]
    assert lookup is not None
    steps.insert([step.stage for step in steps].index(Stage.BACKWARD), lookup)
    for differences in _differences(gpus, TABLE_WISE, Schedule("mutated", tuple(steps)), stream):
        assert any(text.startswith("losses from step") for text in differences)


def _deterministic_nonfinite(pipeline: str, case: Case, bad: Bad, leaves_out: bool) -> reference.Result:
    torch.use_deterministic_algorithms(True, warn_only=True)
    return nonfinite.fit(case, pipeline, bad, leaves_out=leaves_out, device_type="cuda")[0]


@pytest.mark.parametrize(("case", "kind"), [(TABLE_WISE, "nan"), (SEQUENCE, "input"), (WEIGHTED, "weights")])
@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "split_backward"])
def test_a_loss_that_is_not_finite_trains_nothing(gpus: Ranks, case: Case, kind: str, pipeline: str) -> None:
    """Law 14: equal to the same fit on data without these batches."""
    bad = Bad(frozenset({0, 3, 4, 8}), gpus.world_size - 1, kind)
    with_them, without = (gpus.run(_deterministic_nonfinite, pipeline, case, bad, left_out) for left_out in (0, 1))
    kept = [step for step in range(NUM_STEPS) if step not in bad.batches]
    for mine, theirs in zip(with_them, without, strict=True):
        assert dataclasses.replace(mine, losses=mine.losses[kept]).differences(theirs) == []
