"""Check which optimizer trains each table: the fused optimizer in the backward, or one of `configure_optimizers`."""

import functools
import importlib
import inspect
import warnings
from collections.abc import Collection, Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
import torch.distributed as dist
from torch import nn
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ..compat.torch import AppliedOptimizer
from ..text import some, unknown_name_message
from .combined_optimizer import DenseAndFused
from .fused_arguments import (
    KERNEL_ARGUMENTS,
    ONLY_BY_GRADIENTS,
    kernel_arguments,
    kind_of,
    refused_keywords,
    with_defaults,
)
from .supported_modules import DATA_PARALLEL, holds_sequences, sharded_modules, table_modules
from .table import NAME_BEFORE, Rule, Table

FusedOptimizer: TypeAlias = (
    tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | functools.partial[Any] | Sequence[Any] | Mapping[str, Any]
)
"""`(class, kwargs)` or `functools.partial(class, **kwargs)`; from a config file also `["path.of.class", kwargs]`,
`{"class_path": ..., "init_args": kwargs}` or `{"_target_": ..., **kwargs}`."""

CPU_FUSED_OPTIMIZERS = ONLY_BY_GRADIENTS
"""What FBGEMM 1.8 fuses on a CPU (`split_table_batched_embeddings_ops_training`); the others run on CUDA only."""

_OF_FROZEN = 5e-324  # the smallest number there is: nobody gives SGD this `eps`, which it does not use

_DENSE = (
    "  from torchrec.optim.optimizers import in_backward_optimizer_filter\n"
    "  dense = [p for _, p in in_backward_optimizer_filter(self.named_parameters())]\n"
)

_KEYWORDS = ("lr", *KERNEL_ARGUMENTS)  # of fused optimizers: "lr", for TorchRec, and the arguments of FBGEMM's kernel
_KEYWORDS_OF_UPDATES = (
    *("lr", "eps", "momentum", "weight_decay", "weight_decay_mode", "beta1", "beta2"),
    *("gradient_clipping", "max_gradient", "max_norm", "stochastic_rounding"),
)


def check_fused_optimizer(fused_optimizer: FusedOptimizer | None) -> tuple[Any, dict[str, Any]] | None:
    """Return `(class, kwargs)` of the strategy's argument, with the class's defaults; raise a TypeError for others.

    None stays None.
    """
    cls: Any
    kwargs: Any
    match fused_optimizer:
        case None:
            return None
        case functools.partial(func=cls, args=(), keywords=kwargs) | [cls, {**kwargs}]:
            pass
        case {"class_path": cls, **more} if more.keys() <= {"init_args"}:
            kwargs = more.get("init_args") or {}
        case {"_target_": cls, **more}:
            kwargs = {name: value for name, value in more.items() if name not in ("_partial_", "_convert_")}
        case _:
            cls, kwargs = None, {}
    if isinstance(cls, str):
        cls = _imported(cls)
    if not _is_optimizer(cls):
        raise TypeError(
            "fused_optimizer is (class, kwargs) or functools.partial(class, **kwargs), in a config file "
            "[torch.optim.SGD, {lr: 0.1}] or {class_path: torch.optim.SGD, init_args: {lr: 0.1}}, got "
            f"{fused_optimizer!r}. For example: fused_optimizer=(torch.optim.SGD, {{'lr': 0.1}})."
        )
    if unknown := _unknown_keyword(cls, kwargs):
        raise TypeError(f"fused_optimizer: {unknown}")
    try:
        cls([nn.Parameter(torch.zeros(1, 1))], **kwargs)
    except (TypeError, ValueError) as err:
        raise TypeError(f"fused_optimizer: {cls.__name__} does not take {kwargs}: {err}") from err
    return cls, with_defaults(cls, kwargs)


def _unknown_keyword(cls: type[torch.optim.Optimizer], kwargs: Mapping[str, Any]) -> str | None:
    """Return a message about the first keyword that neither the class nor FBGEMM's kernel takes, or None."""
    parameters = inspect.signature(cls).parameters
    unknown = next((name for name in kwargs if name not in parameters and name not in _KEYWORDS), None)
    if unknown is None:
        return None
    takes_any = any(one.kind is inspect.Parameter.VAR_KEYWORD for one in parameters.values())
    known = [name for name in _KEYWORDS if name in parameters or (takes_any and name in _KEYWORDS_OF_UPDATES)]
    return f"{cls.__name__} does not take {unknown!r}: {unknown_name_message('keyword', unknown, known)}"


