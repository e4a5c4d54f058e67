"""Choose the precision in which embeddings and their gradients are sent: a name, or TorchRec's own config."""

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
"""A precision for embeddings and gradients, one for each, TorchRec's config, or None for full precision."""

Codecs: TypeAlias = Mapping[str, QuantizedCommCodecs]
"""Codecs by the name of TorchRec's `CommOp`, as its sharders take them."""

PRECISIONS = {precision.value: precision for precision in CommType}
"""The precisions by name; `docs/communication.md` has what each takes and where."""

FP16_MAX = torch.finfo(torch.float16).max
"""The largest finite number of FP16. TorchRec's codec sends it in the place of larger ones, and of infinity."""

_SCALED = (CommType.FP16, CommType.BF16)
_CUDA_ONLY = (CommType.BF16, CommType.FP8)
_GROUPED = (CommType.INT8, CommType.MX4)
_GROUP = 32
"""How many numbers share a scale in "fp8". TorchRec's FP8 without groups cannot represent more than 0.9375."""

_SEQUENCES = (EmbeddingCollection, ManagedCollisionEmbeddingCollection)
_SUMMED = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
"""Sharding types whose embeddings go by a reduce-scatter, which sums encoded numbers."""


class Codec(QuantizedCommCodec):  # type: ignore[misc]
    """TorchRec's codec, which divides by the loss scale in full precision, and which can be watched.

    TorchRec 1.8 divides by the scale in 16 bits, so that numbers which the scale has kept within their range leave it
    again. If both stay within it, a power of two gives the same bits either way.

    Args:
        plain: TorchRec's codec, without a loss scale.
        loss_scale: Numbers are multiplied by it before they are sent; None: they are not.
    """

    note: Callable[[Tensor], None] | None = None
    """Called with each tensor that is to be encoded, if it is set."""

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
                f"quantized_comms: this codec sends groups of {ctx.row_dim} numbers, and a batch has {num} for a rank. "
                "Take batches of a multiple of 8 samples, the last one and those of evaluations too, or 'fp16'."
            )


def resolve_quantized_comms(quantized_comms: QuantizedComms) -> QCommsConfig | None:
    """Return TorchRec's config for what a user gave; None if all is sent in full precision.

    Raises:
        TypeError: It is no `QuantizedComms`.
        ValueError: A precision is unknown, or a loss scale is not positive or not possible with its precision.
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
                "quantized_comms is a precision, ('fp16', 'bf16') for embeddings and their gradients, TorchRec's "
                f"QCommsConfig, or None, got {quantized_comms!r}. Precisions: {', '.join(PRECISIONS)}."
            )
    for direction, precision, scale, _ in _directions(config):
        if scale is None:
            continue
        if precision not in _SCALED:
            raise ValueError(
                f"quantized_comms: {direction}_loss_scale={scale} does nothing, as TorchRec scales fp16 and bf16 only, "
                f"and {direction}_precision is {precision}. Leave it out."
            )
        if not (isinstance(scale, int | float) and 0 < scale < float("inf")):
            raise ValueError(f"quantized_comms: {direction}_loss_scale is a positive number, got {scale!r}.")
    full = config.forward_precision is config.backward_precision is CommType.FP32
    return None if full else config


def check_quantized_comms(config: QCommsConfig | None, tables: Iterable[Table], device: torch.device) -> None:
    """Check that a device has the precisions, and that the embeddings of all tables can be sent in them.

    Raises:
        ValueError: The device lacks one, or sequences (EmbeddingCollection) do not divide into its groups.
    """
    sequences = [table.path for table in tables if issubclass(table.sharder.module_type, _SEQUENCES)]
    for direction, precision, _, fp8_group in _directions(config or QCommsConfig()):
        if device.type == "cpu" and precision in _CUDA_ONLY:
            instead = ": TorchRec would send fp16 in its place" if precision is CommType.BF16 else ""
            raise ValueError(
                f"quantized_comms: {precision} ({direction}) cannot be sent by a CPU{instead}. Take 'fp16', or "
                "train on CUDA."
            )
        if sequences and (precision in _GROUPED or (precision is CommType.FP8 and fp8_group is not None)):
            raise ValueError(
                f"quantized_comms: {precision} ({direction}) is sent in groups of numbers with one scale, which the "
                f"embeddings of an EmbeddingCollection do not divide into: {some(sequences)}. Take 'fp16', or 'bf16' "
                "on CUDA."
            )


def check_plan(config: QCommsConfig | None, plan: ShardingPlan) -> None:
    """Check that a plan does not send the embeddings of row-wise tables in INT8.

    Raises:
        ValueError: It does; a reduce-scatter would sum encoded numbers.
    """
    for direction, precision, *_ in _directions(config or QCommsConfig()):
        if precision is not CommType.INT8:
            continue
        modules: dict[str, Any] = plan.plan
        tables = [(f"{path}.{name}", one) for path, of_module in modules.items() for name, one in of_module.items()]
        summed = [name for name, one in tables if one.sharding_type in _SUMMED]
        if summed:
            raise ValueError(
                f"quantized_comms: {precision} ({direction}) cannot be summed on the way, as embeddings of row-wise "
                f"tables are: {some(summed)}. Take 'fp16', or shard them table- or column-wise."
            )


def _directions(config: QCommsConfig) -> Iterator[tuple[str, CommType, float | None, int | None]]:
    """Yield each direction's name, precision, loss scale, and group of FP8."""
    yield "forward", config.forward_precision, config.forward_loss_scale, config.fp8_quantize_dim
    yield "backward", config.backward_precision, config.backward_loss_scale, config.fp8_quantize_dim_bwd


def codecs_of(config: QCommsConfig | None, device: torch.device) -> Codecs | None:
    """Return the codecs for TorchRec's sharders; None for full precision.

    They are TorchRec's own except for the loss scale, see `Codec`.
    """
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
