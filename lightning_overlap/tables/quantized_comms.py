"""Quantized communication: resolve and check precisions, and warn if gradients do not fit FP16."""

import dataclasses
import math
import warnings
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Mapping
from functools import partial
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.quantize_comm import QuantizedCommCodec
from torch import Tensor, nn
from torch.distributed import ReduceOp
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs, get_qcomm_codecs_registry
from torchrec.distributed.types import QuantizedCommCodecs, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from typing_extensions import override

from ..distributed import Consensus
from ..text import check_known, some
from .supported_modules import sharding_types_of, table_modules
from .table import Table

QuantizedComms: TypeAlias = str | tuple[str, str] | QCommsConfig | None
"""A precision for both, (embeddings, gradients), TorchRec's config, or None for full precision."""

Codecs: TypeAlias = Mapping[str, QuantizedCommCodecs]  # name of TorchRec's `CommOp` -> codecs, for TorchRec's sharders

PRECISIONS = {precision.value: precision for precision in CommType}  # by name, explained in `docs/communication.md`

FP16_MAX = torch.finfo(torch.float16).max  # TorchRec's codec sends it instead of larger numbers and infinity

_GROUPED = (CommType.INT8, CommType.MX4)
_GROUP = 32  # numbers that share a scale in "fp8". TorchRec's FP8 without groups cannot represent more than 0.9375

_SEQUENCES = (EmbeddingCollection, ManagedCollisionEmbeddingCollection)
_SUMMED = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
"""Sharding types with a reduce-scatter of embeddings, which sums encoded numbers."""


class Codec(QuantizedCommCodec):  # type: ignore[misc]
    """TorchRec's codec `plain`. It can be watched, and divides by the loss scale in full precision, not in 16 bits."""

    note: Callable[[Tensor], None] | None = None  # called with each tensor before it is encoded, if set

    def __init__(self, plain: QuantizedCommCodec, loss_scale: float | None = None) -> None:
        self.__dict__.update(vars(plain))
        self.loss_scale = loss_scale

    @override
    def encode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        if self.note is not None:
            self.note(input_tensor)
        if self.loss_scale is not None:
            input_tensor = self.loss_scale * input_tensor
        self._check_groups(input_tensor.numel(), ctx)
        return super().encode(input_tensor, ctx)  # type: ignore[no-any-return]

    @override
    def decode(self, input_tensor: Tensor, ctx: Any = None) -> Tensor:
        decoded: Tensor = super().decode(input_tensor, ctx)
        return decoded if self.loss_scale is None else decoded / self.loss_scale

    @override
    def calc_quantized_size(self, input_len: int, ctx: Any = None) -> int:
        self._check_groups(input_len, ctx)
        return int(super().calc_quantized_size(input_len, ctx))

    def _check_groups(self, num: int, ctx: Any) -> None:
        if self.quantized_dtype is torch.uint8 and ctx is not None and ctx.row_dim > 0 and num % ctx.row_dim:
            raise ValueError(
                f"quantized_comms: this codec sends groups of {ctx.row_dim} numbers, got {num} numbers for a rank. "
                "Use batch sizes that are multiples of 8, also for the last batch and in evaluations, or use 'fp16'."
            )


def resolve_quantized_comms(quantized_comms: QuantizedComms) -> QCommsConfig | None:
    """Return TorchRec's config for the user's argument; None for full precision; raise a TypeError or ValueError."""
    if isinstance(quantized_comms, str):
        quantized_comms = quantized_comms, quantized_comms
    match quantized_comms:
        case None:
            return None
        case QCommsConfig():
            config = quantized_comms
        case [str(), str()]:
            for name in quantized_comms:
                check_known("precision", name, PRECISIONS, "quantized_comms: ")
            sizes = [_GROUP if name == "fp8" else None for name in quantized_comms]
            precisions = map(CommType, quantized_comms)
            config = QCommsConfig(*precisions, fp8_quantize_dim=sizes[0], fp8_quantize_dim_bwd=sizes[1])
        case _:
            raise TypeError(
                "quantized_comms must be a precision, a pair for embeddings and gradients such as ('fp16', 'bf16'), "
                f"TorchRec's QCommsConfig, or None, got {quantized_comms!r}. Precisions: {', '.join(PRECISIONS)}."
            )
    for direction, precision, scale, _ in _directions(config):
        if scale is not None and precision not in (CommType.FP16, CommType.BF16):
            raise ValueError(
                f"quantized_comms: {direction}_loss_scale={scale} does nothing: TorchRec only scales fp16 and bf16, "
                f"and {direction}_precision is {precision}. Remove it."
            )
        if not (scale is None or (isinstance(scale, int | float) and 0 < scale < float("inf"))):
            raise ValueError(f"quantized_comms: {direction}_loss_scale must be a positive number, got {scale!r}.")
    return None if config.forward_precision is config.backward_precision is CommType.FP32 else config


def check_quantized_comms(config: QCommsConfig | None, tables: Iterable[Table], device: torch.device) -> None:
    """Raise a ValueError if the device or a table does not support the precisions."""
    sequences = [table.path for table in tables if issubclass(table.sharder.module_type, _SEQUENCES)]
    for direction, precision, _, fp8_group in _directions(config or QCommsConfig()):
        if device.type == "cpu" and precision in (CommType.BF16, CommType.FP8):
            instead = ": TorchRec would send fp16 instead" if precision is CommType.BF16 else ""
            raise ValueError(
                f"quantized_comms: {precision} ({direction}) cannot be sent by a CPU{instead}. Use 'fp16', or train on "
                "CUDA."
            )
        if sequences and (precision in _GROUPED or (precision is CommType.FP8 and fp8_group is not None)):
            raise ValueError(
                f"quantized_comms: {precision} ({direction}) sends groups of numbers with a common scale, but the "
                f"embeddings of an EmbeddingCollection do not divide into groups: {some(sequences)}. Use 'fp16', or "
                "'bf16' on CUDA."
            )


