"""Watch whether sent gradients fit FP16, without host-device syncs."""

from __future__ import annotations

import itertools
import math
import warnings
from collections import deque
from collections.abc import Iterator
from functools import partial
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torchrec.distributed.types import QuantizedCommCodecs

from ...distributed import Consensus
from ...text import some
from ..supported_modules import sharding_types_of, table_modules
from .quantized_comms import FP16_MAX, Codec

ASK_EVERY = 64
"""Steps between all-reduces of the largest gradients; at first they are more frequent."""

LEAST_NORMAL = 2.0**-14
"""The smallest normal number of FP16; smaller numbers are multiples of 2**-24."""

HEADROOM = 4
"""Doublings of the largest gradient for which a proposed loss scale leaves room."""


class OverflowWatch:
    """Warns, once for each group of tables, if gradients overflow FP16, or if all gradients are too small for it.

    A rank notes the largest gradient when it is encoded, and reads it when the device has computed it. An asynchronous
    all-reduce on the host finds the largest gradient of all ranks.

    Args:
        model: The sharded model.
        consensus: Makes the all-reduces.
        warns: Whether this rank warns.
    """

    def __init__(self, model: nn.Module, consensus: Consensus, *, warns: bool) -> None:
        self._consensus, self._warns = consensus, warns
        self._codecs: dict[str, list[Codec]] = {}
        """Group of tables (a part of a module) -> its codecs, which share a loss scale."""
        for name, module in table_modules(model).items():
            for sharding, dist in zip(sharding_types_of(module), module._output_dists, strict=True):
                codecs = list(_watch(dist, partial(self._note, len(self._codecs))))
                if codecs:
                    plan = module.module_sharding_plan.items()
                    self._codecs[f"{name} ({some(t for t, one in plan if one.sharding_type == sharding)})"] = codecs
        # Number of the group, its smallest and largest gradient, event after which these are on the host.
        self._noted: deque[tuple[int, Tensor, torch.cuda.Event | None]] = deque()
        self._peaks = [0.0] * len(self._codecs)
        self._asked: tuple[int, Tensor, Any] | None = None
        self._num_steps = 0
        self._said: set[str] = set()

    def _note(self, part: int, gradients: Tensor) -> None:
        """Note the smallest and largest of the gradients, float32, to encode on the current stream."""
        if not gradients.numel():
            return
        ends_2 = torch.stack(torch.aminmax(gradients.detach()))
        event = None
        if ends_2.is_cuda:
            on_host = torch.empty(2, dtype=ends_2.dtype, pin_memory=True)
            ends_2 = on_host.copy_(ends_2, non_blocking=True)
            event = torch.cuda.Event()
            event.record()
        self._noted.append((part, ends_2, event))

    def _read(self) -> None:
        while self._noted:
            part, ends_2, event = self._noted[0]
            if event is not None and not event.query():
                break
            self._noted.popleft()
            low, high = ends_2.tolist()
            peak = max(-low, high) if math.isfinite(low) and math.isfinite(high) else math.inf
            self._peaks[part] = max(self._peaks[part], peak)

    def step(self) -> None:
        """Begin a step; all ranks call this at the same point of a step."""
        if not self._codecs:
            return
        self._read()
        self._num_steps += 1
        if self._asked is not None and self._asked[2].is_completed():
            self._hear()
        if self._num_steps % ASK_EVERY == 0 or self._num_steps & (self._num_steps - 1) == 0:
            self._hear()
            self._ask()

    def finish(self) -> None:
        """Wait for the gradients of the last steps, and warn about them; all ranks call this after training."""
        if not self._codecs:
            return
        for *_, event in self._noted:
            if event is not None:
                event.synchronize()
        self._read()
        self._hear()
        self._ask()
        self._hear()

    def stop(self) -> None:
        """Stop watching."""
        for codec in itertools.chain(*self._codecs.values()):
            codec.note = None
        self._noted.clear()

    def _ask(self) -> None:
        peaks = torch.tensor(self._peaks)
        self._asked = self._num_steps, peaks, self._consensus.start(peaks, ReduceOp.MAX)

    def _hear(self) -> None:
        if self._asked is None:
            return
        (num_steps, peaks, work), self._asked = self._asked, None
        work.wait()
        for (name, codecs), peak in zip(self._codecs.items(), peaks.tolist(), strict=True):
            said = _what_is_wrong(name, peak, codecs[0].loss_scale or 1.0, num_steps)
            if said is not None and name not in self._said:
                self._said.add(name)
                if self._warns:
                    warnings.warn(said, UserWarning, stacklevel=2)


def _what_is_wrong(name: str, peak: float, scale: float, num_steps: int) -> str | None:
    """Return the warning about a group of tables, or None; `peak` is the largest absolute gradient of all ranks."""
    if not peak:
        return None
    sent = f"quantized_comms: the gradients of {name}, which are sent in FP16,"
    if math.isinf(peak):
        return f"{sent} were not finite: TorchRec's codec sends {FP16_MAX:.0f} instead of infinity, and NaN unchanged."
    proposal = math.floor(math.log2(FP16_MAX / peak)) - HEADROOM
    remedy = (
        f"Set backward_loss_scale=2.0**{proposal} in a QCommsConfig, or send them in another precision: "
        "('fp16', 'fp32'), or on CUDA ('fp16', 'bf16')."
    )
    times = "" if scale == 1 else f" (times a loss scale of {scale:.3g})"
    if peak * scale > FP16_MAX:
        return f"{sent} reached {peak:.3g}{times} and were clipped to {FP16_MAX:.0f}. {remedy}"
    if num_steps >= ASK_EVERY and peak * scale < LEAST_NORMAL:
        return (
            f"{sent} were at most {peak:.3g}{times}: below {LEAST_NORMAL:.2g} FP16 rounds to multiples of "
            f"{2.0**-24:.2g}. {remedy}"
        )
    return None


def _watch(dist: nn.Module, note: Any) -> Iterator[Codec]:
    """Replace an output dist's FP16 codecs of gradients by codecs that call `note`; yield them. User codecs stay."""
    for part in dist.modules():
        for attribute, codecs in list(vars(part).items()):
            if not isinstance(codecs, QuantizedCommCodecs) or not isinstance(codecs.backward, Codec):
                continue
            if codecs.backward.quantized_dtype is torch.float16:
                own = Codec(codecs.backward, codecs.backward.loss_scale)
                own.note = note
                setattr(part, attribute, QuantizedCommCodecs(codecs.forward, own))
                yield own
