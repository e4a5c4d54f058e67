"""The module's `state_dict` in a folder: `torch.distributed.checkpoint` holds its tensors, `meta.pt` all else.

`torch.distributed.checkpoint` would divide lists and dicts into their elements, and load as many as the new module has.
What is in a sharded module is read into the module's memory. All else is read as it was saved, and the modules'
`load_state_dict` takes it: it may have another shape, dtype or structure than the new module's.
"""

from collections import OrderedDict
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

import torch
from torch import Tensor, nn
from torch.distributed.checkpoint.metadata import Metadata, TensorStorageMetadata
from torchrec.distributed.types import ShardedTensor

from ..compat.torch import take_versions
from ..storage import Place
from ..tables import sharded_modules
from ..text import some
from .parts import FUSED, MODEL, MODEL_OBJECTS, SHARDED_NAMES, TABLE_OPTIMIZERS
from .table_state import StateKey

OTHER_TABLES = "Was it saved from other tables?"


def take_tensors(checkpoint: dict[str, Any], model: nn.Module) -> dict[str, Tensor]:
    """Move the tensors of the module's `state_dict` out of Lightning's checkpoint, in place; return them by name."""
    state_dict = checkpoint.pop("state_dict")
    tensors = {key: value for key, value in state_dict.items() if _can_be_held(value)}
    others = {key: value for key, value in state_dict.items() if key not in tensors}
    checkpoint[MODEL_OBJECTS] = ordered(others, like=state_dict)
    within = _inside_sharded(model)
    checkpoint[SHARDED_NAMES] = [key for key in tensors if key.startswith(within)]
    return tensors


def restore_objects(checkpoint: dict[str, Any], tensors: Mapping[str, Any]) -> None:
    """Put the module's `state_dict` into a checkpoint of which `take_tensors` has taken the tensors."""
    objects = checkpoint.pop(MODEL_OBJECTS, OrderedDict())
    checkpoint["state_dict"] = ordered({**tensors, **objects}, like=objects)


def may_have_rows(part: str, name: str, rest: Mapping[str, Any]) -> bool:
    """Whether increments may have rows of a piece, and not the whole piece; `rest` is what `meta.pt` has."""
    return part == FUSED or (part == MODEL and name in rest.get(SHARDED_NAMES, (name,)))


def ordered(values: Mapping[str, Any], *, like: Mapping[str, Any]) -> OrderedDict[str, Any]:
    """Return values as a `state_dict` with the versions of modules of another, which their loading asks for."""
    state_dict = OrderedDict(values)
    take_versions(state_dict, like)
    return state_dict


def _can_be_held(value: Any) -> bool:
    """Whether a value is a tensor that `torch.distributed.checkpoint` can hold."""
    if isinstance(value, ShardedTensor):
        return True
    return isinstance(value, Tensor) and value.layout is torch.strided and not value.is_quantized


def _inside_sharded(model: nn.Module) -> tuple[str, ...]:
    """Return how the names of what sharded modules have begin in the model's `state_dict`."""
    sharded = {*sharded_modules(model).values()}
    names = (name for name, module in model.named_modules(remove_duplicate=False) if module in sharded)
    return tuple(f"{name}." for name in names)


@dataclass(slots=True)
class Listed:
    """What a folder's list of tensors has."""

    pieces: dict[str, dict[str, Any]] = field(default_factory=lambda: {MODEL: {}, FUSED: {}, TABLE_OPTIMIZERS: {}})
    """Part -> name -> (shape, dtype); None for an object of the module."""
    paths: dict[str, Sequence[str | int]] = field(default_factory=dict)
    """The keys of what was saved inside lists and dicts of the module, by its name; only older folders have such."""

    def add(self, metadata: Metadata) -> None:
        """Add what a list of `torch.distributed.checkpoint` has."""
        for name, entry in metadata.state_dict_metadata.items():
            part, _, key = name.partition(".")
            if isinstance(entry, TensorStorageMetadata):
                self.pieces.setdefault(part, {})[key] = entry.size, entry.properties.dtype
            elif part == MODEL:
                self.pieces[part][key] = None
            keys = (metadata.planner_data or {}).get(name, ())
            if part == MODEL and len(keys) > 2:
                self.paths[key] = keys[1:]


