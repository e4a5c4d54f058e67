"""Subclasses of TorchRec's collections, which TorchRec does not shard; names of tables that nothing shards."""

from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from torch import nn
from torchrec.distributed.types import ShardedModule, ShardingPlan

from ..compat.torch import compiled_modules
from ..text import some, unknown_name_message
from .ignored_options import WAY_OUT, sharded_by_user
from .replicas import ReplicateTables
from .sharding import Sharding
from .supported_modules import outermost, sharded_modules
from .table import find_tables, training_sharders

_SHARDERS = {sharder.module_type: sharder for sharder in training_sharders()}
_KINDS = tuple(_SHARDERS)


@dataclass(frozen=True, slots=True)
class LeftWhole:
    """A collection that stays whole on every rank, because its class is a subclass of one that TorchRec shards."""

    name: str  # its name in the model
    tables: tuple[str, ...]  # the names of its tables
    message: str


def refuse_compiled_collections(model: nn.Module) -> None:
    """Raise a ValueError for collections that the user has compiled: what is compiled would keep unsharded tables."""
    for name, module in compiled_modules(model).items():
        if isinstance(module, _KINDS):
            raise ValueError(
                f"{name} is a {type(module).__name__} in torch.compile(). Its tables are sharded and looked up outside "
                "of compiled code, and what is compiled would go on with the unsharded ones. Leave the collection "
                "uncompiled, and compile what uses its output."
            )


def collections_left_whole(model: nn.Module) -> list[LeftWhole]:
    """Return the collections of a model that no sharder takes.

    Raise a ValueError for subclasses that would compute something else sharded: TorchRec would shard the collections
    inside them without the rest, or replace a forward of their own.
    """
    found = []
    for name, module in _collections(model).items():
        kind, base = type(module), _base(module)
        inner = {f"{name}.{path}": one for path, one in module.named_modules() if path and isinstance(one, _KINDS)}
        if kind is base:
            _refuse_lost_forwards(name, module, inner)
        elif inner:
            raise ValueError(
                f"{name} is a {kind.__name__}, a subclass of {base.__name__}. TorchRec shards modules by their exact "
                f"class: it would shard {some(inner)} alone, without the rest of a {base.__name__}. {_way_out(base)}"
            )
        else:
            tables = tuple(_SHARDERS[base].shardable_parameters(module))
            message = (
                f"{name} is a {kind.__name__}, a subclass of {base.__name__}. TorchRec shards modules by their exact "
                f"class, so its tables ({some(tables)}) stay whole on every rank, and the optimizer of "
                "configure_optimizers has to train them: sharding=, fused_optimizer= and the other options of the "
                f"strategy do nothing for them, and they are not looked up early. {_way_out(base)}"
            )
            found.append(LeftWhole(name, tables, message))
    return found


def _collections(model: nn.Module) -> dict[str, nn.Module]:
    """Return the outermost unsharded collections of a model, also those whose class is a subclass."""
    found = outermost(model, lambda one: isinstance(one, (*_KINDS, ShardedModule)))
    return {name: module for name, module in found.items() if not isinstance(module, ShardedModule)}


def _base(module: nn.Module) -> type[nn.Module]:
    return next(cls for cls in type(module).__mro__ if cls in _SHARDERS)


def _refuse_lost_forwards(name: str, module: nn.Module, inner: Mapping[str, nn.Module]) -> None:
    for path, one in inner.items():
        base = _base(one)
        if type(one).forward is not base.forward:
            raise ValueError(
                f"{path} is a {type(one).__name__}, a subclass of {base.__name__} with a forward of its own, inside of "
                f"{name} ({type(module).__name__}). Sharded, it would compute what a {base.__name__} does. "
                f"{_way_out(base)}"
            )


def _way_out(base: type) -> str:
    return (
        f"Make it a {base.__name__}, and put your additions into a module that holds and calls it; or shard it in "
        "configure_model, with a sharder of your own."
    )


def check_named_tables(model: nn.Module, sharding: Sharding, replicate_tables: ReplicateTables) -> None:
    """Raise a ValueError if an option names a module or a table that nothing shards; the same on all ranks."""
    sharded = {name: [*_planned_tables(module)] for name, module in sharded_modules(model).items()}
    if not all(sharded.values()):
        return  # a module of an unknown kind that does not say which tables it has
    for table in find_tables(model):
        sharded.setdefault(table.module, []).append(table.name)
    if isinstance(sharding, ShardingPlan):
        _check_plan(model, sharding, sharded)
    known = [*dict.fromkeys(table for tables in sharded.values() for table in tables)]
    left = {table: one.message for one in collections_left_whole(model) for table in one.tables}
    users = {
        table: f"It is a table of {shown}, which is sharded already. {WAY_OUT}, or leave its name out."
        for name, shown in sharded_by_user(model).items()
        for table in sharded[name]
    }
    of_strategy = {table for name, tables in sharded.items() if name not in sharded_by_user(model) for table in tables}
    known = [table for table in known if table in of_strategy]
    left = users | left
    for option, given in {"sharding": sharding, "replicate_tables": replicate_tables}.items():
        # A string is a sharding type; TypeErrors of other wrong arguments were raised before.
        names = given if isinstance(given, (Mapping, Sequence)) and not isinstance(given, str) else ()
        for named in map(str, names):
            if named not in known:
                raise ValueError(f"{option}: {_nothing_shards('table', named, known, left.get(named))}")


def _planned_tables(module: Any) -> Iterable[str]:
    kept = getattr(module, "kept_plan", None)
    return kept[0] if kept else getattr(module, "module_sharding_plan", None) or ()


def _check_plan(model: nn.Module, plan: ShardingPlan, sharded: Mapping[str, list[str]]) -> None:
    left = {one.name: one.message for one in collections_left_whole(model)}
    names_of = {id(model.get_submodule(name)): name for name in sharded}
    every = dict(model.named_modules(remove_duplicate=False))
    for path, tables in plan.plan.items():
        name = names_of.get(id(every.get(path)))
        if name is None:
            raise ValueError(f"sharding: {_nothing_shards('module', path, [*sharded], left.get(path))}")
        for table in tables:
            if table not in sharded[name]:
                raise ValueError(f"sharding, module {path!r}: {_nothing_shards('table', table, sharded[name])}")


def _nothing_shards(kind: str, name: str, known: list[str], why: str | None = None) -> str:
    if why is not None:
        return f"{kind} {name!r} is named, and nothing shards it. {why}"
    if not known:
        return f"{kind} {name!r} is named, and the LightningModule has no table that is sharded. Leave it out."
    return unknown_name_message(kind, name, known)
