"""Build data, model, strategy and trainer from a config, and check the config before a rank starts."""

import inspect
from collections.abc import Mapping
from dataclasses import fields, replace
from importlib.util import find_spec
from typing import Any, TypeVar

import torch
from hydra.errors import InstantiationException
from hydra.utils import get_object, instantiate
from lightning.fabric.utilities.exceptions import MisconfigurationException
from lightning.pytorch import Callback, LightningDataModule, LightningModule, Trainer
from lightning.pytorch.accelerators import CPUAccelerator, CUDAAccelerator
from lightning.pytorch.callbacks import Checkpoint, ProgressBar
from lightning.pytorch.utilities.model_helpers import is_overridden
from torch.utils.data import DataLoader, DistributedSampler, IterableDataset
from torchrec.distributed.fbgemm_qcomm_codec import QCommsConfig
from torchrec.modules.embedding_modules import EmbeddingCollection

from ..compat.torch import tree_leaves
from ..data import RecDataModule
from ..plugin import OverlapEmbeddingStrategy
from ..schedules import Mode
from ..tables import check_quantized_comms, check_sharding, find_tables, refuse_dense_owner, resolve_quantized_comms
from ..text import check_known, some
from .config_checks import AUTO, Config, check_arguments, modes, split_arm

_T = TypeVar("_T")


def num_ranks(config: Config) -> int:
    """Return how many ranks `trainer.devices` asks for on this host."""
    devices, cuda = config["trainer"].get("devices", "auto"), on_cuda(config)
    accelerator = CUDAAccelerator if cuda else CPUAccelerator
    try:
        found = accelerator.auto_device_count() if devices == "auto" else accelerator.parse_devices(devices)
    except (TypeError, ValueError, MisconfigurationException):
        found = None
    if not found:
        hint = f" This host has {torch.cuda.device_count()} CUDA devices; or use trainer=cpu." if cuda else ""
        raise ValueError(
            "trainer.devices must be a number of ranks >= 1 or 'auto' (on CUDA also a list of devices, or -1 for all), "
            f"got {devices!r}.{hint}"
        )
    return found if isinstance(found, int) else len(found)


def trainer_defaults(config: Config) -> dict[str, Any]:
    """Return the arguments in which the command differs from `Trainer`, if the config does not set them.

    The package's data modules deal out rows to ranks themselves, and a benchmark takes each rank's batches as they are.
    The loaders of any other data module get Lightning's sampler, so that each rank trains its own rows.
    """
    own = {"use_distributed_sampler": False} if _deals_out(config) or "arms" in config else {}
    return {"enable_model_summary": False, "num_sanity_val_steps": 0, **own}


def _deals_out(config: Config) -> bool:
    """Return whether a data module of the package deals out rows to ranks."""
    made_by = _target_of("data", config["data"])
    return isinstance(made_by, type) and issubclass(made_by, RecDataModule)


def deals_batches_out(config: Config, loader: Any) -> bool:
    """Return whether a benchmark has to deal a loader's batches out to ranks: where `Trainer` would deal out rows."""
    wanted = config["trainer"].get("use_distributed_sampler", True) and not _deals_out(config)
    by_itself = isinstance(getattr(loader, "dataset", None), IterableDataset) or isinstance(
        getattr(loader, "sampler", None), DistributedSampler
    )
    return bool(wanted) and isinstance(loader, DataLoader) and not by_itself


def build_data(config: Config) -> LightningDataModule:
    """Return the data module of the config."""
    return _build("data", config["data"], LightningDataModule)


def build_model(config: Config, data: LightningDataModule) -> LightningModule:
    """Return the model of the config; it gets the data's `table_sizes` and `num_dense` if it takes them."""
    from_data = {name: getattr(data, name) for name in ("table_sizes", "num_dense") if hasattr(data, name)}
    taken = inspect.signature(_target_of("model", config["model"])).parameters
    node = {name: value for name, value in from_data.items() if name in taken} | config["model"]
    return _build("model", node, LightningModule)


def build_strategy(config: Config, mode: Mode, model: LightningModule) -> OverlapEmbeddingStrategy:
    """Return the strategy for one mode; `model` is unsharded."""
    stream, kind, named = config["stream"]["name"], config["sharding"].get("type"), config["sharding"].get("tables")
    sharding = {table.name: kind for table in find_tables(model) if kind} | dict(named) if named else kind or None
    pipeline: Any = AUTO if mode.schedule.name == AUTO else mode
    options = {name: _strategy_option(name, value) for name, value in config["strategy"].items()}
    return OverlapEmbeddingStrategy(pipeline, stream, sharding, quantized_comms=build_comms(config), **options)


