"""Run and watch one fit of a user's module under the strategy."""

import contextlib
import copy
import hashlib
import logging
import os
import random
import signal
import warnings
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any
from unittest import mock

import numpy as np
import torch
import torch.distributed as dist
from lightning.fabric.plugins.environments.torchelastic import TorchElasticEnvironment
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer, seed_everything
from lightning.pytorch.strategies import SingleDeviceStrategy
from torch import Tensor
from typing_extensions import override

from ..checkpoint import local_parts
from ..compat.fbgemm import count_on_device
from ..plugin import OverlapEmbeddingStrategy
from ..profiling import HostSync, record_host_syncs
from ..schedules import Stage, WeightOwner
from ..sparse import Arguments, CalledModule, EarlyEmbeddings, SparsePipeline, Watcher
from ..tables import kernel_parameters, local_part, owners_of, sharded_modules, table_modules, tbes
from .checked_streams import CheckedStreams, Operators

ModuleFactory = Callable[[], LightningModule]
Data = LightningDataModule | Sequence[Any]

NUM_WATCHED_STEPS = 3  # steps, in the middle of a fit, that are watched for host syncs


@dataclass(frozen=True, slots=True)
class Setting:
    """The settings shared by all fits of a check."""

    make_module: ModuleFactory  # makes the untrained module; called once per fit
    batches: Sequence[Any]  # this rank's, from the loader
    datamodule: LightningDataModule | None = None  # for its transfer hooks
    accelerator: str = "cpu"  # of `Trainer`
    seed: int = 0  # set before each fit
    trainer_options: Mapping[str, Any] = field(default_factory=dict)  # more arguments of `Trainer`
    strategy_options: Mapping[str, Any] = field(default_factory=dict)  # of the strategy, without `pipeline`
    also: Sequence[Callback] = ()  # callbacks of every fit, the unsharded one too


