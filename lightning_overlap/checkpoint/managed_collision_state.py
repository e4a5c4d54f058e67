"""State of managed collision modules that TorchRec's `state_dict` lacks, and of what draws the rows that they reset.

It differs by rank, so each piece has its rank in its name, `3:mc._managed_collision_collection...t0:seen`.
"""

import re
from collections.abc import Iterable, Mapping, Sequence
from dataclasses import dataclass
from typing import NamedTuple

import torch
from torch import Tensor, nn
from torchrec.modules.mc_modules import MCHManagedCollisionModule

from ..compat.torchrec import SeenIds, forget_seen_ids, ranks_of, seen_ids, set_seen_ids
from ..distributed import Group, gather_objects
from ..tables import hands_out_rows
from .moved_ids import counting_modules, exchange

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


def collision_state(model: nn.Module, group: Group, generators: Generators | None) -> dict[str, Tensor]:
    """Return this rank's pieces, in the modules' memory; none for a model without managed collision modules.

    `generators` are the states at the place where a resumed fit continues; None: the present ones.
    """
    if not hands_out_rows(model):
        return {}
    rank, generators = _rank_of(group), generators or Generators.now()
    found = {_Key(rank, "", _CPU): generators.cpu}
    if generators.cuda is not None:
        found[_Key(rank, "", _CUDA)] = generators.cuda
    for name, module in counting_modules(model).items():
        seen = seen_ids(module)
        found[_Key(rank, name, _NUMBERS)] = torch.tensor([seen.iteration, seen.evicted_at, seen.num_at_most])
        found[_Key(rank, name, _SEEN)] = seen.ids
        found |= {_Key(rank, name, f"{_METADATA}{kind}"): values for kind, values in seen.metadata.items()}
    return {str(key): piece for key, piece in found.items()}


def pieces_for(saved: Iterable[str], group: Group) -> list[str]:
    """Return the names of the saved pieces that this rank reads: its own, or a share if other ranks saved them."""
    rank, size = _rank_of(group), _size_of(group)
    keys = list(map(_Key.parse, saved))
    if _are_of_these_ranks(keys, group):
        return [str(key) for key in keys if key.rank == rank]
    return [str(key) for key in keys if key.rank % size == rank and key.module]


def load_collision_state(model: nn.Module, saved: Mapping[str, Tensor], group: Group) -> Generators | None:
    """Let the managed collision modules go on from the pieces `pieces_for` this rank; all ranks call this.

    Returns the states of this rank's generators, if as many ranks saved them. Ids that other ranks have seen go to the
    ranks that look them up now. Without pieces a module has seen no id since an eviction.
    """
    rank, pieces = _rank_of(group), {_Key.parse(name): piece for name, piece in saved.items()}
    by_rank = gather_objects(list(pieces), group)
    same = _are_of_these_ranks([key for keys in by_rank for key in keys], group)
    for name, module in counting_modules(model).items():
        found = [_seen(pieces, key) for key in sorted(pieces) if key.module == name and key.kind == _NUMBERS]
        if not any(key.module == name for keys in by_rank for key in keys):
            forget_seen_ids(module)
        elif same:
            set_seen_ids(module, found[0])
        else:
            set_seen_ids(module, _share(module, found, group))
    cpu = pieces.get(_Key(rank, "", _CPU))
    return None if cpu is None or not same else Generators(cpu.clone(), pieces.get(_Key(rank, "", _CUDA)))


def _seen(pieces: Mapping[_Key, Tensor], key: _Key) -> SeenIds:
    iteration, evicted_at, num_at_most = map(int, pieces[key])
    metadata = {
        other.kind.removeprefix(_METADATA): values
        for other, values in pieces.items()
        if other[:2] == key[:2] and other.kind.startswith(_METADATA)
    }
    return SeenIds(iteration, evicted_at, num_at_most, pieces[key._replace(kind=_SEEN)], metadata)


def _share(module: MCHManagedCollisionModule, found: Sequence[SeenIds], group: Group) -> SeenIds:
    """Return what this rank's module goes on from, from parts of what the modules of other ranks had seen."""
    numbers = [(one[:3], sorted(one.metadata)) for one in found]
    everyone = [numbers for of_rank in gather_objects(numbers, group) for numbers in of_rank]
    iteration, evicted_at, num_at_most = (max(column) for column in zip(*(one for one, _ in everyone), strict=True))
    names = max((names for _, names in everyone), key=len)  # those of a module without a batch lack them
    columns = [torch.stack([one.ids, *(one.metadata.get(name, one.ids) for name in names)], 1).cpu() for one in found]
    values = torch.cat([torch.empty((0, 1 + len(names)), dtype=torch.int64), *columns])
    ids, *metadata = exchange(values, ranks_of(module, values[:, 0], _size_of(group)), group).unbind(1)
    # As many as the first batch has made room for, beside those.
    room = num_at_most if num_at_most == -1 else num_at_most + len(ids)
    return SeenIds(iteration, evicted_at, room, ids, dict(zip(names, metadata, strict=True)))


def _are_of_these_ranks(keys: Sequence[_Key], group: Group) -> bool:
    return {key.rank for key in keys} == set(range(_size_of(group)))


def _rank_of(group: Group) -> int:
    return 0 if group is None else group.rank()


def _size_of(group: Group) -> int:
    return 1 if group is None else group.size()