def _imported(path: str) -> Any:
    module, _, name = path.rpartition(".")
    try:
        found = importlib.import_module(module)
        return getattr(found, name)
    except AttributeError:
        known = {name: None for name, kind in vars(found).items() if _is_optimizer(kind)}
        raise TypeError(f"fused_optimizer: {unknown_name_message(f'optimizer in {module}', name, known)}") from None
    except (ImportError, ValueError) as err:
        near = next((name for name in vars(torch.optim) if name.lower() == path.lower()), None)
        hint = f"Did you mean 'torch.optim.{near}'?" if near else "Give its whole path: 'torch.optim.SGD', say."
        raise TypeError(f"fused_optimizer: {path!r} names no class that can be imported ({err}). {hint}") from err


def _is_optimizer(kind: Any) -> bool:
    return isinstance(kind, type) and issubclass(kind, torch.optim.Optimizer)


def check_dense_optimizers(model: nn.Module, optimizers: Sequence[torch.optim.Optimizer]) -> None:
    """Check that every table of a sharded model has one optimizer; raise a ValueError if one has two, or none.

    Optimizers lose parameters that sharding has replaced, with their state, to free memory. Rank 0 warns of it.
    """
    parameters = [named for name, module in table_modules(model).items() for named in module.named_parameters(name)]
    fused = dict(in_backward_optimizer_filter(iter(parameters), include=True))
    refuse_dense_owner(fused, optimizers, fused_only_tables(model))
    # Of a model on `meta` TorchRec replaces dense parameters as well.
    early = {name: optimizer for optimizer in optimizers for name in _replaced(optimizer)}
    tables = dict(parameters)
    parameters += [(name, p) for name, p in model.named_parameters() if name in early]
    dense = dict(in_backward_optimizer_filter(iter(parameters)))
    owned = _owned(optimizers)
    untrained = [name for name, p in dense.items() if p.requires_grad and id(p) not in owned]
    if untrained:
        why = (
            "These tables are data-parallel (or have a dense kernel), so that the optimizer of configure_optimizers "
            "has to train them, not the one applied in backward: add them there. "
        )
        if (owner := next((early[name] for name in untrained if name in early), None)) is not None:
            why = (
                f"{_kind(owner).__name__} was made before the tables were sharded: it has weights of these names that "
                f"are no longer the module's. {_how_to_make(owner, model)}\n"
            )
        sharding = {_table_of(name): "table_wise" for name in untrained if name in tables}
        raise ValueError(
            f"no optimizer has the weights of {some(untrained)}. {why}To train tables in backward, give the strategy "
            f"fused_optimizer=(torch.optim.SGD, {{'lr': 0.1}}){f' and sharding={sharding}' if sharding else ''}; to "
            "leave them untrained, set requires_grad=False."
        )
    has_rates = any(getattr(module, "trained_in_backward", None) for module in sharded_modules(model).values())
    lacks_rates = has_rates and not any(getattr(optimizer, "fused_groups", ()) for optimizer in optimizers)
    for optimizer in optimizers:
        _let_go_of_replaced(optimizer, lacks_rates and isinstance(optimizer, DenseAndFused), model)


def _replaced(optimizer: torch.optim.Optimizer) -> dict[str, nn.Parameter]:
    return {getattr(p, NAME_BEFORE): p for p in _owned([optimizer]).values() if hasattr(p, NAME_BEFORE)}


def _let_go_of_replaced(optimizer: torch.optim.Optimizer, without_rates: bool, model: nn.Module) -> None:
    """Take replaced parameters out of an optimizer, and warn of them and of a combined optimizer without rates."""
    replaced = _replaced(optimizer)
    for group in optimizer.param_groups if replaced else ():  # an empty group stays: schedulers count them
        kept = [number for number, p in enumerate(group["params"]) if not hasattr(p, NAME_BEFORE)]
        for entry in {"params", "param_names"} & group.keys():
            group[entry][:] = [group[entry][number] for number in kept]
    for parameter in replaced.values():
        optimizer.state.pop(parameter, None)
    words = ""
    if replaced:
        words = (
            f"{_kind(optimizer).__name__} was made before the tables were sharded. It had weights that are no longer "
            f"the module's: {some(replaced)}. They were taken out of it, with their state. It trains its other "
            "parameters as before; tables are trained in backward. "
        )
    if without_rates:
        words += (
            "combined_optimizer was called before the tables were sharded, or for a module without them: it has no "
            "group for the learning rates of fused tables, and no scheduler moves them. "
        )
    if words and dist.get_rank() == 0:
        words += "" if without_rates else "This run is right; to leave this warning out: "
        warnings.warn(f"{words}{_how_to_make(optimizer, model)}", stacklevel=2)


