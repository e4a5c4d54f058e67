"""Quantized communication: resolve and check the precisions, which TorchRec's codecs send."""

from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeAlias

import torch
from torchrec.distributed.fbgemm_qcomm_codec import CommType, QCommsConfig, get_qcomm_codecs, get_qcomm_codecs_registry
from torchrec.distributed.types import QuantizedCommCodecs, ShardingPlan, ShardingType
from torchrec.modules.embedding_modules import EmbeddingCollection
from torchrec.modules.mc_embedding_modules import ManagedCollisionEmbeddingCollection

from ..text import check_known, some
from .table import Table

QuantizedComms: TypeAlias = str | tuple[str, str] | QCommsConfig | None
"""A precision for both, (embeddings, gradients), TorchRec's config, or None for full precision."""

Codecs: TypeAlias = Mapping[str, QuantizedCommCodecs]  # name of TorchRec's `CommOp` -> codecs, for TorchRec's sharders

PRECISIONS = {precision.value: precision for precision in CommType}  # by name, explained in `docs/communication.md`

_GROUPED = (CommType.INT8, CommType.MX4)
_GROUP = 32  # numbers that share a scale in "fp8". TorchRec's FP8 without groups cannot represent more than 0.9375

_SEQUENCES = (EmbeddingCollection, ManagedCollisionEmbeddingCollection)
_SUMMED = (ShardingType.ROW_WISE.value, ShardingType.TABLE_ROW_WISE.value, ShardingType.GRID_SHARD.value)
"""Sharding types with a reduce-scatter of embeddings, which sums encoded numbers."""


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
    """Return TorchRec's codecs for its sharders; None for full precision."""
    return None if config is None else get_qcomm_codecs_registry(config, device=device)


def compression(config: QCommsConfig | None) -> dict[str, float]:
    """Return float32 bytes per sent byte of `embeddings` and `gradients` in an all-to-all; 1 for full precision."""
    codecs, ratios = get_qcomm_codecs(config or QCommsConfig()), {}
    for what, codec in (("embeddings", codecs.forward), ("gradients", codecs.backward)):
        context = codec.create_context()
        num = 32 * max(1, getattr(context, "row_dim", 1))
        ratios[what] = float(4 * num / (codec.calc_quantized_size(num, context) * codec.quantized_dtype.itemsize))
    return ratios
