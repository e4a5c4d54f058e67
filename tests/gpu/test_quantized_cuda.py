"""Codecs on a GPU, and the watch over gradients in FP16, which must not make the host wait."""

from __future__ import annotations

from types import SimpleNamespace
from typing import Any

import pytest
import torch
from torch import nn
from torchrec.distributed.types import QuantizedCommCodecs

from lightning_overlap.tables import quantized_comms as overflow
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


class _Asks:
    def start(self, values: torch.Tensor, op: Any) -> _Asks:
        return self

    def is_completed(self) -> bool:
        return True

    def wait(self) -> None:
        pass


def test_the_watch_makes_the_host_wait_for_nothing(monkeypatch: pytest.MonkeyPatch) -> None:
    dist = nn.Module()
    dist.codecs = _codecs("fp16")
    plan = {"t0": SimpleNamespace(sharding_type="table_wise")}
    module = SimpleNamespace(_output_dists=[dist], module_sharding_plan=plan)
    monkeypatch.setattr(overflow, "table_modules", lambda model: {"ebc": module})
    monkeypatch.setattr(overflow, "sharding_types_of", lambda module: ["table_wise"])
    watch = overflow.OverflowWatch(nn.Module(), _Asks(), warns=True)  # type: ignore[arg-type]
    codec: Any = dist.codecs.backward
    gradients = torch.full((1024,), 1e6, device="cuda")
    codec.encode(gradients)  # memory of the host is pinned once
    torch.cuda.synchronize()
    torch.cuda.set_sync_debug_mode("error")
    try:
        codec.encode(gradients)
    finally:
        torch.cuda.set_sync_debug_mode("default")
    with pytest.warns(UserWarning, match=r"ebc \(t0\).* reached 1e\+06 and were clipped to 65504"):
        watch.finish()