class Watched(Callback):
    """Records what one rank does in a fit; without `every_state`, digests the state only after the last step."""

    reads_tables = False  # in its hook after the backward
    validates = False  # whether the fit also validates, if the module does
    also: Sequence[Callback] = ()  # more callbacks of the fit

    def __init__(self, *, every_state: bool = True, syncs: bool = False) -> None:
        self._every_state, self._records_syncs = every_state, syncs
        self.noted = False  # the update of the present batch, before `on_after_backward`
        self.open = contextlib.ExitStack()  # contexts that end with the training
        self.batch = -1  # the present one
        self.batches: list[int] = []  # the trained ones, in order
        self.losses: list[Tensor] = []
        self.states: dict[int, dict[str, str]] = {}  # step -> weight or optimizer state -> digest of its bits
        self.updates: list[int] = []  # the batches whose backward is over, in order
        self.seen: dict[int, tuple[int, ...]] = {}  # batch -> `updates` when its lookup was issued
        self.early: dict[int, dict[str, bool]] = {}  # batch -> module -> whether all its calls were served early
        self.split: tuple[str, ...] = ()  # modules whose weight gradients came after the backward
        self.plain_reasons: dict[str, str] = {}  # module -> why it ran in its own forward
        self.fused: frozenset[str] = frozenset()  # modules with tables that the fused backward writes
        self.syncs: list[HostSync] = []
        self.collectives: list[tuple[int, str, str]] = []  # (batch, operator, group) of the main thread's, in order
        self._first_tables: dict[str, str] = {}  # digests before the first step
        self.left: list[str] = []  # objects that were not restored at the end
        self.changed_tables: dict[str, bool] = {}  # weight of a table -> whether training has changed this rank's part
        self.without_gradient: dict[str, str] = {}  # module with trained tables that no gradient has reached -> why
        self.automatic = True
        self.most_in_flight = 0  # the largest number of batches in flight at once
        self.depth = 0  # of the fit's schedules

    def before_call(self, step: str, forward: CalledModule, arguments: Arguments) -> None:
        """Come before the lookup of a sharded module that the user's method `step` calls."""

    def after_call(self, step: str, forward: CalledModule, answer: Any) -> None:
        """Note whether a sharded module's call in the user's method `step` gets the embeddings of an early lookup."""
        if step == "training_step":
            modules = self.early.setdefault(self.batch, {})
            modules[forward.name] = modules.get(forward.name, True) and isinstance(answer, EarlyEmbeddings)
            if forward.unpipelined_reason is not None:
                self.plain_reasons[forward.name] = forward.unpipelined_reason

    def ran(self, func: Any, args: Iterable[Any], result: Any) -> None:
        """Note a collective of this thread, where on a CPU the backward runs too."""
        if func.namespace == "c10d":
            groups = (dist.ProcessGroup.unbox(arg) for arg in args if isinstance(arg, torch.ScriptObject))
            # Names are equal on all ranks; several groups may share a description.
            group = next((f"{group.group_desc} {group.group_name}" for group in groups), "")
            self.collectives.append((self.batch, func.overloadpacket.__name__, group))

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        modules = sharded_modules(pl_module).items()
        self.fused = frozenset(name for name, module in modules if WeightOwner.FUSED_BACKWARD in owners_of(module))
        if self._every_state:
            self._first_tables = _table_digests(pl_module)

    @override
    def on_train_batch_start(self, trainer: Trainer, pl_module: LightningModule, batch: Any, batch_idx: int) -> None:
        first = max(1, int(trainer.num_training_batches) // 2)
        if self._records_syncs and batch_idx == first + NUM_WATCHED_STEPS:
            self.open.close()
        if self._records_syncs and batch_idx == first:
            self.syncs = self.open.enter_context(record_host_syncs())
        self.batch = batch_idx
        self.batches.append(batch_idx)

    @override
    def on_after_backward(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if not self.noted:
            self.updates.append(self.batch)
        self.noted = False

    @override
    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        loss = outputs.get("loss") if isinstance(outputs, Mapping) else outputs
        self.losses.append(loss.detach().clone() if isinstance(loss, Tensor) else torch.zeros(()))
        if self._every_state or batch_idx == trainer.num_training_batches - 1:
            with trainer.strategy.saving():  # kernels count lookups: exclude early lookups
                self.states[batch_idx] = _digests(pl_module, trainer.optimizers)

    @override
    def on_train_end(self, trainer: Any, pl_module: LightningModule) -> None:
        self.open.close()
        self.split = trainer.strategy.split_modules
        if self._every_state:
            with trainer.strategy.saving():
                last = _table_digests(pl_module)
            self.changed_tables = {name: digest != self._first_tables[name] for name, digest in last.items()}
        self.without_gradient = trainer.strategy.without_gradient()


def fit(setting: Setting, pipeline: Any, watched: Watched, *, races: bool = False) -> None:
    """Train a new module and watch; with `races` (one rank only) simulated streams raise a RaceError for a race."""
    module = make_seeded(setting)
    strategy = _WatchedStrategy(watched, races, pipeline=pipeline, **setting.strategy_options)
    watched.depth = strategy.depth
    first = [] if strategy.checked is None else [_FollowsMemory(strategy.checked, watched.open)]
    users = setting.trainer_options.get("callbacks", ())
    trainer = make_trainer(setting, strategy, [*first, *users, watched, *watched.also, *setting.also])
    before = _patchable(trainer, module)
    with warnings.catch_warnings(), Operators(watched.ran), watched.open:
        for text in (
            "The lookup of .* is not overlapped",  # in the report
            "no gradient reaches tables of",  # in the report
            "You defined a `validation_step` but have no",
            "Please use DTensor instead",  # torch's warning about TorchRec
        ):
            warnings.filterwarnings("ignore", message=text)
        has_validation = type(module).validation_step is not LightningModule.validation_step
        _fit_on(trainer, module, setting, validates=watched.validates and has_validation)
    watched.left = [f"{name}: {now}" for name, now in _patchable(trainer, module).items() if now != before.get(name)]
    if strategy.num_in_flight:
        watched.left.append(f"{strategy.num_in_flight} batches in flight")
    watched.automatic = module.automatic_optimization


def make_seeded(setting: Setting) -> LightningModule:
    """Return a new module, made with the same seed on all ranks; then set a different seed on each rank."""
    seed_everything(setting.seed, verbose=False)
    module = setting.make_module()
    seed_everything(setting.seed + dist.get_rank(), verbose=False)
    return module


def fit_unsharded(setting: Setting, module: LightningModule, watch: Callback) -> None:
    """Train an unsharded module on this rank alone, without the user's callbacks: some need the strategy."""
    seed_everything(setting.seed + dist.get_rank(), verbose=False)
    device = torch.device("cpu") if setting.accelerator == "cpu" else torch.device("cuda", torch.cuda.current_device())
    options = {**_QUIET, **setting.trainer_options, "limit_val_batches": 0, "callbacks": [watch, *setting.also]}
    trainer = Trainer(accelerator=setting.accelerator, devices=1, strategy=SingleDeviceStrategy(device), **options)
    with warnings.catch_warnings(action="ignore"):  # the fits in the mode show the warnings
        _fit_on(trainer, module, setting)


def _fit_on(trainer: Trainer, module: LightningModule, setting: Setting, *, validates: bool = False) -> None:
    loader = _Replay(setting.batches)
    if setting.datamodule is None:
        trainer.fit(module, loader, _Replay(setting.batches[:2]) if validates else None)
        return
    with mock.patch.object(setting.datamodule, "train_dataloader", return_value=loader):
        trainer.fit(module, datamodule=setting.datamodule)


_QUIET: dict[str, Any] = {
    **{"max_epochs": 1, "limit_val_batches": 0, "num_sanity_val_steps": 0, "use_distributed_sampler": False},
    **{"logger": False, "enable_checkpointing": False, "enable_progress_bar": False, "enable_model_summary": False},
}


def make_trainer(setting: Setting, strategy: Any, callbacks: Sequence[Callback] = ()) -> Trainer:
    """Return a quiet Trainer over the ranks of a `process_group`."""
    per_node = int(os.environ["LOCAL_WORLD_SIZE"])
    return Trainer(
        accelerator=setting.accelerator,
        devices=per_node,
        num_nodes=dist.get_world_size() // per_node,
        strategy=strategy,
        **{**_QUIET, **setting.trainer_options, "callbacks": list(callbacks), "plugins": [TorchElasticEnvironment()]},
    )


class _Replay:
    """Copies of the same batches: a training step may change its batch."""

    def __init__(self, batches: Sequence[Any]) -> None:
        self._batches = batches

    def __len__(self) -> int:
        return len(self._batches)

    def __iter__(self) -> Iterator[Any]:
        return map(copy.deepcopy, self._batches)


class _FollowsMemory(Callback):
    def __init__(self, streams: CheckedStreams, opened: contextlib.ExitStack) -> None:
        self._streams, self._open = streams, opened

    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        weights = {name: local_part(weight) for name, weight in pl_module.named_parameters()}
        counters: dict[str, Tensor] = {}
        leaves = list(pl_module.parameters())
        for name, module in sharded_modules(pl_module).items():
            weights |= {f"a table of {name} {at}": weight for at, weight in enumerate(fused_weights(module))}
            leaves += kernel_parameters(module)
            counts = map(count_on_device, tbes(module))
            counters |= {f"the iteration count of kernel {at} of {name}": count for at, count in enumerate(counts)}
        self._open.enter_context(self._streams.watching(weights, counters, leaves))

    def on_train_batch_end(self, trainer: Any, pl_module: Any, outputs: Any, batch: Any, batch_idx: int) -> None:
        if batch_idx % 3 == 1:
            trainer.strategy.update_tables()  # makes pending updates, as before an evaluation
        if batch_idx % 3 == 2:
            with trainer.strategy.saving():
                self._streams.read_weights(f"a save after the step of batch {batch_idx}", counters=True)
        self._streams.read_weights(f"a callback after the step of batch {batch_idx}")

    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self._open.close()


class _Calls(Watcher):
    """Tells `watched` of the calls of sharded modules in the user's method `step`."""

    def __init__(self, watched: Watched, step: str) -> None:
        self._watched, self._step = watched, step

    @override
    def called(self, forward: CalledModule, arguments: Arguments, flight: object, *, in_backward: bool) -> None:
        self._watched.before_call(self._step, forward, arguments)

    @override
    def answered(self, forward: CalledModule, answer: Any) -> None:
        self._watched.after_call(self._step, forward, answer)


class _WatchedStrategy(OverlapEmbeddingStrategy):
    def __init__(self, watched: Watched, races: bool, **kwargs: Any) -> None:
        super().__init__(observer=self._observed, **kwargs)
        self._watched = watched
        self.streams = self.checked = CheckedStreams(self._lookup_stream) if races else None

    @property
    def depth(self) -> int:
        return self._schedules.depth

    def without_gradient(self) -> dict[str, str]:
        sparse = None if self._fit is None else self._fit.sparse
        return {} if sparse is None or sparse.gradients is None else dict(sparse.gradients.without_gradient())

    def _observed(self, kind: str, stage: Stage, batch: int) -> None:
        watched = self._watched
        watched.most_in_flight = max(watched.most_in_flight, self.num_in_flight)
        if (kind, stage) == ("issue", Stage.BACKWARD) and watched.updates[-1:] != [watched.batch]:
            watched.updates.append(watched.batch)  # the end of this backward comes before `on_after_backward`
            watched.noted = True
        if (kind, stage) == ("issue", Stage.EMBEDDING_LOOKUP):
            watched.seen.setdefault(batch, tuple(watched.updates))
        if self.checked is not None:
            self.checked.doing = f"{kind} of {stage} of batch {batch}"

    def batch_to_device(self, batch: Any, device: torch.device | None = None, dataloader_idx: int = 0) -> Any:
        batch = super().batch_to_device(batch, device, dataloader_idx)
        if self.checked is not None:
            self.checked.take(batch)
        return batch

    def _make_pipeline(self, schedule: Any, step: str) -> SparsePipeline:
        pipeline = super()._make_pipeline(schedule, step)
        pipeline.watchers.add(_Calls(self._watched, step))
        return pipeline


def fused_weights(module: Any) -> list[Tensor]:
    """Return views of the tables in a module's kernels, each `(rows, columns)`."""
    return [weight for kernel in tbes(module) for weight in kernel.split_embedding_weights()]


def is_in(name: str, modules: Iterable[str]) -> bool:
    """Return whether a weight belongs to one of these modules."""
    return name.startswith(tuple(f"{outer}." for outer in modules))


def _table_digests(module: LightningModule) -> dict[str, str]:
    weights = {
        f"{outer}.{name}": value
        for outer, child in table_modules(module).items()
        for name, value in child.state_dict().items()
        if name.endswith(".weight")
    }
    return {name: repr(_by_window({name: value})) for name, value in weights.items()}


def _digests(module: LightningModule, optimizers: Sequence[torch.optim.Optimizer]) -> dict[str, str]:
    sharded = sharded_modules(module)
    weight_names = {id(weight): name for name, weight in module.named_parameters()}
    found: dict[str, Any] = {}
    for what, tensors in (("weight", module.named_parameters()), ("buffer", module.named_buffers())):
        found |= {f"{what} {name}": tensor for name, tensor in tensors if not is_in(name, sharded)}
    for outer, child in sharded.items():
        found |= {f"table {outer}.{name}": value for name, value in child.state_dict().items()}
    for outer, child in table_modules(module).items():
        for name, state in child.fused_optimizer.state_dict()["state"].items():
            found |= {f"fused optimizer state {outer}.{name} {kind}": value for kind, value in state.items()}
    for optimizer in optimizers:
        for weight, state in optimizer.state.items():
            name = weight_names.get(id(weight), "of a weight")
            found |= {f"optimizer state {name} {kind}": value for kind, value in state.items()}
    return _by_window(found)


def _by_window(found: Mapping[str, Any]) -> dict[str, str]:
    """Return a digest of each part of a tensor that this rank holds."""
    digests = {}
    for name, value in found.items():
        for window, tensor in local_parts(value) if isinstance(value, Tensor) else ():
            start = tuple(part.start for part in window)
            content = tensor.cpu().contiguous().reshape(-1).view(torch.uint8).numpy().tobytes()
            digests[f"{name} at {start}" if any(start) else name] = hashlib.sha256(content).hexdigest()
    return digests


def _patchable(trainer: Trainer, module: LightningModule) -> dict[str, str]:
    """Return name -> description of the objects that a run replaces."""
    loops = {
        "fit loop": trainer.fit_loop,
        "epoch loop": trainer.fit_loop.epoch_loop,
        "validation loop of fit": trainer.fit_loop.epoch_loop.val_loop,
        "validation loop": trainer.validate_loop,
        "test loop": trainer.test_loop,
        "prediction loop": trainer.predict_loop,
    }
    found = {name: type(live).__qualname__ for name, live in loops.items()}
    found |= {signum.name: repr(signal.getsignal(signum)) for signum in (signal.SIGTERM, signal.SIGINT)}
    for name, child in module.named_modules():
        forward = vars(child).get("forward")
        # Lightning replaces the root's forward for a step, and restores it as an attribute.
        if forward is not None and getattr(forward, "__func__", None) is not type(child).forward:
            found[f"the forward of {name or 'the module'!r}"] = type(forward).__qualname__
    return found


@contextlib.contextmanager
def process_group(accelerator: str) -> Iterator[None]:
    """Use the existing process group, or a temporary group: of all ranks under torchrun, else of one rank."""
    with contextlib.ExitStack() as stack:
        stack.enter_context(mock.patch.dict(os.environ))  # Lightning sets OMP_NUM_THREADS
        stack.enter_context(torch.random.fork_rng(devices=[]))
        stack.callback(random.setstate, random.getstate())
        stack.callback(np.random.set_state, np.random.get_state())
        if not dist.is_initialized():
            alone: dict[str, Any] = {"store": dist.HashStore(), "rank": 0, "world_size": 1}  # type: ignore[attr-defined]
            place = {} if dist.is_torchelastic_launched() else alone
            dist.init_process_group("gloo" if accelerator == "cpu" else "nccl", **place)
            stack.callback(dist.destroy_process_group)
        rank, world_size = dist.get_rank(), dist.get_world_size()
        node, local_rank = divmod(rank, per_node := int(os.environ.get("LOCAL_WORLD_SIZE", world_size)))
        of_torchrun = {"RANK": rank, "LOCAL_RANK": local_rank, "GROUP_RANK": node}
        of_torchrun |= {"WORLD_SIZE": world_size, "LOCAL_WORLD_SIZE": per_node}
        os.environ.update({name: str(number) for name, number in of_torchrun.items()})
        for logger in map(logging.getLogger, ("lightning.pytorch", "lightning.fabric", "torchrec")):
            stack.callback(logger.setLevel, logger.level)
            logger.setLevel(logging.ERROR)
        yield
