"""What may be sent in which precision, the loss scale, what is said of gradients that FP16 does not fit, and bytes."""

import re
from typing import Any

import pytest
import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.tables import find_tables
from lightning_overlap.tables.quantized_comms import check_quantized_comms, codecs_of, resolve_quantized_comms

from ..support.cases import BATCH_SIZE, SEQUENCE, TABLE_WISE, Case, Model, TableSpec
from ..support.ranks import RankError, Ranks
from . import quantized

CPU, CUDA = torch.device("cpu"), torch.device("cuda")
ROWS = Case("rows", (TableSpec("t0", ("f0",)), TableSpec("r0", ("f1",), "row_wise")))
POOLED = "POOLED_EMBEDDINGS_ALL_TO_ALL"


@pytest.mark.parametrize(
    ("given", "forward", "backward"),
    [
        ("fp16", CommType.FP16, CommType.FP16),
        (("fp16", "bf16"), CommType.FP16, CommType.BF16),
        (["fp32", "fp16"], CommType.FP32, CommType.FP16),
        (QCommsConfig(CommType.INT8), CommType.INT8, CommType.FP32),
    ],
)
def test_a_precision_by_name_or_config(given: Any, forward: CommType, backward: CommType) -> None:
    config = OverlapEmbeddingStrategy(quantized_comms=given).quantized_comms
    assert config is not None
    assert (config.forward_precision, config.backward_precision) == (forward, backward)


@pytest.mark.parametrize("given", [None, "fp32", ("fp32", "fp32"), QCommsConfig()])
def test_full_precision_is_no_codec(given: Any) -> None:
    assert OverlapEmbeddingStrategy(quantized_comms=given).quantized_comms is None


@pytest.mark.parametrize(
    ("given", "error", "message"),
    [
        ("fp61", ValueError, "quantized_comms: unknown precision 'fp61'. Did you mean 'fp16'"),
        (("fp16", "bf61"), ValueError, "unknown precision 'bf61'. Did you mean 'bf16'"),
        (16, TypeError, "quantized_comms must be a precision, a pair for"),
        (("fp16",), TypeError, "got ('fp16',). Precisions: fp32, fp16"),
        (QCommsConfig(CommType.INT8, forward_loss_scale=2.0), ValueError, "forward_loss_scale=2.0 does nothing"),
        (quantized.fp16(0.0), ValueError, "backward_loss_scale must be a positive number, got 0.0"),
    ],
)
def test_what_is_none_is_answered(given: Any, error: type[Exception], message: str) -> None:
    with pytest.raises(error, match=re.escape(message)):
        OverlapEmbeddingStrategy(quantized_comms=given)


@pytest.mark.parametrize(
    ("given", "case", "device", "message"),
    [
        ("bf16", TABLE_WISE, CPU, "bf16 (forward) cannot be sent by a CPU: TorchRec would send fp16 instead."),
        (("fp16", "bf16"), TABLE_WISE, CPU, "bf16 (backward) cannot be sent by a CPU"),
        ("fp8", TABLE_WISE, CPU, "fp8 (forward) cannot be sent by a CPU. Use 'fp16', or train on CUDA."),
        ("int8", SEQUENCE, CPU, "int8 (forward) sends groups of numbers with a common scale, but the embed"),
        ("mx4", SEQUENCE, CUDA, "EmbeddingCollection do not divide into groups: ebc.t0, ebc.t1, ebc.t2. Use 'fp16'"),
        ("fp8", SEQUENCE, CUDA, "fp8 (forward) sends groups of numbers with a common scale"),
        (QCommsConfig(CommType.FP8, CommType.BF16), SEQUENCE, CUDA, None),
        ("fp8", TABLE_WISE, CUDA, None),
        ("bf16", SEQUENCE, CUDA, None),
        ("int8", TABLE_WISE, CPU, None),
    ],
)
def test_what_a_device_or_tables_lack(given: Any, case: Case, device: torch.device, message: str | None) -> None:
    config, tables = resolve_quantized_comms(given), find_tables(Model(case))
    if message is None:
        check_quantized_comms(config, tables, device)
        return
    with pytest.raises(ValueError, match=re.escape(message)):
        check_quantized_comms(config, tables, device)


@pytest.mark.parametrize(
    ("given", "case", "message"),
    [
        ("bf16", TABLE_WISE, r"bf16 \(forward\) cannot be sent by a CPU"),
        (("fp16", "int8"), ROWS, r"a reduce-scatter cannot sum int8 \(backward\), but .* tables: ebc\.r0"),
    ],
)
def test_refused_before_training(two_ranks: Ranks, given: Any, case: Case, message: str) -> None:
    with pytest.raises(RankError, match=message):
        two_ranks.run(quantized.losses_of, case, given)