def _how_to_make(optimizer: torch.optim.Optimizer, model: nn.Module) -> str:
    # LightningCLI's `--optimizer` replaces the module's configure_optimizers by its answer.
    replaced = getattr(vars(model).get("configure_optimizers"), "__func__", None)
    if not (isinstance(replaced, functools.partial) and "optimizer" in replaced.keywords):
        return f"Make it in configure_optimizers:\n{_lines(optimizer).rstrip()}"
    kind, lr = _kind(optimizer), optimizer.defaults.get("lr")
    path = f"{'torch.optim' if kind.__module__.startswith('torch.optim') else kind.__module__}.{kind.__name__}"
    rate = f" --model.optimizer.lr={lr}" if isinstance(lr, float) else ""
    return (
        "LightningCLI's --optimizer makes it too early, and replaces configure_optimizers. Use --model.optimizer, "
        "which needs an argument `optimizer: OptimizerCallable` (of lightning.pytorch.cli) of the module, kept as "
        "self.optimizer. configure_optimizers calls it, for example:\n"
        f"{_lines(optimizer, 'self.optimizer(dense)')}"
        f"On the command line: --model.optimizer={path}{rate}"
    )


def _kind(optimizer: torch.optim.Optimizer) -> type[torch.optim.Optimizer]:
    return type(optimizer.dense if isinstance(optimizer, DenseAndFused) else optimizer)


def _lines(optimizer: torch.optim.Optimizer, call: str | None = None) -> str:
    """Return the lines of configure_optimizers; `call` makes the optimizer of `dense`, by default its class does."""
    if call is None:
        kind, lr = _kind(optimizer), optimizer.defaults.get("lr")
        package = "torch.optim." if kind.__module__.startswith("torch.optim") else ""
        rate = f", lr={lr}" if isinstance(lr, float) else ""
        call = f"{package}{kind.__name__}(dense{rate})"
    scheduled = any("initial_lr" in group for group in optimizer.param_groups)  # a scheduler writes it
    call = f"combined_optimizer(self, {call})" if scheduled or isinstance(optimizer, DenseAndFused) else call
    if not scheduled:
        return f"{_DENSE}  return {call}\n"
    imported = "  from lightning_overlap import combined_optimizer\n"
    return f"{imported}{_DENSE}  optimizer = {call}  # for the scheduler: it moves the tables' rates as well\n"


def fused_only_tables(model: nn.Module) -> set[str]:
    """Return the names of those weights of a sharded model's tables that only a fused optimizer can train."""
    if any(parameter.device.type != "cpu" for parameter in model.parameters()):
        return set()
    modules = {path: module for path, module in table_modules(model).items() if holds_sequences(module)}
    return {f"{path}.{key}" for path, module in modules.items() for key in module.state_dict()}


def keep_dense(names: Collection[str], fused_only: Collection[str]) -> str:
    """Return how `configure_optimizers` can train tables, and which (`fused_only`) it cannot train."""
    refused = [name for name in names if name in fused_only]
    whole = {_table_of(name): DATA_PARALLEL for name in names if name not in fused_only}
    way = "sharding='data_parallel', and no fused_optimizer"
    if refused:
        way = f"sharding={whole}, and in_backward_optimizer_filter in configure_optimizers"
    said = f"To train tables by configure_optimizers, with its state, whole on every rank: {way}." if whole else ""
    only = f"On a CPU tables of an EmbeddingCollection need a fused optimizer: {some(refused)}." if refused else ""
    return f"{said} {only}".strip()


def _table_of(name: str) -> str:
    return name.removesuffix(".weight").rpartition(".")[2]


