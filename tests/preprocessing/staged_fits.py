"""Fits of modules with staged methods, of TorchRec's own test model too. Functions that ranks run."""

from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor
from torch.distributed.optim import _apply_optimizer_in_backward
from torchrec import EmbeddingBagConfig
from torchrec.distributed.sharding_plan import table_wise
from torchrec.distributed.test_utils.model_input import ModelInput
from torchrec.distributed.test_utils.test_model import TestModelWithPreproc, TestNegSamplingModule
from torchrec.distributed.types import ShardingPlan

from lightning_overlap import Schedule, staged

from ..sparse import caller_fits
from ..sparse.caller_fits import Outcome
from ..sparse.variants import Variant
from ..support.cases import TABLE_WISE, Batches, make_plan
from ..support.modules import plan_by_place
from ..support.reference import Result
from .staged_models import MADE, Hashes

NUM_STEPS = 12

_SIZES = {"num_embeddings": 40, "embedding_dim": 8}
TABLES = [EmbeddingBagConfig(name=f"t{i}", feature_names=[f"feature_{i}"], **_SIZES) for i in range(3)]
WEIGHTED_TABLES = [EmbeddingBagConfig(name="t0", feature_names=["weighted_feature_0"], **_SIZES)]


class WithPreproc(LightningModule):
    """TorchRec's model for `PipelinedPostproc`: a module changes a batch, two others make inputs from the result."""

    def __init__(self, *, is_staged: bool = True) -> None:
        super().__init__()
        self.losses: list[Tensor] = []
        extra = make_input(1000, 0)
        self.model = TestModelWithPreproc(
            TABLES, WEIGHTED_TABLES, torch.device("cpu"), TestNegSamplingModule(extra), num_float_features=4
        )
        generator = torch.Generator().manual_seed(5)
        with torch.no_grad():
            for parameter in self.parameters():
                parameter.copy_(torch.randn(parameter.shape, generator=generator))
        for collection in (self.model.ebc, self.model.weighted_ebc):
            _apply_optimizer_in_backward(torch.optim.SGD, collection.parameters(), {"lr": 1.0})
        if is_staged:
            for module in (self.model._postproc_module, self.model.postproc_nonweighted, self.model.postproc_weighted):
                staged(module)

    def training_step(self, batch: ModelInput, batch_idx: int) -> Tensor:
        return self.loss(self.model(batch)[1])

    def loss(self, pred: Tensor) -> Tensor:
        loss = pred.square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.dense.parameters(), 0.1)

    def plan(self) -> ShardingPlan:
        """Tables in the order of the ranks, so that TorchRec's columns come in the order of the configs, too."""
        last = dist.get_world_size() - 1
        return plan_by_place(self, lambda _: lambda table: table_wise(rank=last * (table == 2), compute_kernel="fused"))


class PreprocessesInHook(WithPreproc):
    def __init__(self) -> None:
        super().__init__(is_staged=False)

    def on_after_batch_transfer(self, batch: ModelInput, dataloader_idx: int) -> Any:
        model = self.model
        more = model._postproc_module(batch)
        return model.postproc_nonweighted(more.idlist_features), model.postproc_weighted(more.idscore_features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ([ids], [weighted]), model = batch, self.model
        return self.loss(torch.cat([model.ebc(ids).values(), model.weighted_ebc(weighted).values()], dim=1))


def make_input(index: int, rank: int) -> ModelInput:
    with torch.random.fork_rng():
        torch.manual_seed(1009 * rank + index)
        return ModelInput.generate(4, TABLES, WEIGHTED_TABLES, num_float_features=4, pooling_avg=3)


class Inputs(Batches):
    make = staticmethod(lambda case, index, rank: make_input(index, rank))


def with_preproc(pipeline: str | Schedule, make_module: type[WithPreproc] = WithPreproc) -> Outcome:
    module = make_module()
    options = {"find_unused_parameters": True}
    return caller_fits.fit(module, module.plan(), Inputs(TABLE_WISE, NUM_STEPS), pipeline, options)


def with_preproc_by_hand() -> Result:
    module = WithPreproc(is_staged=False)
    return caller_fits.loop(module, module.plan(), lambda index: make_input(index, dist.get_rank()), NUM_STEPS)


class _Keeps(Callback):
    """Keeps what is validated."""

    def __init__(self) -> None:
        self.seen: list[Tensor] = []

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append(module.validated.detach().clone())


def evaluating(pipeline: str | Schedule) -> tuple[Outcome, list[Tensor], int, int]:
    """Train and validate; return what that saw, how many inputs staged methods made, and how many of them stay."""
    module, keeps, data = Hashes(TABLE_WISE), _Keeps(), Variant(TABLE_WISE, "dataclass", NUM_STEPS)
    plan = make_plan(TABLE_WISE, module, dist.get_world_size())
    MADE.clear()
    kwargs: Any = {"callbacks": [keeps], "num_sanity_val_steps": 1, "val_check_interval": 5}
    outcome = caller_fits.fit(module, plan, data, pipeline, **kwargs)
    return outcome, keeps.seen, len(MADE), sum(made() is not None for made in MADE)