def test_a_sharded_module_keeps_its_codecs(two_ranks: Ranks) -> None:
    """In full precision, too: nobody who asks for that gets the rounded embeddings of another strategy's codecs."""
    said = {
        pair: two_ranks.run(quantized.fit_again, TABLE_WISE, *pair)
        for pair in (("fp16", "fp16"), (None, "fp16"), ("fp16", None), ("fp16", ("fp16", "fp32")))
    }
    assert said.pop(("fp16", "fp16")) == [""] * 2
    for messages in said.values():
        for message in messages:
            assert "ebc is sharded already, and goes on sending what it was sharded with" in message


def test_a_loss_scale_keeps_numbers_that_torchrec_loses() -> None:
    """TorchRec divides in 16 bits: too large a number comes back as infinity, too small a one as zero."""
    for scale, number in ((2.0**-6, 1e6), (2.0**12, 1e-8)):
        config, numbers = quantized.fp16(scale), torch.tensor([number, -number])
        ours, theirs = codecs_of(config, CPU)[POOLED].backward, get_qcomm_codecs(config).backward  # type: ignore[index]
        torch.testing.assert_close(ours.decode(ours.encode(numbers)), numbers, rtol=1e-3, atol=0)
        assert torch.equal(ours.encode(numbers), theirs.encode(numbers))
        assert theirs.decode(theirs.encode(numbers)).abs().tolist() in ([float("inf")] * 2, [0.0] * 2)


def test_within_the_range_a_loss_scale_gives_torchrecs_bits() -> None:
    numbers = torch.randn(1000, generator=torch.Generator().manual_seed(1)) * 3
    for scale in (None, 0.5, 8.0):
        config = quantized.fp16(scale)
        ours, theirs = codecs_of(config, CPU)[POOLED].backward, get_qcomm_codecs(config).backward  # type: ignore[index]
        assert torch.equal(ours.decode(ours.encode(numbers)), theirs.decode(theirs.encode(numbers)))


def test_a_batch_that_does_not_divide_is_told() -> None:
    codec = codecs_of(resolve_quantized_comms("int8"), CPU)[POOLED].backward  # type: ignore[index]
    context = codec.create_context()
    for of_a_batch in (lambda: codec.encode(torch.zeros(40), context), lambda: codec.calc_quantized_size(40, context)):
        with pytest.raises(ValueError, match=r"groups of 32 numbers, got 40 numbers for a rank\. .* multiples of 8"):
            of_a_batch()


@pytest.mark.parametrize("pipeline", ["fused_sparse_dist", "semi_sync_deferred"])
def test_one_ranks_overflow_is_said_with_a_loss_scale_that_helps(two_ranks: Ranks, pipeline: str) -> None:
    first, second = two_ranks.run(quantized.said, pipeline, "fp16", 1e9)
    [message] = first.messages
    assert (first.while_training, second.messages) == (1, [])
    found = re.search(r"ebc \(t0, t1, t2\).*FP16, reached .* clipped to 65504\. .*loss_scale=2\.0\*\*(-\d+)", message)
    assert found is not None, message
    helped = two_ranks.run(quantized.said, pipeline, quantized.fp16(2.0 ** int(found[1])), 1e9)
    assert [rank.messages for rank in helped] == [[], []]


@pytest.mark.parametrize(("comms", "factor"), [("fp16", 1.0), (("fp16", "fp32"), 1e9), ("int8", 1e9)])
def test_nothing_is_said_of_gradients_that_fit(two_ranks: Ranks, comms: Any, factor: float) -> None:
    ranks = two_ranks.run(quantized.said, "fused_sparse_dist", comms, factor, ask_every=8)
    assert [rank.messages for rank in ranks] == [[], []]


def test_what_the_last_step_shows_is_said(two_ranks: Ranks) -> None:
    last = quantized.LOUD_STEP + 1
    [message] = two_ranks.run(quantized.said, "fused_sparse_dist", "fp16", float("inf"), last)[0].messages
    assert "were not finite: TorchRec's codec sends 65504 instead of infinity" in message


def test_gradients_that_are_all_too_small_are_said(two_ranks: Ranks) -> None:
    comms = quantized.fp16(2.0**-20)
    [message] = two_ranks.run(quantized.said, "fused_sparse_dist", comms, ask_every=8)[0].messages
    assert "(times a loss scale of 9.54e-07): below 6.1e-05 FP16 rounds to multiples of 6e-08" in message


@pytest.mark.parametrize(("comms", "size"), [(None, 4.0), ("fp16", 2.0), ("int8", 1.25), (("int8", "fp16"), None)])
def test_the_monitor_counts_bytes_by_stage(two_ranks: Ranks, comms: Any, size: float | None) -> None:
    counted = two_ranks.run(quantized.bytes_sent, TABLE_WISE, "fused_sparse_dist", comms)
    for rank, (by_stage, printed) in enumerate(counted):
        own, others = (16, 8) if rank == 0 else (8, 16)  # columns of t0 and t2, and of t1
        for stage, columns, each in (("embedding_lookup", own, size or 1.25), ("backward", others, size or 2.0)):
            numbers = BATCH_SIZE * columns
            assert by_stage[stage] == (numbers * each, numbers * (4 - each))
        assert by_stage["input_data_dist"][1] == 0
        assert ("KiB to other ranks in a step" in printed) == (rank == 0)
