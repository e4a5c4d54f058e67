"""Kernels of FBGEMM's, made and used without this package."""

from collections.abc import Sequence
from typing import Any

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from fbgemm_gpu.split_table_batched_embeddings_ops_common import EmbeddingLocation
from fbgemm_gpu.split_table_batched_embeddings_ops_training import (
    ComputeDevice,
    DenseTableBatchedEmbeddingBagsCodegen,
    SplitTableBatchedEmbeddingBagsCodegen,
)
from torch import Tensor

DIM = 4
ROWS = (5, 3)  # by table


def fused(
    optimizer: EmbOptimType = EmbOptimType.EXACT_SGD,
    places: Sequence[EmbeddingLocation] = (EmbeddingLocation.HOST,) * len(ROWS),
    **options: Any,
) -> SplitTableBatchedEmbeddingBagsCodegen:
    """Return a fused kernel with tables of 0, 1, 2, ..."""
    on = ComputeDevice.CPU if places[0] is EmbeddingLocation.HOST else ComputeDevice.CUDA
    specs = [(num_rows, DIM, place, on) for num_rows, place in zip(ROWS, places, strict=True)]
    kernel = SplitTableBatchedEmbeddingBagsCodegen(specs, optimizer=optimizer, **{"learning_rate": 0.5, **options})
    fill(kernel.split_embedding_weights())
    return kernel


def dense(**options: Any) -> DenseTableBatchedEmbeddingBagsCodegen:
    """Return a dense kernel with tables of 0, 1, 2, ..."""
    kernel = DenseTableBatchedEmbeddingBagsCodegen([(num_rows, DIM) for num_rows in ROWS], use_cpu=True, **options)
    fill(kernel.split_embedding_weights())
    return kernel


def fill(tables: Sequence[Tensor]) -> None:
    for table in tables:
        table.data.copy_(torch.arange(table.numel()).view_as(table))


def look_up(kernel: Any, *ids: int) -> Tensor:
    """Return the embeddings `(1, 2 * DIM)` of one sample: all ids but the last are of the first table."""
    device = next(kernel.buffers()).device
    indices = torch.tensor(ids, device=device)
    embeddings: Tensor = kernel(indices, torch.tensor([0, len(ids) - 1, len(ids)], device=device))
    return embeddings


def train(kernel: Any, *ids: int, gradient: float = 1.0) -> None:
    (look_up(kernel, *ids) * gradient).sum().backward()