class ModelLoading:
    """Loads the state of a module from a folder."""

    def __init__(self, model: nn.Module, rest: dict[str, Any], listed: Listed) -> None:
        """Take this package's entries out of what `meta.pt` has."""
        self._own = model.state_dict()
        within = _inside_sharded(model)
        self._sharded = {key: value for key, value in self._own.items() if key.startswith(within)}
        self._objects: OrderedDict[str, Any] = rest.pop(MODEL_OBJECTS, OrderedDict())
        self._listed, self._saved = listed, listed.pieces[MODEL]
        of_fused = {StateKey.parse(name).weight for name in listed.pieces[FUSED]}  # an older folder says no more
        sharded_there = {*rest.pop(SHARDED_NAMES, of_fused)}
        self._of_tables = {
            key for key in self._saved if key.startswith(within) or key in sharded_there - self._own.keys()
        }

    def check(self, place: Place, *, strict: bool) -> None:
        """Raise a RuntimeError for other tables if it is `strict`, and for an object in the place of a tensor."""
        missing = some(sorted(self._sharded.keys() - self._saved.keys()))
        unexpected = some(sorted(self._of_tables - self._sharded.keys()))
        if strict and (missing or unexpected):
            raise RuntimeError(
                f"could not load {place} into this model. {OTHER_TABLES}"
                f"{f' Missing in the checkpoint: {missing}.' if missing else ''}"
                f"{f' Not in this model: {unexpected}.' if unexpected else ''}"
            )
        objects = [key for key, entry in self._saved.items() if entry is None]
        if changed := some(sorted(key for key in objects if isinstance(self._own.get(key), Tensor))):
            raise RuntimeError(f"could not load {place} into this model: its {changed} are objects, not tensors.")

    def pieces(self) -> dict[str, Any]:
        """Return what the folder's tensors are read into, by name; None for an object."""
        sharded = {key: value for key, value in self._sharded.items() if key in self._saved}
        others = {key: entry for key, entry in self._saved.items() if key not in self._of_tables}
        return sharded | {
            key: None if entry is None else torch.empty(entry[0], dtype=entry[1]) for key, entry in others.items()
        }

    def state_dict(self, pieces: Mapping[str, Any]) -> OrderedDict[str, Any]:
        """Return the module's `state_dict` once `pieces` are read."""
        found: dict[Any, Any] = {}
        for key, value in pieces.items():
            put_at(found, self._listed.paths.get(key, (key,)), value)
        others = {key: with_lists(value) for key, value in found.items()}
        return ordered({**self._sharded, **others, **self._objects}, like=self._objects)


def put_at(state: dict[Any, Any], keys: Sequence[str | int], value: Any) -> None:
    """Put a value into nested dicts, under one key in the other; those of lists are numbers."""
    for key in keys[:-1]:
        state = state.setdefault(key, {})
    state[keys[-1]] = value


def with_lists(value: Any) -> Any:
    """Return what `put_at` has made, with lists in the place of dicts whose keys are numbers."""
    if not isinstance(value, dict):
        return value
    inside = {key: with_lists(one) for key, one in value.items()}
    if inside and all(isinstance(key, int) for key in inside):
        return [inside[key] for key in sorted(inside)]
    return inside


def move_unsharded(model: nn.Module, device: torch.device) -> None:
    """Move what is not in sharded modules, as `model.to` does: metrics move the lists that they have loaded."""
    sharded = {*sharded_modules(model).values()}

    def visit(module: nn.Module) -> None:
        inside = sharded.intersection(module.modules())
        if not inside:
            module.to(device)
        elif module not in inside:
            for child in module.children():
                visit(child)

    visit(model)
