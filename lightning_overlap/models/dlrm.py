"""DLRM (Naumov et al., arXiv 1906.00091). Shapes: B batch size, E embedding dim, F features, P pairs of vectors."""

import math
import warnings
from collections.abc import Callable, Mapping, Sequence
from functools import partial

import torch
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.nn.functional import binary_cross_entropy_with_logits
from torchmetrics import Metric
from torchrec.modules.embedding_configs import EmbeddingBagConfig
from torchrec.modules.embedding_modules import EmbeddingBagCollection
from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ..data import RecBatch

FUSED_OPTIMIZERS: dict[str, type[torch.optim.Optimizer]] = {  # that FBGEMM can fuse on both CPU and CUDA
    "rowwise_adagrad": RowWiseAdagrad,
    "adagrad": torch.optim.Adagrad,
    "sgd": torch.optim.SGD,
}


class BinnedAUC(Metric):  # torchmetrics' binned `BinaryAUROC` reads `torch.all(...)` on the host
    """Area under the ROC curve from a histogram of logits, without a host-device sync per update.

    The bins are uniform in the logit, which resolves rare clicks; a pair within a bin counts half.
    """

    num_bins = 8192  # between the logits -16 and 16; the outermost bins also hold the logits outside
    full_state_update = False
    higher_is_better = True
    num_clicks: Tensor
    num_others: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("num_clicks", "num_others"):
            self.add_state(name, torch.zeros(self.num_bins, dtype=torch.int64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Count a batch: logits `(B,)` and labels `(B,)`, 1 for a click, else 0; any float dtype."""
        bins_B = ((logits.float() + 16) * (self.num_bins / 32)).long().clamp(0, self.num_bins - 1)
        clicks_B = labels.long()
        self.num_clicks.scatter_add_(0, bins_B, clicks_B)
        self.num_others.scatter_add_(0, bins_B, 1 - clicks_B)

    def compute(self) -> Tensor:
        """Return the area, `()` float32; 0.5 until both classes were seen."""
        clicks, others = self.num_clicks.double(), self.num_others.double()
        others_below = others.cumsum(0) - others
        ordered = (clicks * (others_below + others / 2)).sum()
        num_pairs = clicks.sum() * others.sum()
        return torch.where(num_pairs > 0, ordered / num_pairs.clamp(min=1), 0.5).float()


class NormalizedEntropy(Metric):
    """Log loss divided by the entropy of the overall click rate: below 1 is better than predicting the rate.

    Source: He et al., Practical Lessons from Predicting Clicks on Ads at Facebook (ADKDD 2014), section 3.
    """

    full_state_update = False
    higher_is_better = False
    log_loss: Tensor
    num_clicks: Tensor
    num_samples: Tensor

    def __init__(self) -> None:
        super().__init__()
        for name in ("log_loss", "num_clicks", "num_samples"):
            self.add_state(name, torch.zeros((), dtype=torch.float64), dist_reduce_fx="sum")

    def update(self, logits: Tensor, labels: Tensor) -> None:
        """Add a batch; arguments as for `BinnedAUC.update`."""
        self.log_loss += binary_cross_entropy_with_logits(logits.float(), labels.float(), reduction="sum").double()
        self.num_clicks += labels.sum().double()
        self.num_samples += labels.numel()

    def compute(self) -> Tensor:
        """Return the ratio, `()` float32; infinite until both classes were seen."""
        rate = self.num_clicks / self.num_samples
        entropy = -(torch.xlogy(rate, rate) + torch.xlogy(1 - rate, 1 - rate))
        return (self.log_loss / self.num_samples / entropy).float()


class DLRM(LightningModule):
    """Bottom MLP over dense features, one pooled embedding per sparse feature, pairwise dot products, top MLP.

    A plain LightningModule without sharding or lookahead. By default the tables are on `meta`, where they use no memory
    until a strategy shards and initializes them; use `table_device="cpu"` to train without a strategy.

    Args:
        table_sizes: Feature name -> rows of its table, which has the same name.
        num_dense: Dense features per sample.
        embedding_dim: Columns of every table.
        bottom_layers: Widths of the bottom MLP; a layer of `embedding_dim` is added unless it is the last width.
        top_layers: Widths of the top MLP's hidden layers; a layer to one logit is added.
        learning_rate: Learning rate of Adam for dense parameters and for tables without a fused optimizer.
        fused_optimizer: A name from `FUSED_OPTIMIZERS`; None: "rowwise_adagrad". Needs `table_learning_rate`.
        table_learning_rate: Learning rate of the fused optimizer. None: no fused optimizer is applied, which leaves the
            tables to the strategy or the dense optimizer.
        table_device: Device on which the tables are built.
        weighted: Multiply each row by the weight of its id, which every id of a batch then has to have.

    Raises:
        ValueError: There is no table, row, dense feature or column, or `fused_optimizer` is unknown or lacks
            `table_learning_rate`.
    """

    dense_optimizer: type[torch.optim.Adam | torch.optim.SGD] = torch.optim.Adam

    def __init__(
        self,
        table_sizes: Mapping[str, int],
        num_dense: int,
        embedding_dim: int = 16,
        bottom_layers: Sequence[int] = (64, 16),
        top_layers: Sequence[int] = (64, 32),
        learning_rate: float = 1e-3,
        fused_optimizer: str | None = None,
        table_learning_rate: float | None = None,
        table_device: str | torch.device = "meta",
        weighted: bool = False,
    ) -> None:
        super().__init__()
        if not table_sizes or min(table_sizes.values()) < 1 or num_dense < 1 or embedding_dim < 1:
            raise ValueError(
                "DLRM needs at least one table, one row in each table, one dense feature and one embedding column.\n"
                f"  got: table_sizes={dict(table_sizes)}, num_dense={num_dense}, embedding_dim={embedding_dim}\n"
                "  Pass the data module's sizes: DLRM(data.table_sizes, data.num_dense, ...)."
            )
        if fused_optimizer is not None and fused_optimizer not in FUSED_OPTIMIZERS:
            raise ValueError(
                f"fused_optimizer is unknown to this model.\n  got: {fused_optimizer!r}\n"
                f"  Pass {', '.join(FUSED_OPTIMIZERS)}, or None and set the strategy's fused_optimizer."
            )
        if fused_optimizer is not None and table_learning_rate is None:
            raise ValueError(
                f"fused_optimizer needs a table_learning_rate.\n  got: fused_optimizer={fused_optimizer!r}, "
                "table_learning_rate=None\n  Pass table_learning_rate, for example 0.05."
            )
        table_sizes = {str(name): int(num_rows) for name, num_rows in table_sizes.items()}
        bottom_layers, top_layers = [int(width) for width in bottom_layers], [int(width) for width in top_layers]
        self.save_hyperparameters(
            {
                **{"table_sizes": table_sizes, "num_dense": num_dense, "embedding_dim": embedding_dim},
                **{"bottom_layers": bottom_layers, "top_layers": top_layers, "learning_rate": learning_rate},
                **{"fused_optimizer": fused_optimizer, "table_learning_rate": table_learning_rate},
                "weighted": weighted,
            }
        )
        self.features = list(table_sizes)
        self.learning_rate = learning_rate
        self._add_tables(dict.fromkeys(table_sizes, embedding_dim), table_device)
        added = [] if bottom_layers[-1:] == [embedding_dim] else [embedding_dim]
        num_inputs = embedding_dim + math.comb(len(self.features) + 1, 2)
        self.bottom = mlp(num_dense, bottom_layers + added)
        self.top = nn.Sequential(mlp(num_inputs, top_layers), nn.Linear([num_inputs, *top_layers][-1], 1))
        self._pairs: Tensor | None = None  # not a buffer: DDP broadcasts buffers in every forward
        self.val_auc, self.val_ne = BinnedAUC(), NormalizedEntropy()
        self.test_auc, self.test_ne = BinnedAUC(), NormalizedEntropy()

    def _add_tables(self, embedding_dims: Mapping[str, int], table_device: str | torch.device) -> None:
        sizes, rate = self.hparams["table_sizes"], self.hparams["table_learning_rate"]
        tables = []
        for name, dim in embedding_dims.items():
            num_rows, bound = sizes[name], 1 / math.sqrt(sizes[name])  # the default would depend on a shard's rows
            init_fn = partial(nn.init.uniform_, a=-bound, b=bound)
            tables.append(EmbeddingBagConfig(num_rows, dim, name=name, feature_names=[name], init_fn=init_fn))
        self.ebc = EmbeddingBagCollection(tables, self.hparams["weighted"], torch.device(table_device))
        if rate is not None:
            fused = FUSED_OPTIMIZERS[self.hparams["fused_optimizer"] or "rowwise_adagrad"]
            with warnings.catch_warnings():
                # TorchRec's public function warns in favour of the private PyTorch function that it calls.
                warnings.filterwarnings("ignore", message="This API is deprecated", category=DeprecationWarning)
                apply_optimizer_in_backward(fused, self.ebc.parameters(), {"lr": rate})

    def forward(self, batch: RecBatch) -> Tensor:
        """Logits of a click, `(B,)`, float32."""
        # Tables first: a sharded lookup is lazy, and the bottom MLP runs during its all-to-all.
        pooled = self.ebc(batch.sparse)
        dense_BE = self.bottom(batch.dense)
        # By name: TorchRec's own sharding may reorder the keys.
        by_feature = pooled.to_dict()
        vectors_BFE = torch.stack([dense_BE, *(by_feature[name].to(dense_BE.dtype) for name in self.features)], dim=1)
        dots_BFF = torch.bmm(vectors_BFE, vectors_BFE.transpose(1, 2))
        if self._pairs is None or self._pairs.device != dots_BFF.device:  # of the strict lower triangle, flattened
            num_vectors = dots_BFF.shape[1]
            row, column = torch.tril_indices(num_vectors, num_vectors, offset=-1)
            self._pairs = (row * num_vectors + column).to(dots_BFF.device)
        dots_BP = dots_BFF.flatten(1).index_select(1, self._pairs)
        logits_B1: Tensor = self.top(torch.cat([dense_BE, dots_BP], dim=1))
        return logits_B1.squeeze(1).float()

    def training_step(self, batch: RecBatch, batch_idx: int) -> Tensor:
        """Return the mean binary cross entropy of a batch, `()` float32."""
        loss = binary_cross_entropy_with_logits(self(batch), batch.labels)
        self.log("train_loss", loss, batch_size=len(batch))
        return loss

    def validation_step(self, batch: RecBatch, batch_idx: int) -> None:
        """Count the batch into `val_auc`, `val_ne` and `val_loss`."""
        self._evaluate("val", batch)

    def test_step(self, batch: RecBatch, batch_idx: int) -> None:
        """Count the batch into `test_auc`, `test_ne` and `test_loss`."""
        self._evaluate("test", batch)

    def predict_step(self, batch: RecBatch, batch_idx: int) -> Tensor:
        """Click probabilities, `(B,)`."""
        return torch.sigmoid(self(batch))

    def configure_optimizers(self) -> torch.optim.Optimizer:
        """Return an optimizer for the dense layers, and for tables without a fused optimizer."""
        dense = dict(in_backward_optimizer_filter(self.named_parameters()))
        return self.dense_optimizer(dense.values(), lr=self.learning_rate)

    def _evaluate(self, split: str, batch: RecBatch) -> None:
        logits_B = self(batch)
        for name in (f"{split}_auc", f"{split}_ne"):
            metric = getattr(self, name)
            metric.update(logits_B, batch.labels)
            self.log(name, metric, on_step=False, on_epoch=True, batch_size=len(batch))
        loss = binary_cross_entropy_with_logits(logits_B, batch.labels)
        self.log(f"{split}_loss", loss, on_step=False, on_epoch=True, sync_dist=True, batch_size=len(batch))


def mlp(
    num_inputs: int, widths: Sequence[int], after: Callable[[int], Sequence[nn.Module]] = lambda _: [nn.ReLU()]
) -> nn.Sequential:
    """Linear layers of these widths, each followed by the modules `after(width)`, by default a ReLU."""
    layers: list[nn.Module] = []
    for width_in, width_out in zip([num_inputs, *widths], widths, strict=False):
        layers += [nn.Linear(width_in, width_out), *after(width_out)]
    return nn.Sequential(*layers)
