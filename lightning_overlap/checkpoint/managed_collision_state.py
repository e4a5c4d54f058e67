"""State of managed collision modules that TorchRec's `state_dict` lacks, and of what draws the rows that they reset.

It differs by rank, so each piece has its rank in its name, `3:mc._managed_collision_collection...t0:seen`.
"""

import re
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.mc_modules import ManagedCollisionModule, MCHManagedCollisionModule

from ..compat.torchrec import SeenIds, forget_seen_ids, seen_ids, set_seen_ids
from ..distributed import Group
from ..tables import hands_out_rows, sharded_modules

_NUMBERS, _SEEN, _METADATA, _CPU, _CUDA = "numbers", "seen", "seen ", "cpu", "cuda"  # kinds of state
_NAME = re.compile(r"(?P<rank>\d+):(?P<module>.*):(?P<kind>[^:]+)", re.DOTALL)


class _Key(NamedTuple):
    """The parts of the name of a piece; `str()` returns the name."""

    rank: int
    module: str  # "" for the rank's generators
    kind: str

    def __str__(self) -> str:
        return f"{self.rank}:{self.module}:{self.kind}"

    @classmethod
    def parse(cls, name: str) -> "_Key":
        found = _NAME.fullmatch(name)
        if found is None:
            raise RuntimeError(
                f"the checkpoint's state of managed collision modules has an unknown entry {name!r}. Load another "
                "checkpoint."
            )
        return cls(int(found["rank"]), found["module"], found["kind"])


@dataclass(frozen=True, slots=True, eq=False)
class Generators:
    """The states of this rank's default generators, from which TorchRec draws the rows that it resets."""

    cpu: Tensor
    cuda: Tensor | None  # of the current device, if CUDA is in use

    @classmethod
    def now(cls) -> "Generators":
        """Return copies of the states."""
        return cls(torch.get_rng_state(), torch.cuda.get_rng_state() if torch.cuda.is_initialized() else None)

    def set(self) -> None:
        """Let the generators go on from these states."""
        torch.set_rng_state(self.cpu)
        if self.cuda is not None and torch.cuda.is_initialized():
            torch.cuda.set_rng_state(self.cuda)

    def equal(self, other: "Generators") -> bool:
        """Return whether the states are the same."""
        if self.cuda is None or other.cuda is None:
            return self.cuda is other.cuda and torch.equal(self.cpu, other.cpu)
        return torch.equal(self.cpu, other.cpu) and torch.equal(self.cuda, other.cuda)


def collision_state(model: nn.Module, group: Group) -> dict[str, Tensor]:
    """Return this rank's pieces, in the modules' memory; none for a model without managed collision modules."""
    if not hands_out_rows(model):
        return {}
    rank, generators = _rank_of(group), Generators.now()
    found = {_Key(rank, "", _CPU): generators.cpu}
    if generators.cuda is not None:
        found[_Key(rank, "", _CUDA)] = generators.cuda
    for name, module in counting_modules(model).items():
        seen = seen_ids(module)
        found[_Key(rank, name, _NUMBERS)] = torch.tensor([seen.iteration, seen.evicted_at, seen.num_at_most])
        found[_Key(rank, name, _SEEN)] = seen.ids
        found |= {_Key(rank, name, f"{_METADATA}{kind}"): values for kind, values in seen.metadata.items()}
    return {str(key): piece for key, piece in found.items()}


def own_pieces(saved: Mapping[str, Any], group: Group) -> list[str]:
    """Return the names of the saved pieces that this rank needs: its own, if as many ranks saved them."""
    keys = list(map(_Key.parse, saved))
    if {key.rank for key in keys} != set(range(_size_of(group))):
        return []
    return [str(key) for key in keys if key.rank == _rank_of(group)]


def load_collision_state(model: nn.Module, saved: Mapping[str, Tensor], group: Group) -> Generators | None:
    """Let the managed collision modules go on from saved `own_pieces`; return this rank's generators, if it has them.

    Without its pieces a module has seen no id since an eviction.
    """
    rank, pieces = _rank_of(group), {_Key.parse(name): piece for name, piece in saved.items()}
    for name, module in counting_modules(model).items():
        numbers = pieces.get(_Key(rank, name, _NUMBERS))
        if numbers is None:
            forget_seen_ids(module)
            continue
        ids = pieces[_Key(rank, name, _SEEN)]
        metadata = {
            key.kind.removeprefix(_METADATA): values
            for key, values in pieces.items()
            if key.module == name and key.kind.startswith(_METADATA)
        }
        iteration, evicted_at, num_at_most = map(int, numbers)
        set_seen_ids(module, SeenIds(iteration, evicted_at, num_at_most, ids, metadata))
    cpu = pieces.get(_Key(rank, "", _CPU))
    return None if cpu is None else Generators(cpu.clone(), pieces.get(_Key(rank, "", _CUDA)))


def counting_modules(model: nn.Module) -> dict[str, MCHManagedCollisionModule]:
    """Return this rank's modules that count ids between evictions, by their names, each once."""
    return {
        name: module
        for name, module in collision_modules(model).items()
        if isinstance(module, MCHManagedCollisionModule)
    }


def collision_modules(model: nn.Module) -> dict[str, ManagedCollisionModule]:
    """Return this rank's managed collision modules by their names, the same on all ranks, each once."""
    within = tuple(f"{name}." for name in sharded_modules(model))
    return {
        name: module
        for name, module in model.named_modules()
        if isinstance(module, ManagedCollisionModule) and name.startswith(within)
    }


def _rank_of(group: Group) -> int:
    return 0 if group is None else group.rank()


def _size_of(group: Group) -> int:
    return 1 if group is None else group.size()
