"""SparseNN: one MLP, the over arch, over pooled embeddings and dense features.

Shape suffixes: B batch size per rank, D dense features, E sum of the tables' embedding dims.
"""

from __future__ import annotations

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn

from ..data import RecBatch
from .dlrm import DLRM, mlp


class SparseNN(DLRM):
    """The model of TorchRec's benchmark of train pipelines (`TestSparseNN` with a large over arch).

    Like `DLRM`, but one MLP takes the concatenated embeddings and dense features, without products: the all-to-alls and
    the over arch's first layer grow with the number of tables.

    Args:
        table_sizes: As for `DLRM`.
        num_dense: Dense features per sample.
        embedding_dim: Columns of every table.
        over_layers: Widths of the over arch's hidden layers; a layer to one logit is added.
        learning_rate: Learning rate of SGD for dense parameters and for tables without a fused optimizer.
        fused_optimizer, table_learning_rate, table_device: As for `DLRM`.

    Raises:
        ValueError: As for `DLRM`.

    Source: TorchRec 1.8, `torchrec.distributed.test_utils.test_model`.
    """

    dense_optimizer = torch.optim.SGD

    def __init__(
        self,
        table_sizes: Mapping[str, int],
        num_dense: int,
        embedding_dim: int = 128,
        over_layers: Sequence[int] = (1000, 1000, 1000, 1000, 1000),
        learning_rate: float = 0.1,
        fused_optimizer: str | None = None,
        table_learning_rate: float | None = None,
        table_device: str | torch.device = "meta",
    ) -> None:
        super().__init__(
            table_sizes,
            num_dense,
            embedding_dim,
            bottom_layers=(),
            top_layers=(),
            learning_rate=learning_rate,
            fused_optimizer=fused_optimizer,
            table_learning_rate=table_learning_rate,
            table_device=table_device,
        )
        del self.hparams["bottom_layers"], self.hparams["top_layers"]
        self.save_hyperparameters({"over_layers": [int(width) for width in over_layers]})
        num_inputs = num_dense + embedding_dim * len(self.features)
        self.top = nn.Sequential(mlp(num_inputs, list(over_layers)), nn.Linear([num_inputs, *over_layers][-1], 1))
        del self.bottom

    def forward(self, batch: RecBatch) -> Tensor:
        """Logits of a click, `(B,)`, float32."""
        pooled = self.ebc(batch.sparse).to_dict()
        rows_BE = torch.cat([pooled[name] for name in self.features], dim=1)
        logits_B1: Tensor = self.top(torch.cat([batch.dense.to(rows_BE.dtype), rows_BE], dim=1))
        return logits_B1.squeeze(1).float()
