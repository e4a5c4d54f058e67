"""The arms of the benchmark; each trains the same module, batches, sharding plan and ranks, from the same seed."""

import os
import threading
import time
from collections.abc import Callable, Mapping
from contextlib import nullcontext
from dataclasses import dataclass, replace
from pathlib import Path
from typing import Any

import torch
import torch.distributed as dist
from lightning.pytorch import LightningDataModule, LightningModule, seed_everything
from lightning.pytorch.callbacks import LambdaCallback
from lightning.pytorch.strategies import DDPStrategy
from torch import Tensor, nn
from torch.distributed.constants import default_pg_timeout
from torch.futures import Future
from torch.utils.data import DataLoader
from torchrec.distributed.model_parallel import DistributedModelParallel
from torchrec.distributed.train_pipeline import train_pipelines
from torchrec.distributed.types import ShardingEnv
from typing_extensions import override

from ..compat.torch import children_of
from ..distributed import Issue, WrappedWork, groups, wrap_collectives
from ..plugin import OverlapEmbeddingStrategy
from ..tables import codecs_of, find_tables, kernel_arguments, make_plan, seed_shards, training_sharders
from . import build, config_checks
from .config_checks import Config
from .step_timers import loss_of


@dataclass(frozen=True, slots=True)
class Job:
    """What every arm trains: each batch once."""

    config: Config
    data: LightningDataModule
    batches: DataLoader[Any]
    device: torch.device
    after_step: Callable[[Tensor, OverlapEmbeddingStrategy | None], None]  # gets each loss, and our strategy if used
    log_dir: Path
    receives_first: bool = False  # whether DistributedModelParallel uses this package's process group of the tables

    def make_model(self) -> LightningModule:
        """Return the model, initialized from the seed."""
        seed_everything(self.config["seed"], verbose=False)
        model = build.build_model(self.config, self.data)
        return slowed_down(model, self.config["latency"]) if self.config["latency"] else model

    def make_dmp(self, model: nn.Module, unsharded: LightningModule) -> DistributedModelParallel:
        """Return the model in DistributedModelParallel, sharded by our strategy's plan for `unsharded`."""
        strategy = build.build_strategy(self.config, config_checks.modes(self.config)[-1], unsharded)
        num_local = int(os.environ.get("LOCAL_WORLD_SIZE", dist.get_world_size()))
        group = dist.group.WORLD
        assert group is not None
        if self.receives_first:
            group = groups.join(default_pg_timeout, multi_node=num_local < dist.get_world_size()).tables
        plan = make_plan(
            model,
            sharding=strategy.sharding,
            group=group,
            device=self.device,
            local_world_size=num_local,
            quantized_comms=strategy.quantized_comms,
        )
        for table in find_tables(model):
            if (optimizer := table.fused_optimizer) is not None:  # with its class's defaults, as in our arms
                table.fuse(optimizer[0], kernel_arguments(*optimizer))
        sharders = training_sharders(codecs_of(strategy.quantized_comms, self.device))
        torch.manual_seed(self.config["seed"])  # sharding initializes the tables, as in our arms
        seed_shards(group.rank())
        env = ShardingEnv.from_process_group(group)
        return DistributedModelParallel(model, env, device=self.device, plan=plan, sharders=sharders)


def train(name: str, job: Job) -> None:
    """Train all batches of a job on this rank with the named arm; see `config_checks.arms`."""
    plain, precision, replicated = config_checks.split_arm(name)
    config = dict(job.config)
    if precision is not None:
        config["comms"] = {"forward": precision, "backward": precision}
    if replicated:  # the tables with fewer rows than a batch
        tables, sharding = find_tables(job.make_model()), job.config["sharding"]
        small = [table.name for table in tables if table.parameter.shape[0] < getattr(job.data, "batch_size", 0)]
        kinds = {table.name: sharding.get("type") for table in tables if sharding.get("type")}
        others = {name: kind for name, kind in (kinds | (sharding.get("tables") or {})).items() if name not in small}
        config["sharding"] = {"type": None, "tables": others}
        config["strategy"] = {**config["strategy"], "replicate_tables": small}
    schedule, stream = config_checks.our_arms(config).get(plain, (None, config["stream"]["name"]))
    config["stream"] = {"name": stream}
    job = replace(job, config=config)
    latency_s = (config["latency"] or {}).get("all_to_all_ms", 0.0) / 1e3  # the least that an all-to-all takes

    def late(name: str, call: dict[str, Any], issue: Issue) -> dist.Work | None:
        work = issue()
        return None if work is None else _Late(work, latency_s)

    with wrap_collectives(late, ["all_to_all_single"]) if latency_s else nullcontext():
        if schedule is not None:
            model = job.make_model()
            _fit(job, model, build.build_strategy(config, config_checks.with_switches(config, schedule), model))
        elif plain == "lightning_dmp":
            _fit(job, job.make_model(), _DMPStrategy(job))
        else:
            job = replace(job, receives_first=plain.endswith("/receives_first"))
            _train_by_hand(job, *config_checks.BY_HAND[plain])


class _DMPStrategy(DDPStrategy):
    def __init__(self, job: Job) -> None:
        super().__init__()
        self._job = job

    @override
    def model_to_device(self) -> None:
        pass  # tables on `meta` cannot move; DistributedModelParallel moves the rest

    @override
    def configure_ddp(self) -> None:
        module = self.lightning_module
        assert module is not None
        self.model = self._job.make_dmp(module, module)


