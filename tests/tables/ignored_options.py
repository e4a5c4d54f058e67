"""Options of the strategy beside collections that their user has wrapped. Ranks run `said`."""

import logging
import warnings
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagCollection, EmbeddingBagConfig
from torchrec.distributed import DistributedModelParallel
from torchrec.distributed.types import ShardingPlan
from torchrec.modules.fused_embedding_modules import FusedEmbeddingBagCollection
from torchrec.optim.optimizers import in_backward_optimizer_filter

from lightning_overlap import OverlapEmbeddingStrategy
from lightning_overlap.plugin.first_words import LOGGER

from ..support import modules
from ..support.fits import make_trainer

SGD = (torch.optim.SGD, {"lr": 0.5})


class Module(LightningModule):
    """Collections "a" and "b", each "plain", "wrapped", "applied" (SGD at 0.25), "fused", "frozen", or left out."""

    def __init__(self, **kinds: str) -> None:
        super().__init__()
        self.kinds = kinds
        for name, kind in kinds.items():
            feature = {"a": "f0", "b": "f1"}[name]
            config = EmbeddingBagConfig(
                name=f"{name}0", embedding_dim=8, num_embeddings=modules.NUM_ROWS, feature_names=[feature]
            )
            collection: Any = EmbeddingBagCollection(tables=[config])
            if kind == "fused":
                collection = FusedEmbeddingBagCollection([config], torch.optim.SGD, {"lr": 0.75})
            if kind == "applied":
                _apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 0.25})
            collection.requires_grad_(kind != "frozen")
            self.add_module(name, collection)
        self.scale = nn.Parameter(torch.ones(()))

    def configure_model(self) -> None:
        for name, kind in self.kinds.items():
            if kind == "wrapped" and not isinstance(getattr(self, name), DistributedModelParallel):
                collection = getattr(self, name)
                plan = ShardingPlan({"": modules.plan_of(collection, {f"{name}0": modules.rows(0)})})
                setattr(self, name, DistributedModelParallel(collection, device=torch.device("cpu"), plan=plan))

    def training_step(self, ids: Any, batch_idx: int) -> Tensor:
        sums = [torch.clone(getattr(self, name)(ids).values()).sum() for name in self.kinds]
        return self.scale * (torch.stack(sums).sum() if sums else 1.0)

    def configure_optimizers(self) -> torch.optim.Optimizer:
        dense = [one for _, one in in_backward_optimizer_filter(self.named_parameters()) if one.requires_grad]
        return torch.optim.SGD(dense, 0.1)


class _Notes(logging.Handler):
    def __init__(self, seen: list[str]) -> None:
        super().__init__()
        self.seen = seen

    def emit(self, record: logging.LogRecord) -> None:
        self.seen.append(record.getMessage())


def said(cases: dict[str, tuple[dict[str, str], dict[str, Any]]]) -> dict[str, str]:
    """Return the error of each case's fit, or what its log and its warnings say."""
    found = {}
    for case, (kinds, options) in cases.items():
        seen: list[str] = []
        loader = DataLoader([modules.plain_ids(torch.Generator().manual_seed(dist.get_rank()))], batch_size=None)
        trainer = make_trainer(OverlapEmbeddingStrategy("base", **options))
        logger, notes = logging.getLogger(LOGGER), _Notes(seen)
        logger.addHandler(notes)
        logger.setLevel(logging.INFO)
        try:
            with warnings.catch_warnings(record=True, action="always") as caught:
                trainer.fit(Module(**kinds), loader)
            seen += [str(one.message) for one in caught]
        except (ValueError, TypeError) as err:
            seen = [f"{type(err).__name__}: {err}"]
        finally:
            logger.removeHandler(notes)
            logger.setLevel(logging.NOTSET)
        found[case] = "\n".join(seen)
    return found
