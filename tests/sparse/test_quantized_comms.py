"""What may be sent in which precision, the loss scale, what is said of gradients that FP16 does not fit, and bytes."""

import contextlib
import io
import re
import warnings
from dataclasses import replace
from typing import Any
from unittest import mock

import pytest
import torch
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs

from lightning_overlap import OverlapEmbeddingStrategy, OverlapMonitor
from lightning_overlap.tables import find_tables
from lightning_overlap.tables import quantized_comms as overflow
from lightning_overlap.tables.quantized_comms import check_quantized_comms, codecs_of, resolve_quantized_comms

from ..support.cases import BATCH_SIZE, SEQUENCE, TABLE_WISE, Batches, Case, Model, TableSpec
from ..support.fits import fit, make_strategy, make_trainer
from ..support.ranks import RankError, Ranks

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = Case("rows", (TableSpec("t0", ("f0",)), TableSpec("r0", ("f1",), "row_wise")))
POOLED = "POOLED_EMBEDDINGS_ALL_TO_ALL"
LOUD_STEP = 3


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


def test_a_loss_scale_keeps_numbers_that_torchrec_loses() -> None:
    """TorchRec divides in 16 bits: too large a number comes back as infinity, too small a one as zero."""
    for scale, number in ((2.0**-6, 1e6), (2.0**12, 1e-8)):
        config, numbers = _fp16(scale), torch.tensor([number, -number])
        ours, theirs = codecs_of(config, CPU)[POOLED].backward, get_qcomm_codecs(config).backward  # type: ignore[index]
        torch.testing.assert_close(ours.decode(ours.encode(numbers)), numbers, rtol=1e-3, atol=0)
        assert torch.equal(ours.encode(numbers), theirs.encode(numbers))
        assert theirs.decode(theirs.encode(numbers)).abs().tolist() in ([float("inf")] * 2, [0.0] * 2)


def test_a_batch_that_does_not_divide_is_told() -> None:
    codec = codecs_of(resolve_quantized_comms("int8"), CPU)[POOLED].backward  # type: ignore[index]
    context = codec.create_context()
    for of_a_batch in (lambda: codec.encode(torch.zeros(40), context), lambda: codec.calc_quantized_size(40, context)):
        with pytest.raises(ValueError, match=r"groups of 32 numbers, got 40 numbers for a rank\. .* multiples of 8"):
            of_a_batch()


class Loud(Model):
    """In one step the gradients of rank 1's embeddings are so many times as large."""

    factor = 1.0

    def _pool(self, rows: Any, table: TableSpec, feature: str) -> Tensor:
        pooled = super()._pool(rows, table, feature)
        if len(self.losses) == LOUD_STEP and self.global_rank == 1:
            pooled.register_hook(lambda gradient: gradient * self.factor)
        return pooled


def _said(pipeline: str, comms: Any, factor: float = 1.0, ask_every: int = 64) -> list[str]:
    """Train with loud gradients, of which next to nothing reaches the tables; return what was said on this rank."""
    case = replace(TABLE_WISE, optimizer=(torch.optim.SGD, {"lr": 1e-12}))
    model = Loud(case)
    model.factor = factor
    strategy = make_strategy(model, pipeline, quantized_comms=comms)
    with warnings.catch_warnings(record=True) as caught, mock.patch.object(overflow, "ASK_EVERY", ask_every):
        warnings.simplefilter("always")
        make_trainer(strategy).fit(model, datamodule=Batches(case, 12))
    return [text for one in caught if "quantized_comms" in (text := str(one.message))]


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "semi_sync_deferred"])
def test_one_ranks_overflow_is_said_with_a_loss_scale_that_helps(two_ranks: Ranks, pipeline: str) -> None:
    [message], others = two_ranks.run(_said, pipeline, "fp16", 1e9)
    assert others == []
    found = re.search(r"ebc \(t0, t1, t2\).*FP16, reached .* clipped to 65504\. .*loss_scale=2\.0\*\*(-\d+)", message)
    assert found is not None, message
    assert two_ranks.run(_said, pipeline, _fp16(2.0 ** int(found[1])), 1e9) == [[], []]


TOO_SMALL = "(times a loss scale of 9.54e-07): below 6.1e-05 FP16 rounds to multiples of 6e-08"


@pytest.mark.parametrize(
    ("comms", "factor", "ask_every", "parts"),
    [
        ("fp16", 1.0, 8, []),
        (("fp16", "fp32"), 1e9, 8, []),
        ("int8", 1e9, 8, []),
        (_fp16(2.0**-20), 1.0, 8, [TOO_SMALL]),
        # What the last step shows, too.
        ("fp16", float("inf"), LOUD_STEP + 1, ["were not finite: TorchRec's codec sends 65504 instead of infinity"]),
    ],
    ids=["fit", "full_precision", "int8", "too_small", "infinite"],
)
def test_what_is_said_of_gradients(
    two_ranks: Ranks, comms: Any, factor: float, ask_every: int, parts: list[str]
) -> None:
    first, second = two_ranks.run(_said, "fused_sparse_dist", comms, factor, ask_every)
    assert [part in message for part, message in zip(parts, first, strict=True)] == [True] * len(parts)
    assert second == []


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
