"""Check who trains which table: the optimizer in the backward, or one of `configure_optimizers`."""

from __future__ import annotations

import functools
import importlib
import inspect
import warnings
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, TypeAlias

import torch
from fbgemm_gpu.split_embedding_configs import EmbOptimType
from torch import nn
from torchrec.distributed.utils import optimizer_type_to_emb_opt_type
from torchrec.optim.keyed import CombinedOptimizer
from torchrec.optim.optimizers import in_backward_optimizer_filter

from ..text import some, unknown_name_message
from .combined_optimizer import DenseAndFused
from .supported_modules import table_modules
from .table import KERNEL_ARGUMENTS, Table

FusedOptimizer: TypeAlias = (
    tuple[type[torch.optim.Optimizer], Mapping[str, Any]] | functools.partial[Any] | Sequence[Any] | Mapping[str, Any]
)
"""`(class, kwargs)` or `functools.partial(class, **kwargs)`; from a config file also `["path.of.class", kwargs]`,
`{"class_path": ..., "init_args": kwargs}` or `{"_target_": ..., **kwargs}`."""

CPU_FUSED_OPTIMIZERS = (EmbOptimType.EXACT_SGD, EmbOptimType.EXACT_ADAGRAD, EmbOptimType.EXACT_ROWWISE_ADAGRAD)
"""What FBGEMM 1.8 fuses on a CPU (`split_table_batched_embeddings_ops_training`); the others run on CUDA only."""
_UNUSED = {EmbOptimType.EXACT_SGD: ("momentum", "weight_decay"), EmbOptimType.EXACT_ADAGRAD: ("weight_decay",)}
"""Arguments that FBGEMM 1.8 takes for every optimizer and that the kernels of these do not read (`lookup_sgd.py`)."""


def check_fused_optimizer(fused_optimizer: FusedOptimizer | None) -> tuple[Any, dict[str, Any]] | None:
    """Return `(class, kwargs)` of what the user gave, or None for None.

    Raises:
        TypeError: It is no `FusedOptimizer`, or the class does not exist or does not take the arguments.
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
    try:
        cls([nn.Parameter(torch.zeros(1, 1))], **kwargs)
    except (TypeError, ValueError) as err:
        raise TypeError(f"fused_optimizer: {cls.__name__} does not take {kwargs}: {err}") from err
    return cls, dict(kwargs)


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


def check_dense_optimizers(model: nn.Module, optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that every table of a sharded model has one optimizer.

    Raises:
        ValueError: A dense optimizer has the weight of a fused table, or no optimizer has that of a table.
    """
    optimizers = list(optimizers)
    parameters = [named for name, module in table_modules(model).items() for named in module.named_parameters(name)]
    refuse_dense_owner(dict(in_backward_optimizer_filter(iter(parameters), include=True)), optimizers)
    dense = dict(in_backward_optimizer_filter(iter(parameters)))
    owned = _owned(optimizers)
    untrained = [name for name, p in dense.items() if p.requires_grad and id(p) not in owned]
    if untrained:
        raise ValueError(
            f"no optimizer has the weights of {some(untrained)}. These tables are data-parallel (or have a dense "
            "kernel), so that the optimizer of configure_optimizers has to train them, not the one applied in "
            "backward. Give the strategy fused_optimizer=(torch.optim.SGD, {'lr': 0.1}), say, and sharding={'<table>': "
            "'table_wise'}, to train them in backward; or add them there; or set requires_grad=False."
        )


def refuse_dense_owner(fused: Mapping[str, nn.Parameter], optimizers: Iterable[torch.optim.Optimizer]) -> None:
    """Check that no dense optimizer has the weight of a fused table.

    Args:
        fused: Weights of fused tables by name.
        optimizers: Those of `configure_optimizers`.

    Raises:
        ValueError: One has; the message shows how to leave the weights out. Also for TorchRec's CombinedOptimizer.
    """
    optimizers = list(optimizers)
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
        weights = {id(fused[name]) for name in twice}
        owner = next(optimizer for optimizer in optimizers if weights & _owned([optimizer]))
        kind, lr = type(owner.dense if isinstance(owner, DenseAndFused) else owner), owner.defaults.get("lr")
        package = "torch.optim." if kind.__module__.startswith("torch.optim") else ""
        rate = f", lr={lr}" if isinstance(lr, float) else ""
        call = f"{package}{kind.__name__}(dense{rate})"
        call = f"combined_optimizer(self, {call})" if isinstance(owner, DenseAndFused) else call
        raise ValueError(
            f"configure_optimizers gave a dense optimizer the weights of fused tables: {some(twice)}. These tables "
            "are updated inside backward. Leave them out:\n"
            "  from torchrec.optim.optimizers import in_backward_optimizer_filter\n"
            "  dense = [p for _, p in in_backward_optimizer_filter(self.named_parameters())]\n"
            f"  return {call}\n{_ADAPTIVE if 'Adam' in kind.__name__ else ''}"
        )


_ADAPTIVE = (
    "What trains the tables is the strategy's fused_optimizer. On CUDA it may be (torch.optim.Adam, {'lr': ...}); on a "
    "CPU FBGEMM fuses no Adam or AdamW: take (torchrec.optim.RowWiseAdagrad, {'lr': ...}), with a rate of its own. To "
    "keep this optimizer for tables that are whole on every rank: sharding='data_parallel', and no fused_optimizer."
)


