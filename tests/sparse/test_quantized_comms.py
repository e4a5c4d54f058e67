"""What may be sent in which precision, and how many bytes are sent."""

import contextlib
import io
import re
from typing import Any

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig

from lightning_overlap import OverlapEmbeddingStrategy, OverlapMonitor
from lightning_overlap.tables import find_tables
from lightning_overlap.tables.quantized_comms import check_quantized_comms, resolve_quantized_comms

from ..support.cases import BATCH_SIZE, SEQUENCE, TABLE_WISE, Batches, Case, Model, TableSpec
from ..support.fits import fit, make_strategy, make_trainer
from ..support.ranks import RankError, Ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = Case("rows", (TableSpec("t0", ("f0",)), TableSpec("r0", ("f1",), "row_wise")))
POOLED = "POOLED_EMBEDDINGS_ALL_TO_ALL"


def _fp16(backward_loss_scale: float | None) -> QCommsConfig:
    return QCommsConfig(CommType.FP16, CommType.FP16, backward_loss_scale=backward_loss_scale)


@pytest.mark.parametrize(
    ("given", "expected"),
    [
        ("fp16", (CommType.FP16, CommType.FP16)),
        (("fp16", "bf16"), (CommType.FP16, CommType.BF16)),
        (["fp32", "fp16"], (CommType.FP32, CommType.FP16)),
        (QCommsConfig(CommType.INT8), (CommType.INT8, CommType.FP32)),
        (None, None),
        (("fp32", "fp32"), None),
    ],
)
def test_a_precision_by_name_or_config(given: Any, expected: tuple[CommType, CommType] | None) -> None:
    """Full precision is no codec."""
    config = OverlapEmbeddingStrategy(quantized_comms=given).quantized_comms
    assert expected == (None if config is None else (config.forward_precision, config.backward_precision))


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("fp61", ValueError, "quantized_comms: unknown precision 'fp61'. Did you mean 'fp16'"),
        (("fp16",), TypeError, "quantized_comms must be a precision, a pair for"),
        (QCommsConfig(CommType.INT8, forward_loss_scale=2.0), ValueError, "forward_loss_scale=2.0 does nothing"),
        (_fp16(0.0), ValueError, "backward_loss_scale must be a positive number, got 0.0"),
    ],
)
def test_what_is_none_is_answered(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        OverlapEmbeddingStrategy(quantized_comms=given)


@pytest.mark.parametrize(
    ("given", "case", "device", "message"),
    [
        (("fp16", "bf16"), TABLE_WISE, CPU, "bf16 (backward) cannot be sent by a CPU: TorchRec would send fp16 instea"),
        ("fp8", TABLE_WISE, CPU, "fp8 (forward) cannot be sent by a CPU. Use 'fp16', or train on CUDA."),
        ("int8", SEQUENCE, CPU, "int8 (forward) sends groups of numbers with a common scale, but the embed"),
        ("fp8", SEQUENCE, CUDA, "EmbeddingCollection do not divide into groups: ebc.t0, ebc.t1, ebc.t2. Use 'fp16'"),
        (QCommsConfig(CommType.FP8, CommType.BF16), SEQUENCE, CUDA, None),
        ("fp8", TABLE_WISE, CUDA, None),
        ("bf16", SEQUENCE, CUDA, None),
        ("int8", TABLE_WISE, CPU, None),
    ],
)
def test_what_a_device_or_tables_lack(given: Any, case: Case, device: torch.device, message: str | None) -> None:
    refused = contextlib.nullcontext() if message is None else pytest.raises(ValueError, match=re.escape(message))
    with refused:
        check_quantized_comms(resolve_quantized_comms(given), find_tables(Model(case)), device)


@pytest.mark.parametrize(
    ("given", "case", "message"),
    [
        ("bf16", TABLE_WISE, r"bf16 \(forward\) cannot be sent by a CPU"),
        (("fp16", "int8"), ROWS, r"a reduce-scatter cannot sum int8 \(backward\), but .* tables: ebc\.r0"),
    ],
)
def test_refused_before_training(two_ranks: Ranks, given: Any, case: Case, message: str) -> None:
    with pytest.raises(RankError, match=message):
        two_ranks.run(fit, case, "fused_sparse_dist", options={"quantized_comms": given})


def _fit_again(first: Any, second: Any) -> str:
    model = Model(TABLE_WISE)
    strategy = make_strategy(model, quantized_comms=first)
    make_trainer(strategy).fit(model, datamodule=Batches(TABLE_WISE, 3))
    again = OverlapEmbeddingStrategy(sharding=strategy.sharding, quantized_comms=second)
    try:
        make_trainer(again).fit(model, datamodule=Batches(TABLE_WISE, 3))
    except ValueError as err:
        return str(err)
    return ""


def test_a_sharded_module_keeps_its_codecs(two_ranks: Ranks) -> None:
    """In full precision, too: nobody who asks for that gets the rounded embeddings of another strategy's codecs."""
    assert two_ranks.run(_fit_again, "fp16", "fp16") == [""] * 2
    for first, second in ((None, "fp16"), ("fp16", None), ("fp16", ("fp16", "fp32"))):
        for message in two_ranks.run(_fit_again, first, second):
            assert "ebc is sharded already, and goes on sending what it was sharded with" in message


def _bytes_sent(case: Case, pipeline: str, comms: Any) -> tuple[dict[str, tuple[float, float]], str]:
    """Return what a monitor counts in a step, sent and saved by stage, and what it prints."""
    model, monitor, printed = Model(case), OverlapMonitor(every_n_steps=4, audit=False), io.StringIO()
    strategy = make_strategy(model, pipeline, quantized_comms=comms)
    with contextlib.redirect_stdout(printed):
        make_trainer(strategy, callbacks=[monitor]).fit(model, datamodule=Batches(case, 10))
    traffic = monitor.accounts[0].traffic
    return {str(stage): (one.sent, one.saved) for stage, one in traffic.items()}, printed.getvalue()


@pytest.mark.parametrize(("comms", "size"), [(None, 4.0), ("fp16", 2.0), ("int8", 1.25), (("int8", "fp16"), None)])
def test_the_monitor_counts_bytes_by_stage(two_ranks: Ranks, comms: Any, size: float | None) -> None:
    counted = two_ranks.run(_bytes_sent, TABLE_WISE, "fused_sparse_dist", comms)
    for rank, (by_stage, printed) in enumerate(counted):
        own, others = (16, 8) if rank == 0 else (8, 16)  # columns of t0 and t2, and of t1
        for stage, columns, each in (("embedding_lookup", own, size or 1.25), ("backward", others, size or 2.0)):
            numbers = BATCH_SIZE * columns
            assert by_stage[stage] == (numbers * each, numbers * (4 - each))
        assert by_stage["input_data_dist"][1] == 0
        assert ("KiB to other ranks in a step" in printed) == (rank == 0)
