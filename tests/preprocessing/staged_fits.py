"""Fits of modules with staged methods, of TorchRec's own test model too. Functions that ranks run."""

import warnings
from dataclasses import dataclass, field
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import Callback, LightningModule
from torch import Tensor, nn
from torch.distributed.optim import _apply_optimizer_in_backward
from torch.utils.data import DataLoader
from torchrec import EmbeddingBagConfig
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.sharding_plan import construct_module_sharding_plan, table_wise
from torchrec.distributed.test_utils.model_input import ModelInput
from torchrec.distributed.test_utils.test_model import TestModelWithPreproc, TestNegSamplingModule
from torchrec.distributed.types import ShardingEnv, ShardingPlan

from lightning_overlap import OverlapEmbeddingStrategy, Schedule, staged

from ..support.cases import TABLE_WISE, make_batch, make_plan
from ..support.fits import make_trainer
from ..support.reference import Result, collect
from .staged_models import MADE, Hashes

NUM_STEPS = 12
_BATCHES = (range(NUM_STEPS), range(100, 104))  # of training and of validation

_SIZES = {"num_embeddings": 40, "embedding_dim": 8}
TABLES = [EmbeddingBagConfig(name=f"table_{i}", feature_names=[f"feature_{i}"], **_SIZES) for i in range(3)]
WEIGHTED_TABLES = [EmbeddingBagConfig(name="weighted_table_0", feature_names=["weighted_feature_0"], **_SIZES)]


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
        _, pred = self.model(batch)
        loss = pred.square().mean()
        self.losses.append(loss.detach().clone())
        return loss

    def configure_optimizers(self) -> torch.optim.Optimizer:
        return torch.optim.SGD(self.model.dense.parameters(), 0.1)

    def plan(self) -> ShardingPlan:
        """Tables in the order of the ranks, so that TorchRec's columns come in the order of the configs, too."""
        world_size = dist.get_world_size()
        last = world_size - 1
        sizes: Any = {"local_size": world_size, "world_size": world_size, "device_type": "cpu"}
        owners = {"ebc": (0, 0, last), "weighted_ebc": (last,)}
        return ShardingPlan(
            {
                f"model.{name}": construct_module_sharding_plan(
                    getattr(self.model, name),
                    {
                        config.name: table_wise(rank=rank, compute_kernel="fused")
                        for config, rank in zip(getattr(self.model, name).embedding_bag_configs(), ranks, strict=True)
                    },
                    **sizes,
                )
                for name, ranks in owners.items()
            }
        )


class PreprocessesInHook(WithPreproc):
    def __init__(self) -> None:
        super().__init__(is_staged=False)

    def on_after_batch_transfer(self, batch: ModelInput, dataloader_idx: int) -> Any:
        model = self.model
        more = model._postproc_module(batch)
        return model.postproc_nonweighted(more.idlist_features), model.postproc_weighted(more.idscore_features)

    def training_step(self, batch: Any, batch_idx: int) -> Tensor:
        ([ids], [weighted]), model = batch, self.model
        pred = torch.cat([model.ebc(ids).values(), model.weighted_ebc(weighted).values()], dim=1)
        loss = pred.square().mean()
        self.losses.append(loss.detach().clone())
        return loss


def make_input(index: int, rank: int) -> ModelInput:
    with torch.random.fork_rng():
        torch.manual_seed(1009 * rank + index)
        return ModelInput.generate(4, TABLES, WEIGHTED_TABLES, num_float_features=4, pooling_avg=3)


class _Whole(nn.Module):
    def __init__(self, module: WithPreproc) -> None:
        super().__init__()
        self.module = module

    def forward(self, *args: Any) -> Tensor:
        return self.module.training_step(*args)