def _owned(optimizers: Iterable[torch.optim.Optimizer]) -> set[int]:
    return {id(p) for optimizer in optimizers for group in optimizer.param_groups for p in group["params"]}


def apply_fused_optimizer(
    in_backward: list[Table], fused: tuple[Any, dict[str, Any]] | None, device: torch.device
) -> None:
    """Apply the fused optimizer to tables that have none; freeze those with `requires_grad=False`.

    Args:
        in_backward: Tables that the backward is to train.
        fused: Class and arguments of the fused optimizer; None if the user gave none.
        device: Where the tables are trained.

    Raises:
        ValueError: A table has no optimizer and `fused` is None, the device cannot fuse an optimizer or one of its
            arguments, or a table with `requires_grad=False` has one.
    """
    missing = some(t.path for t in in_backward if t.parameter.requires_grad and t.fused_optimizer is None)
    if missing and fused is None:
        raise ValueError(
            f"no fused optimizer for {missing}: these tables are updated inside "
            "backward (TorchRec alone would train them with SGD, lr 0.01, without a word). Give one in either way:\n"
            "  OverlapEmbeddingStrategy(fused_optimizer=(torch.optim.SGD, {'lr': 0.1}))\n"
            "  from torch.distributed.optim import _apply_optimizer_in_backward  # in the module's __init__\n"
            "  _apply_optimizer_in_backward(torch.optim.SGD, self.ebc.parameters(), {'lr': 0.1})"
        )
    for table in in_backward:
        if not table.parameter.requires_grad:
            _freeze(table)
            continue
        if fused is not None:
            table.apply_fused_optimizer(*fused)
        _check_can_fuse(table, device)


def _freeze(table: Table) -> None:
    """Keep a table that needs no gradient as it is: the fused kernel updates whatever it is given."""
    if table.fused_optimizer is not None:
        raise ValueError(
            f"table {table.path} has requires_grad=False and an optimizer applied in backward, which would train it. "
            "Leave one of them out."
        )
    table.parameter.requires_grad_(True)
    # TorchRec puts tables of equal arguments into one kernel. The explicit weight decay of 0 keeps this table apart
    # from trained ones whose learning rate begins at 0.
    table.apply_fused_optimizer(torch.optim.SGD, {"lr": 0.0, "weight_decay": 0.0})
    table.parameter.requires_grad_(False)


def _check_can_fuse(table: Table, device: torch.device) -> None:
    assert table.fused_optimizer is not None
    optimizer_class, kwargs = table.fused_optimizer
    try:
        kind = optimizer_type_to_emb_opt_type(optimizer_class)
    except ValueError as err:
        raise ValueError(
            f"table {table.path}: FBGEMM has no fused form of {optimizer_class.__name__}. "
            "Take torch.optim.SGD, Adagrad or (on CUDA) Adam, or one of torchrec.optim; in the place of AdamW, "
            "on CUDA (torch.optim.Adam, {'lr': ...}), on a CPU (torchrec.optim.RowWiseAdagrad, {'lr': ...})."
        ) from err
    if device.type == "cpu" and kind not in CPU_FUSED_OPTIMIZERS:
        raise ValueError(
            f"table {table.path}: {optimizer_class.__name__} is fused on CUDA only. On a CPU FBGEMM fuses "
            "torch.optim.SGD, torch.optim.Adagrad and torchrec.optim.RowWiseAdagrad: take one of these (in the "
            "place of Adam: RowWiseAdagrad, whose state is one number a row)."
        )
    unused = list(_UNUSED.get(kind, ()))
    if kind is EmbOptimType.EXACT_ROWWISE_ADAGRAD and (device.type == "cpu" or not kwargs.get("weight_decay_mode")):
        unused.append("weight_decay")
    refused = inspect.signature(optimizer_class).parameters.keys() - KERNEL_ARGUMENTS.keys() - {"lr"}
    lost = [f"{name}={value!r}" for name, value in kwargs.items() if name in refused or (value and name in unused)]
    if lost:
        raise ValueError(
            f"table {table.path}: FBGEMM's fused {optimizer_class.__name__} has no {', '.join(lost)} on this device; "
            "the table would be trained without. Leave it out, or take another optimizer. To keep this one for tables "
            "that are whole on every rank: in configure_optimizers, with sharding='data_parallel' and no "
            "fused_optimizer."
        )


def warn_of_dense_tables(dense: list[Table], asked: Mapping[str, str] | None) -> None:
    """Warn of tables that the dense optimizer has to train, though the user may not expect it.

    Args:
        dense: Tables with a dense kernel that are not replicas.
        asked: Sharding types that the user has named, by table; None if the plan or planner is the user's.
    """
    data_parallel = some(table.path for table in dense if table.fused_optimizer)
    if data_parallel:
        warnings.warn(
            f"{data_parallel}: sharded data-parallel, so the optimizer applied in backward does not train "
            "these tables; the optimizer of configure_optimizers has to.",
            UserWarning,
            stacklevel=2,
        )
    trained = [table for table in dense if table.parameter.requires_grad and not table.fused_optimizer]
    left_whole = some(table.path for table in trained if asked is not None and table.name not in asked)
    if left_whole:
        warnings.warn(
            f"no fused optimizer for {left_whole}: the planner made these tables data-parallel. Every rank holds "
            "them whole, and the optimizer of configure_optimizers has to train them. To shard them, give the strategy "
            "fused_optimizer=(torch.optim.SGD, {'lr': 0.1}), say.",
            UserWarning,
            stacklevel=2,
        )