_GROUPS_OF_TRAINER = {"callbacks": "callbacks", "logger": "logger", "strategy": "strategy"}
"""Argument of `Trainer` -> the config group that sets it."""
_IN_GROUPS = {"pipeline": "pipeline", "stream": "stream", "sharding": "sharding", "quantized_comms": "comms"}
"""Argument of the strategy -> the config group that sets it."""


def _strategy_option(name: str, value: Any) -> Any:
    """Return an argument of the strategy, made from its node if it has a `_target_`."""
    if name in _IN_GROUPS:
        raise ValueError(_set_by_group(f"strategy.{name}", _IN_GROUPS[name]))
    # A fused optimizer is made later, for each table.
    is_node = isinstance(value, Mapping) and "_target_" in value and name != "fused_optimizer"
    return _build(f"strategy.{name}", value, object) if is_node else value


def _set_by_group(key: str, group: str) -> str:
    ways = f"{group}.OPTION=..." if group == "strategy" else f"{group}=..., or {group}.OPTION=..."
    return f"{key}: the group {group} sets it. Write {ways}"


def build_comms(config: Config) -> QCommsConfig | None:
    """Return the precision of embedding communication; None for full precision."""
    comms = dict(config.get("comms") or {})
    for name in comms:
        check_known("option of comms", name, ["forward", "backward", *(field.name for field in fields(QCommsConfig))])
    forward, backward = comms.pop("forward", None) or "fp32", comms.pop("backward", None) or "fp32"
    resolved = resolve_quantized_comms((forward, backward)) or QCommsConfig()
    return resolve_quantized_comms(replace(resolved, **comms))


def build_trainer(
    config: Config, strategy: OverlapEmbeddingStrategy, extra_callbacks: list[Callback], log_dir: str
) -> Trainer:
    """Return the trainer with the extra callbacks, then the config's; loggers and checkpoints go into `log_dir`."""
    own: Mapping[str, Config] = {
        "ModelCheckpoint": {"dirpath": f"{log_dir}/checkpoints"},
        "CSVLogger": {"name": None, "version": ""},  # right into the folder, as the next
        "TensorBoardLogger": {"name": None, "version": ""},
    }

    def built(group: str, **shared: Any) -> list[Any]:
        nodes = {name: {**shared, **own.get(_target_name(node), {}), **node} for name, node in config[group].items()}
        return [_build(f"{group}.{name}", node, object) for name, node in nodes.items()]

    callbacks, loggers = built("callbacks"), built("logger", save_dir=log_dir)
    saves = any(isinstance(callback, Checkpoint) for callback in callbacks)
    bars = any(isinstance(callback, ProgressBar) for callback in callbacks)
    enabled = {"enable_progress_bar": bars, "enable_checkpointing": saves, "default_root_dir": log_dir}
    return Trainer(
        strategy=strategy,
        callbacks=extra_callbacks + callbacks,
        logger=loggers or False,
        **{**trainer_defaults(config), **enabled, **config["trainer"]},
    )


_NEEDS: Mapping[str, tuple[str, ...]] = {  # Lightning's logger -> packages; it needs one of them
    "TensorBoardLogger": ("tensorboard", "tensorboardX"),
    "WandbLogger": ("wandb",),
    "MLFlowLogger": ("mlflow",),
    "CometLogger": ("comet_ml",),
}


def complete(config: Config) -> dict[str, Any]:
    """Return the config with all defaults of data, model and trainer filled in, as a record of the run."""
    filled, in_yaml = dict(config), (str, int, float, tuple, list, dict, type(None))
    for group in ("data", "model"):
        parameters = inspect.signature(_target_of(group, config[group])).parameters.values()
        defaults = {p.name: p.default for p in parameters if isinstance(p.default, in_yaml)}
        filled[group] = {**defaults, **config[group]}
    filled["trainer"] = {**trainer_defaults(config), **config["trainer"]}
    return filled