def with_preproc_by_hand() -> Result:
    module = WithPreproc(is_staged=False)
    weights = {name: value.clone() for name, value in module.model.state_dict().items() if "ebc" in name}
    plan = ShardingPlan({f"module.{name}": of_module for name, of_module in module.plan().plan.items()})
    env = ShardingEnv.from_process_group(dist.group.WORLD)
    dmp = DistributedModelParallel(
        _Whole(module), env=env, device=torch.device("cpu"), plan=plan, init_data_parallel=False
    )
    for name in ("ebc", "weighted_ebc"):
        own = {key.removeprefix(f"{name}."): value for key, value in weights.items() if key.startswith(f"{name}.")}
        getattr(module.model, name).load_state_dict(own)
    optimizer = module.configure_optimizers()
    for index in range(NUM_STEPS):
        dmp(make_input(index, dist.get_rank()), index).backward()
    return collect(module, optimizer, module.losses)  # type: ignore[arg-type]


@dataclass
class Outcome:
    result: Result
    messages: list[str]
    early: int
    seen: list[Tensor] = field(default_factory=list)  # losses of validations
    num_made: int = 0  # inputs made by staged methods
    most_alive: int = 0  # of these, those that were in memory after a step, at most
    num_left: int = 0  # those that still are after the fit
    patched: list[str] = field(default_factory=list)  # attributes of the module that it had not before


def with_preproc(pipeline: str | Schedule, make_module: type[WithPreproc] = WithPreproc) -> Outcome:
    module = make_module()
    return _fit(module, pipeline, module.plan(), [make_input(i, dist.get_rank()) for i in range(NUM_STEPS)])


class _Watches(Callback):
    def __init__(self) -> None:
        self.most_alive = 0
        self.seen: list[Tensor] = []

    def on_train_batch_end(self, *args: Any) -> None:
        self.most_alive = max(self.most_alive, sum(made() is not None for made in MADE))

    def on_validation_batch_end(self, trainer: Any, module: Any, *args: Any) -> None:
        self.seen.append(module.validated.detach().clone())


def evaluating(cls: type[Hashes], pipeline: str | Schedule) -> Outcome:
    """Train with a validation in the middle of the epoch, and validate once more after the fit."""
    module, rank = cls(TABLE_WISE), dist.get_rank()
    plan = make_plan(TABLE_WISE, module, dist.get_world_size())
    trained, validated = ([make_batch(TABLE_WISE, index, rank) for index in which] for which in _BATCHES)
    return _fit(module, pipeline, plan, trained, validated, val_check_interval=5)


def _fit(
    module: Any,
    pipeline: str | Schedule,
    plan: ShardingPlan,
    batches: list[Any],
    validated: list[Any] | None = None,
    **trainer_options: Any,
) -> Outcome:
    early = 0

    def observe(kind: str, stage: Any, batch: int) -> None:
        nonlocal early
        early += kind == "wait" and str(stage) == "embedding_lookup"

    own = {"find_unused_parameters": True} if isinstance(module, WithPreproc) else {}
    strategy = OverlapEmbeddingStrategy(pipeline, sharding=plan, observer=observe, **own)
    watches = _Watches()
    trainer = make_trainer(strategy, callbacks=[watches], num_sanity_val_steps=1, **trainer_options)
    before = {name: set(vars(inside)) for name, inside in module.named_modules()}
    MADE.clear()
    loaders = [DataLoader(data, batch_size=None) for data in (batches, validated) if data is not None]
    with warnings.catch_warnings(record=True) as caught:
        warnings.simplefilter("always")
        trainer.fit(module, *loaders)
        if validated is not None:
            trainer.validate(module, loaders[1], verbose=False)
    words = ("not overlapped", "@staged")
    messages = [str(one.message) for one in caught if any(word in str(one.message) for word in words)]
    patched = [
        f"{name}.{key}"
        for name, inside in module.named_modules()
        for key, value in vars(inside).items()
        if key not in before.get(name, vars(inside)) and "preprocessing" in type(value).__module__
    ]
    return Outcome(
        collect(module, trainer.optimizers[0], module.losses),
        messages,
        early,
        watches.seen,
        len(MADE),
        watches.most_alive,
        sum(made() is not None for made in MADE),
        patched,
    )