def refuse_dense_owner(
    fused: Mapping[str, nn.Parameter], optimizers: Sequence[torch.optim.Optimizer], fused_only: Collection[str] = ()
) -> None:
    """Raise a ValueError if an optimizer has a weight of `fused` (by name) or is TorchRec's CombinedOptimizer."""
    if any(isinstance(optimizer, CombinedOptimizer) for optimizer in optimizers):
        raise ValueError(
            "configure_optimizers returned TorchRec's CombinedOptimizer: it would run training_step once per "
            "member, and a checkpoint of its sharded state would hold rank 0's shards alone. Return the dense "
            "optimizer as it is; to schedule the fused tables' learning rates with it:\n"
            "  from lightning_overlap import combined_optimizer\n"
            "  optimizer = combined_optimizer(self, torch.optim.Adam(dense))"
        )
    owned = _owned(optimizers)
    twice = [name for name, parameter in fused.items() if id(parameter) in owned]
    if twice:
        owner = next(optimizer for optimizer in optimizers if id(fused[twice[0]]) in _owned([optimizer]))
        adaptive = (
            "What trains the tables is the strategy's fused_optimizer. On CUDA it may be (torch.optim.Adam, {'lr': "
            "...}); on a CPU FBGEMM fuses no Adam or AdamW: take (torchrec.optim.RowWiseAdagrad, {'lr': ...}), with a "
            f"rate of its own. {keep_dense(twice, fused_only)}"
        )
        raise ValueError(
            f"configure_optimizers gave a dense optimizer the weights of fused tables: {some(twice)}. These tables "
            f"are updated inside backward. Leave them out:\n{_lines(owner)}"
            f"{adaptive if 'Adam' in _kind(owner).__name__ else ''}"
        )