def check(config: Config) -> None:
    """Raise if the config's data, model, strategy, trainer or loggers cannot be built."""
    num_ranks(config)
    for name, node in config["logger"].items():
        packages = _NEEDS.get(_target_name(node), ())
        if packages and not any(find_spec(package) for package in packages):
            raise ModuleNotFoundError(f"logger={name} needs {packages[0]}: pip install it, or use logger=csv.")
    for name, group in _GROUPS_OF_TRAINER.items():
        if name in config["trainer"]:
            raise ValueError(_set_by_group(f"trainer.{name}", group))
    check_arguments("trainer", config["trainer"], Trainer)
    data = build_data(config)
    if hasattr(data, "check"):
        data.check()
    model = build_model(config, data)
    if (task := config.get("task", "train")) != "train" and (why := why_no_evaluation(task, model, data)):
        raise ValueError(f"task={task} needs what is not there: {why}.")
    strategy = build_strategy(config, modes(config)[-1], model)
    tables, device = find_tables(model), torch.device("cuda" if on_cuda(config) else "cpu")
    sharding = strategy.sharding
    check_sharding(sharding, tables, device)
    check_quantized_comms(strategy.quantized_comms, tables, device)
    kinds = sharding if isinstance(sharding, Mapping) else {table.name: sharding for table in tables}
    trained = (table for table in tables if table.parameter.requires_grad and kinds.get(table.name) != "data_parallel")
    missing = [table for table in trained if table.fused_optimizer is None]
    if missing and strategy.fused_optimizer is None:
        way = " Or use sharding=data_parallel, which leaves the tables to the optimizer of configure_optimizers."
        of_sequences = any(table.sharder.module_type is EmbeddingCollection for table in missing)
        raise ValueError(
            f"no fused optimizer for {some(table.path for table in missing)}: set "
            "'strategy.fused_optimizer=[torch.optim.SGD,{lr: 0.1}]'."
            f"{'' if of_sequences and device.type == 'cpu' else way}"
        )
    for arm in config.get("arms", ()):  # of overlap-bench
        check_quantized_comms(resolve_quantized_comms(split_arm(arm)[1]), tables, device)
    # The dense optimizer must not take fused tables. The model is not used again; None is the planner's choice.
    fused = [table for table in tables if kinds.get(table.name) not in (None, "data_parallel")]
    for table in fused:
        table.apply_fused_optimizer(torch.optim.SGD, {"lr": 0.0})
    try:
        made = model.configure_optimizers()
    except Exception:  # it needs a trainer
        return
    fused_only = {table.path for table in fused if table.is_pooled_if_whole(device)}
    refuse_dense_owner({table.path: table.parameter for table in fused}, optimizers_in(made), fused_only)


def why_no_evaluation(task: str, model: LightningModule, data: LightningDataModule) -> str:
    """Return why a module or data module cannot be evaluated (`task` is test or validate), or ""."""
    step, loader = {"test": ("test_step", "test_dataloader"), "validate": ("validation_step", "val_dataloader")}[task]
    if not is_overridden(step, model):
        return f"{type(model).__name__} has no {step}"
    return "" if is_overridden(loader, data) else f"{type(data).__name__} has no {loader}"


def optimizers_in(made: Any) -> list[torch.optim.Optimizer]:
    """Return every optimizer in a result of `configure_optimizers`."""
    return [leaf for leaf in tree_leaves(made) if isinstance(leaf, torch.optim.Optimizer)]


def on_cuda(config: Config) -> bool:
    """Return whether the trainer uses CUDA devices."""
    accelerator = config["trainer"].get("accelerator", "auto")
    return accelerator in ("cuda", "gpu") or (accelerator == "auto" and torch.cuda.is_available())


def _build(where: str, node: Config, kind: type[_T]) -> _T:
    """Instantiate `_target_`; its errors reach the caller unchanged."""
    check_arguments(where, node, _target_of(where, node))
    try:
        made = instantiate(dict(node), _convert_="all")
    except InstantiationException as err:
        if err.__cause__ is not None:
            raise err.__cause__ from None
        raise
    if not isinstance(made, kind):
        raise TypeError(f"{where}._target_ must make a {kind.__name__}, got {type(made).__name__}.")
    return made


def _target_of(where: str, node: Config) -> Any:
    """Return the class or function that `_target_` names.

    Raises:
        ValueError: There is no `_target_`.
        ImportError: It cannot be imported.
    """
    if "_target_" not in node:
        raise ValueError(f"{where} has no _target_, the class or function to call, got {dict(node)}.")
    path = str(node["_target_"])
    try:
        return get_object(path)
    except ImportError as err:
        package = path.partition(".")[0]
        if find_spec(package) is not None:
            raise
        raise ModuleNotFoundError(
            f"{where}._target_ is {path!r}, and Python does not find {package!r}. Install your package "
            "(pip install -e .), or start in the folder that has it, with PYTHONPATH=. before the command."
        ) from err


def _target_name(node: Config) -> str:
    return str(node.get("_target_", "")).rpartition(".")[2]