def _fit(job: Job, model: LightningModule, strategy: Any) -> None:
    ours = strategy if isinstance(strategy, OverlapEmbeddingStrategy) else None
    callback = LambdaCallback(
        setup=lambda *_, **__: torch.manual_seed(job.config["seed"]),  # sharding initializes the tables
        on_train_batch_end=lambda trainer, module, outputs, *_: job.after_step(loss_of(trainer, outputs), ours),
    )
    trainer = build.build_trainer(job.config, strategy, [callback], str(job.log_dir))
    trainer.fit(model, train_dataloaders=job.batches)


class Network(nn.Module):
    """A module for TorchRec's pipelines. They trace `forward`, so the sharded collection is called there.

    `training_step` is not traced; it must call the module's only collection once, with `batch.sparse`.
    """

    def __init__(self, module: LightningModule) -> None:
        super().__init__()
        paths = sorted({table.module for table in find_tables(module)})
        if len(paths) != 1 or "." in paths[0]:
            raise ValueError(f"TorchRec's arms need one collection that is an attribute of the module, got {paths}.")
        self.module, self.path = module, paths[0]
        self.rest = _Rest(module, paths[0])

    def forward(self, batch: Any) -> tuple[Tensor, Tensor]:
        """Return the loss, `()`, twice: with its graph, and detached."""
        loss = self.rest(getattr(self.module, self.path)(batch.sparse), batch)
        return loss, loss.detach()


class _Rest(nn.Module):
    def __init__(self, module: LightningModule, path: str) -> None:
        super().__init__()
        self._held = (module,)  # not a child: the tracer would enter a module that contains tables
        self._path = path

    def forward(self, embeddings: Any, batch: Any) -> Any:
        (module,) = self._held
        children = children_of(module)
        collection, children[self._path] = children[self._path], lambda _: embeddings
        try:
            return module.training_step(batch, 0)
        finally:
            children[self._path] = collection


def _train_by_hand(job: Job, pipeline_class: str, options: Mapping[str, Any]) -> None:
    """Train with one of TorchRec's pipelines, or without a pipeline if its class is ""."""
    if (num := config_checks.per_step(job.config)) > 1:
        raise ValueError(f"a hand-written loop does not accumulate gradients, got accumulate_grad_batches={num}.")
    model = job.make_model()
    dmp = job.make_dmp(Network(model), model).train()
    made = build.optimizers_in(model.configure_optimizers())
    if len(made) != 1:
        raise ValueError(f"a hand-written loop needs one dense optimizer, configure_optimizers made {len(made)}.")
    [optimizer] = made
    if pipeline_class:
        pipeline = getattr(train_pipelines, pipeline_class)(dmp, optimizer, job.device, **options)
        batches = iter(job.batches)
        for _ in range(len(job.batches)):
            job.after_step(pipeline.progress(batches), None)
        return
    for batch in job.batches:
        staged = batch.to(job.device, non_blocking=True)
        optimizer.zero_grad()
        loss, output = dmp(staged)
        loss.backward()
        optimizer.step()
        job.after_step(output, None)


class _Late(WrappedWork):
    def __init__(self, work: dist.Work, latency_s: float) -> None:
        super().__init__(work)
        self._over_s = time.perf_counter() + latency_s

    @override
    def wait(self, timeout: Any = None) -> bool:
        time.sleep(self.left_s)
        return super().wait(timeout)

    @override
    def is_completed(self) -> bool:
        return not self.left_s and super().is_completed()

    @override
    def get_future(self) -> Any:
        late: Future[None] = Future()

        def tell(_: Any) -> None:
            timer = threading.Timer(self.left_s, late.set_result, (None,))
            timer.daemon = True
            timer.start()

        super().get_future().add_done_callback(tell)
        return late

    @property
    def left_s(self) -> float:
        return max(0.0, self._over_s - time.perf_counter())


def slowed_down(model: LightningModule, latency: Mapping[str, float]) -> LightningModule:
    """Add sleeps of `forward_ms`, `backward_ms` and `step_ms` to a module's dense forward, backward and step."""
    forward_s, backward_s, step_s = (latency.get(f"{part}_ms", 0.0) / 1e3 for part in ("forward", "backward", "step"))
    # Half of the backward's time goes to gradients of inputs, half to the weight gradients of the last linear layers.
    linear = {name: part for name, part in model.named_modules() if type(part) is nn.Linear}
    last = list(linear)[-1].rpartition(".")[0] if linear else ""
    weights = [part.weight for name, part in linear.items() if name.rpartition(".")[0] == last]
    for weight in weights:
        weight.register_hook(lambda _: time.sleep(backward_s / 2 / len(weights)))

    class Slow(type(model)):  # type: ignore[misc]
        def training_step(self, *args: Any, **kwargs: Any) -> Any:
            loss = super().training_step(*args, **kwargs)
            time.sleep(forward_s)
            loss.register_hook(lambda _: time.sleep(backward_s / 2 if weights else backward_s))
            return loss

        def configure_optimizers(self) -> Any:
            made = super().configure_optimizers()
            for optimizer in build.optimizers_in(made):
                optimizer.register_step_post_hook(lambda *_: time.sleep(step_s))
            return made

    model.__class__ = Slow
    return model