def _owned(optimizers: Iterable[torch.optim.Optimizer]) -> dict[int, nn.Parameter]:
    return {id(p): p for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def apply_fused_optimizer(
    in_backward: list[Table], fused: tuple[Any, dict[str, Any]] | None, device: torch.device
) -> None:
    """Apply `fused` to trained tables that have no optimizer, freeze untrained tables, and refuse lacking kernels."""
    missing = [t for t in in_backward if t.parameter.requires_grad and t.fused_optimizer is None]
    if missing and fused is None:
        raise ValueError(_without_fused_optimizer(missing, in_backward, device))
    optimizers = [table.fused_optimizer or fused for table in in_backward]
    for table, optimizer in zip(in_backward, optimizers, strict=True):
        if table.parameter.requires_grad:
            assert optimizer is not None
            _check_can_fuse(table, optimizer, fused, device, in_backward)
        elif table.fused_optimizer is not None:
            raise ValueError(
                f"table {table.path} has requires_grad=False and an optimizer applied in backward, which would "
                "train it. Leave one of them out."
            )
    for table, optimizer in zip(in_backward, optimizers, strict=True):
        if table.parameter.requires_grad:
            assert optimizer is not None
            table.fuse(optimizer[0], kernel_arguments(*optimizer))
        else:
            table.parameter.requires_grad_(True)
            # The fused kernel updates whatever it is given, so at a rate of 0. TorchRec puts tables of equal arguments
            # into one kernel: a number that SGD does not use keeps this one apart from tables whose rate begins at 0.
            table.fuse(torch.optim.SGD, {"lr": 0.0, "eps": _OF_FROZEN})
            table.parameter.requires_grad_(False)


def _without_fused_optimizer(missing: list[Table], in_backward: list[Table], device: torch.device) -> str:
    by_module: dict[str, list[str]] = {}
    for table in missing:
        by_module.setdefault(f"self.{table.module}".rstrip("."), []).append(table.name)
    listed = "".join(f"  {module}: {some(names)}\n" for module, names in by_module.items())
    line = "  apply_optimizer_in_backward(RowWiseAdagrad, {}.parameters(), {{'lr': 0.01}})\n"
    applied = "".join(map(line.format, by_module))
    adam = "" if device.type == "cpu" else " Or (torch.optim.Adam, {'lr': 0.001}), which FBGEMM fuses on CUDA."
    return (
        "no fused optimizer for these tables, which are updated inside the backward (TorchRec alone would train them "
        f"with SGD at lr=0.01, without a word):\n{listed}"
        "Give them an optimizer, by the strategy:\n"
        "  from torchrec.optim import RowWiseAdagrad\n"
        "  OverlapEmbeddingStrategy(fused_optimizer=(RowWiseAdagrad, {'lr': 0.01}))"
        "  # in YAML: [torchrec.optim.RowWiseAdagrad, {lr: 0.01}]\n"
        "or by the module, in its __init__:\n"
        "  from torchrec.optim import RowWiseAdagrad, apply_optimizer_in_backward\n"
        f"{applied}"
        f"If Adam trained them, begin with ten times its rate: 0.01 for 1e-3.{adam} If SGD or Adagrad trained them, "
        "take (torch.optim.SGD, {'lr': ...}) or (torch.optim.Adagrad, {'lr': ...}) with its rate. "
        f"The optimizer of configure_optimizers has to leave them out:\n{_DENSE.rstrip()}"
        f"{_way_to_dense_optimizer(missing, in_backward, device)}"
    )


def _way_to_dense_optimizer(tables: list[Table], in_backward: list[Table], device: torch.device) -> str:
    """Return how the dense optimizer can train these tables; nothing where TorchRec would make bags of sequences."""
    whole = {table.name: DATA_PARALLEL for table in tables if not table.is_pooled_if_whole(device)}
    if not whole:
        return ""
    every = "sharding='data_parallel', or " if len(whole) == len(tables) == len(in_backward) else ""
    which = "them" if len(whole) == len(tables) else some(whole)
    return (
        f"\nTo have the optimizer of configure_optimizers train {which}, keep {which} whole on every rank: "
        f"{every}sharding={whole}."
    )


def _check_can_fuse(
    table: Table,
    optimizer: AppliedOptimizer,
    of_strategy: AppliedOptimizer | None,
    device: torch.device,
    tables: list[Table],
) -> None:
    """Raise a ValueError if FBGEMM cannot train a table by `optimizer`; tables without one get that `of_strategy`."""
    optimizer_class, kwargs = optimizer
    kind = kind_of(optimizer_class)
    if kind is None:
        raise ValueError(
            f"table {table.path}: FBGEMM has no fused form of {optimizer_class.__name__}. "
            "Take torch.optim.SGD, Adagrad or (on CUDA) Adam, or a class of torchrec.optim: for AdamW or SparseAdam, "
            "on CUDA (torch.optim.Adam, {'lr': ...}), on a CPU (torchrec.optim.RowWiseAdagrad, {'lr': ...})."
        )
    if device.type == "cpu" and kind not in CPU_FUSED_OPTIMIZERS:
        raise ValueError(
            f"table {table.path}: {optimizer_class.__name__} is fused on CUDA only. On a CPU FBGEMM fuses "
            "torch.optim.SGD, torch.optim.Adagrad and torchrec.optim.RowWiseAdagrad: take one of these (in the "
            "place of Adam: RowWiseAdagrad, whose state is one number a row)."
        )
    if unknown := _unknown_keyword(optimizer_class, kwargs):
        raise ValueError(f"table {table.path}: {unknown}")
    if ways := refused_keywords(optimizer_class, kwargs, on_cpu=device.type == "cpu"):
        alike = [one for one in tables if one is table or (one.fused_optimizer or of_strategy) == optimizer]
        whole = _way_to_dense_optimizer(alike, tables, device)
        on_cuda = refused_keywords(optimizer_class, kwargs, on_cpu=False)
        here = " on a CPU" if ways.keys() > on_cuda.keys() else ""
        lost = ", ".join(f"{name}={kwargs[name]!r}" for name in ways)
        others = some(one.path for one in alike if one is not table)
        more = " ".join(["", *filter(None, ways.values())])
        raise ValueError(
            f"table {table.path}: FBGEMM's fused {optimizer_class.__name__} has no {lost}{here}; the table would be "
            f"trained without{others and f', and {others} as well'}. Leave it out, or take another "
            f"optimizer.{more}{whole}"
        )


def warn_of_dense_tables(dense: list[Table]) -> None:
    """Warn of tables with a dense kernel, replicas aside, whose optimizer applied in backward does not train them."""
    if data_parallel := some(table.path for table in dense if table.fused_optimizer):
        warnings.warn(
            f"{data_parallel}: sharded data-parallel, so the optimizer applied in backward does not train "
            "these tables; the optimizer of configure_optimizers has to.",
            stacklevel=2,
        )


def warn_of_moves_on_zeros(model: nn.Module) -> None:
    """Warn of tables that a batch whose gradients were made zeros changes nevertheless."""
    rules = [(name, rule) for one in sharded_modules(model).values() for name, rule in _rules(one).items()]
    if moved := [f"{name} ({rule.name})" for name, rule in rules if rule.moves_on_zeros]:
        warnings.warn(
            f"nonfinite='skip': the fused optimizers of {some(moved)} change rows and state on a gradient of zeros, "
            "too, as moments and weight decay do. A loss that is not finite leaves their tables finite, but does not "
            "leave them as they were. SGD, Adagrad and RowWiseAdagrad without weight decay do.",
            UserWarning,
            stacklevel=2,
        )


def _rules(module: nn.Module) -> dict[str, Rule]:
    return getattr(module, "trained_in_backward", None) or {}
