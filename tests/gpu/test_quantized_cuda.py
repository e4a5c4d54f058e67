"""TorchRec's codecs on a GPU."""

from __future__ import annotations

from typing import Any

import pytest
import torch
from torchrec.distributed.types import QuantizedCommCodecs

from lightning_overlap.tables.quantized_comms import PRECISIONS, codecs_of, resolve_quantized_comms

pytestmark = [pytest.mark.gpu, pytest.mark.timeout(600)]

POOLED = "POOLED_EMBEDDINGS_ALL_TO_ALL"
ERRORS = {"fp16": 1e-3, "bf16": 1e-2, "fp8": 0.15, "int8": 0.05, "mx4": 1.0}


def _codecs(precision: str) -> QuantizedCommCodecs:
    codecs = codecs_of(resolve_quantized_comms(precision), torch.device("cuda"))
    assert codecs is not None
    return codecs[POOLED]


@pytest.mark.parametrize("precision", [name for name in PRECISIONS if name != "fp32"])
def test_numbers_come_back(precision: str) -> None:
    codec: Any = _codecs(precision).forward
    numbers = torch.randn(64 * 32, device="cuda")
    context = codec.create_context()
    back = codec.decode(codec.encode(numbers.view(64, 32), context), context)
    assert (back.view(-1) - numbers).abs().max() < ERRORS[precision] * numbers.abs().max()