def sends_groups(config: QCommsConfig | None) -> bool:
    """Return whether numbers share a scale with others that are sent beside them: other parts, other rounding."""
    return any(precision in (*_GROUPED, CommType.FP8) for _, precision, *_ in _directions(config or QCommsConfig()))


def check_plan(config: QCommsConfig | None, plan: ShardingPlan) -> None:
    """Raise a ValueError if a plan sends embeddings of row-wise tables in INT8, which a reduce-scatter cannot sum."""
    modules: dict[str, Any] = plan.plan
    tables = [(f"{path}.{name}", one) for path, of_module in modules.items() for name, one in of_module.items()]
    summed = [name for name, one in tables if one.sharding_type in _SUMMED]
    for direction, precision, *_ in _directions(config or QCommsConfig()):
        if precision is CommType.INT8 and summed:
            raise ValueError(
                f"quantized_comms: a reduce-scatter cannot sum {precision} ({direction}), but it sums the embeddings "
                f"of row-wise tables: {some(summed)}. Use 'fp16', or shard them table- or column-wise."
            )


def _directions(config: QCommsConfig) -> Iterator[tuple[str, CommType, float | None, int | None]]:
    yield "forward", config.forward_precision, config.forward_loss_scale, config.fp8_quantize_dim
    yield "backward", config.backward_precision, config.backward_loss_scale, config.fp8_quantize_dim_bwd


def codecs_of(config: QCommsConfig | None, device: torch.device) -> Codecs | None:
    """Return the codecs (see `Codec`) for TorchRec's sharders; None for full precision."""
    if config is None:
        return None
    plain = dataclasses.replace(config, forward_loss_scale=None, backward_loss_scale=None)
    codecs: Codecs = get_qcomm_codecs_registry(plain, device=device)
    scales = config.forward_loss_scale, config.backward_loss_scale
    return {
        name: QuantizedCommCodecs(*map(Codec, (pair.forward, pair.backward), scales)) for name, pair in codecs.items()
    }


def compression(config: QCommsConfig | None) -> dict[str, float]:
    """Return float32 bytes per sent byte of `embeddings` and `gradients` in an all-to-all; 1 for full precision."""
    codecs, ratios = get_qcomm_codecs(config or QCommsConfig()), {}
    for what, codec in (("embeddings", codecs.forward), ("gradients", codecs.backward)):
        context = codec.create_context()
        num = 32 * max(1, getattr(context, "row_dim", 1))
        ratios[what] = float(4 * num / (codec.calc_quantized_size(num, context) * codec.quantized_dtype.itemsize))
    return ratios


ASK_EVERY = 64  # steps between all-reduces of the largest gradients; at first they are more frequent

LEAST_NORMAL = 2.0**-14  # the smallest normal number of FP16; smaller numbers are multiples of 2**-24

HEADROOM = 4  # doublings of the largest gradient for which a proposed loss scale leaves room


class OverflowWatch:
    """Warns, once for each group of tables, if gradients overflow FP16, or if all gradients are too small for it.

    Ranks read their largest gradients when the device has computed them. An all-reduce on the host compares them.
    """

    def __init__(self, model: nn.Module, consensus: Consensus, *, warns: bool) -> None:
        self._consensus, self._warns = consensus, warns
        self._codecs: dict[str, list[Codec]] = {}  # group of tables -> its codecs, which share a loss scale
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
        if self._num_steps % ASK_EVERY == 0 or self._num_steps.bit_count() == 1:
            self._ask()
        elif self._asked is not None and self._asked[2].is_completed():
            self._hear()

    def finish(self) -> None:
        """Wait for the gradients of the last steps, and warn about them; all ranks call this after training."""
        if not self._codecs:
            return
        for *_, event in self._noted:
            if event is not None:
                event.synchronize()
        self._read()
        self._ask()
        self._hear()

    def stop(self) -> None:
        """Stop watching."""
        for codecs in self._codecs.values():
            for codec in codecs:
                codec.note = None
        self._noted.clear()

    def _ask(self) -> None:
        self._hear()
        peaks = torch.tensor(self._peaks)
        self._asked = self._num_steps, peaks, self._consensus.start(peaks, ReduceOp.MAX)

    def _hear(self) -> None:
        if self._asked is None:
            return
        (num_steps, peaks, work), self._asked = self._asked, None
        work.wait()
        for (name, codecs), peak in zip(self._codecs.items(), peaks.tolist(), strict=True):
            said = _what_is_wrong(name, peak, codecs[0].loss_scale or 1.0, num_steps)
            if self._warns and said is not None and name not in self._said:
                self._said.add(name)
                warnings.warn(said, stacklevel=2)


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
            plain = codecs.backward if isinstance(codecs, QuantizedCommCodecs) else None
            if isinstance(plain, Codec) and plain.quantized_dtype is torch.float16:
                own = Codec(plain, plain.loss_scale)
                own.note = note
                setattr(part, attribute, QuantizedCommCodecs(codecs.forward, own))
                yield own
