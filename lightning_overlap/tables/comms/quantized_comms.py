"""Resolve and check the precision of communication: names, or TorchRec's config."""

from __future__ import annotations

import dataclasses
from collections.abc import Callable, Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.quantize_comm import QuantizedCommCodec
from torch import Tensor
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs, get_qcomm_codecs_registry
from torchrec.distributed.types import QuantizedCommCodecs, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection
from typing_extensions import override

from ...text import some, unknown_name_message
from ..table import Table

QuantizedComms: TypeAlias = str | tuple[str, str] | QCommsConfig | None
"""A precision for both, (embeddings, gradients), TorchRec's config, or None for full precision."""

Codecs: TypeAlias = Mapping[str, QuantizedCommCodecs]
"""Name of TorchRec's `CommOp` -> codecs, for TorchRec's sharders."""

PRECISIONS = {precision.value: precision for precision in CommType}
"""The precisions by name, explained in `docs/communication.md`."""

FP16_MAX = torch.finfo(torch.float16).max
"""The largest finite number of FP16. TorchRec's codec sends it instead of larger numbers and infinity."""

_SCALED = (CommType.FP16, CommType.BF16)
_CUDA_ONLY = (CommType.BF16, CommType.FP8)
_GROUPED = (CommType.INT8, CommType.MX4)
_GROUP = 32
"""Numbers that share a scale in "fp8". TorchRec's FP8 without groups cannot represent more than 0.9375."""

_SEQUENCES = (EmbeddingCollection, ManagedCollisionEmbeddingCollection)
_SUMMED = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
"""Sharding types with a reduce-scatter of embeddings, which sums encoded numbers."""


class Codec(QuantizedCommCodec):  # type: ignore[misc]
    """TorchRec's codec, but it divides by the loss scale in full precision, and it can be watched.

    TorchRec 1.8 divides by the scale in 16 bits, which loses what the scale has gained. If all numbers stay within the
    range of 16 bits, a power of two gives the same bits either way.

    Args:
        plain: TorchRec's codec, without a loss scale.
        loss_scale: Factor for numbers before they are sent; None: no scale.
    """

    note: Callable[[Tensor], None] | None = None
    """Called with each tensor before it is encoded, if set."""

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
        encoded: Tensor = super().encode(input_tensor, ctx)
        return encoded

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
    """Return TorchRec's config for the user's argument; None for full precision.

    Raises:
        TypeError: The argument is not a `QuantizedComms`.
        ValueError: A precision is unknown, or a loss scale is not positive or not supported by its precision.
    """
    match quantized_comms:
        case None:
            return None
        case str():
            return resolve_quantized_comms((quantized_comms, quantized_comms))
        case QCommsConfig():
            config = quantized_comms
        case [str(), str()]:
            for name in quantized_comms:
                if name not in PRECISIONS:
                    raise ValueError(f"quantized_comms: {unknown_name_message('precision', name, PRECISIONS)}")
            sizes = [_GROUP if name == "fp8" else None for name in quantized_comms]
            precisions = map(CommType, quantized_comms)
            config = QCommsConfig(*precisions, fp8_quantize_dim=sizes[0], fp8_quantize_dim_bwd=sizes[1])
        case _:
            raise TypeError(
                "quantized_comms must be a precision, a pair for embeddings and gradients such as ('fp16', 'bf16'), "
                f"TorchRec's QCommsConfig, or None, got {quantized_comms!r}. Precisions: {', '.join(PRECISIONS)}."
            )
    for direction, precision, scale, _ in _directions(config):
        if scale is None:
            continue
        if precision not in _SCALED:
            raise ValueError(
                f"quantized_comms: {direction}_loss_scale={scale} does nothing: TorchRec only scales fp16 and bf16, "
                f"and {direction}_precision is {precision}. Remove it."
            )
        if not (isinstance(scale, int | float) and 0 < scale < float("inf")):
            raise ValueError(f"quantized_comms: {direction}_loss_scale must be a positive number, got {scale!r}.")
    full = config.forward_precision is config.backward_precision is CommType.FP32
    return None if full else config


def check_quantized_comms(config: QCommsConfig | None, tables: Iterable[Table], device: torch.device) -> None:
    """Check that the device and all tables support the precisions.

    Raises:
        ValueError: The device lacks a precision, or the embeddings of an EmbeddingCollection do not divide into groups.
    """
    sequences = [table.path for table in tables if issubclass(table.sharder.module_type, _SEQUENCES)]
    for direction, precision, _, fp8_group in _directions(config or QCommsConfig()):
        if device.type == "cpu" and precision in _CUDA_ONLY:
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


def check_plan(config: QCommsConfig | None, plan: ShardingPlan) -> None:
    """Raise a ValueError if a plan sends embeddings of row-wise tables in INT8, which a reduce-scatter cannot sum."""
    for direction, precision, *_ in _directions(config or QCommsConfig()):
        if precision is not CommType.INT8:
            continue
        modules: dict[str, Any] = plan.plan
        tables = [(f"{path}.{name}", one) for path, of_module in modules.items() for name, one in of_module.items()]
        summed = [name for name, one in tables if one.sharding_type in _SUMMED]
        if summed:
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
