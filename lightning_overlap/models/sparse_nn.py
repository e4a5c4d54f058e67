"""SparseNN. Shapes: B batch size per rank, D dense features, E sum of the tables' embedding dims."""

from collections.abc import Mapping, Sequence

import torch
from torch import Tensor, nn
from torchrec.modules.activation import SwishLayerNorm

from ..data import RecBatch, check_tables
from .dlrm import DLRM, mlp


class SparseNN(DLRM):
    """The model of TorchRec's benchmark of train pipelines (`TestSparseNN` with a large over arch).

    Like `DLRM`, but one MLP, the over arch, takes the concatenated embeddings and dense features, without products.
    Source: TorchRec 1.8, `torchrec.distributed.test_utils.test_model`.

    Args:
        table_sizes: As for `DLRM`.
        num_dense: Dense features per sample.
        embedding_dim: Columns of every table that `embedding_dim_of` does not name.
        over_layers: Widths of the over arch's hidden layers; a layer to one logit is added.
        learning_rate: Learning rate of SGD for dense parameters and for tables without a fused optimizer.
        fused_optimizer, table_learning_rate, table_device, weighted: As for `DLRM`.
        embedding_dim_of: Columns of single tables, by name.
        dense_layers: Widths of linear layers, without activations, that the dense features pass first.
        swish_layer_norm: Follow each hidden layer by `x * sigmoid(LayerNorm(x))`, and not by a ReLU.

    Raises:
        ValueError: As for `DLRM`; or `embedding_dim_of` names an unknown table, or gives it no column.
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
        embedding_dim_of: Mapping[str, int] | None = None,
        dense_layers: Sequence[int] = (),
        swish_layer_norm: bool = False,
        weighted: bool = False,
    ) -> None:
        of_tables = fused_optimizer, table_learning_rate, table_device, weighted
        super().__init__(table_sizes, num_dense, embedding_dim, (), (), learning_rate, *of_tables)
        del self.hparams["bottom_layers"], self.hparams["top_layers"]
        dim_of = {str(name): int(dim) for name, dim in (embedding_dim_of or {}).items()}
        dense_layers, over_layers = [int(width) for width in dense_layers], [int(width) for width in over_layers]
        own = {"embedding_dim_of": dim_of, "dense_layers": dense_layers, "over_layers": over_layers}
        self.save_hyperparameters({**own, "swish_layer_norm": swish_layer_norm})
        check_tables("embedding_dim_of", dim_of, self.features)
        dims = dict.fromkeys(self.features, embedding_dim) | dim_of
        if dim_of:
            self._add_tables(dims, table_device)
        self.bottom = mlp(num_dense, dense_layers, after=lambda _: [])
        num_inputs = [num_dense, *dense_layers][-1] + sum(dims.values())
        swish = {"after": lambda width: [SwishLayerNorm([width])]} if swish_layer_norm else {}
        hidden = mlp(num_inputs, over_layers, **swish)
        self.top = nn.Sequential(hidden, nn.Linear([num_inputs, *over_layers][-1], 1))

    def forward(self, batch: RecBatch) -> Tensor:
        """Logits of a click, `(B,)`, float32."""
        # Tables first: a sharded lookup is lazy, and the dense layers run during its all-to-all.
        lookup = self.ebc(batch.sparse)
        dense_BD = self.bottom(batch.dense)
        pooled = lookup.to_dict()
        rows_BE = torch.cat([pooled[name] for name in self.features], dim=1)
        logits_B1: Tensor = self.top(torch.cat([dense_BD.to(rows_BE.dtype), rows_BE], dim=1))
        return logits_B1.squeeze(1).float()
