"""The cuts that a sink holds: which are whole, what they lack, and what their headers say."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from .parts import Header, Part, PartError, PartName, decode, parse_names, read_header
from .sink import DeltaSink

CutId = tuple[int, int]
"""Generation and step: cuts follow each other in this order."""


class CutError(ValueError):
    """What a sink holds makes no tables: parts are missing, repeated, out of order, or of another run."""


class LostError(CutError):
    """What a replica has applied was lost in its sink: nothing there can follow it."""


@dataclass(frozen=True)
class Cut:
    """The names of one cut's parts.

    Args:
        at: Generation and step.
        names: Of all chunks that are there, sorted.
    """

    at: CutId
    names: tuple[PartName, ...]

    @property
    def generation(self) -> int:
        """Of the fit that wrote it."""
        return self.at[0]

    @property
    def step(self) -> int:
        """Batches that had been trained."""
        return self.at[1]

    @property
    def num_ranks(self) -> int:
        """How many ranks write a part of it."""
        return self.names[0].world_size

    @cached_property
    def conflict(self) -> str | None:
        """Why its parts cannot belong together, or None."""
        worlds = sorted({name.world_size for name in self.names})
        if len(worlds) > 1:
            ranks = " and of ".join(f"{world} ranks" for world in worlds)
            return (
                f"{as_words(self.at)} has parts of {ranks}: two trainings have written into this sink. Give each run a "
                "sink of its own."
            )
        for rank, names in groupby(self.names, key=lambda name: name.rank):
            counts = sorted({name.num_chunks for name in names})
            if len(counts) > 1:
                chunks = " and of ".join(f"{count} chunks" for count in counts)
                return (
                    f"{as_words(self.at)} has the part of rank {rank} twice, of {chunks}: two trainings have written "
                    "into this sink. Give each run a sink of its own."
                )
        return None

    @cached_property
    def missing(self) -> tuple[str, ...]:
        """The names of the chunks that are not there; `*` stands for the chunks of a part that is not there at all."""
        there = set(self.names)
        lacks = []
        for rank in range(self.num_ranks):
            own = [name for name in self.names if name.rank == rank]
            if not own:
                lacks.append(f"{str(self.names[0]._replace(rank=rank)).partition('-c')[0]}-c*")
                continue
            expected = (own[0]._replace(chunk=chunk) for chunk in range(own[0].num_chunks))
            lacks += [str(name) for name in expected if name not in there]
        return tuple(lacks)

    @cached_property
    def lacking_ranks(self) -> frozenset[int]:
        """The ranks of which a chunk is not there."""
        num_there = Counter(name.rank for name in self.names)
        num_chunks = {name.rank: name.num_chunks for name in self.names}
        return frozenset(rank for rank in range(self.num_ranks) if num_there[rank] < num_chunks.get(rank, 1))

    @property
    def is_whole(self) -> bool:
        """Whether every chunk of every rank's part is there."""
        return self.conflict is None and not self.missing

    def first_chunks(self) -> list[PartName]:
        """Return the name of each part's first chunk."""
        return [name for name in self.names if name.chunk == 0]


@dataclass(frozen=True)
class Head:
    """What the headers of a whole cut say.

    Args:
        header: Of one of its parts.
        after: The cut that it follows; None where every part is a base.
        bases: The ranks whose parts are bases.
        is_void: Whether a rank says that the cut must not be applied.
    """

    header: Header
    after: CutId | None
    bases: frozenset[int]
    is_void: bool


def group(names: Iterable[str]) -> list[Cut]:
    """Return the cuts to which the names in a sink belong, in order; other names are left out."""
    return [Cut(at, tuple(parts)) for at, parts in groupby(parse_names(set(names)), key=lambda name: name.cut)]


def read_head(sink: DeltaSink, cut: Cut) -> Head:
    """Read the headers of a whole cut, from the first chunk of each part.

    Raises:
        KeyError: A part is not there any more.
        PartError: One is torn, of another schema, or no part.
        CutError: They do not belong together.
    """
    headers: list[Header] = []
    for name in cut.first_chunks():
        header = read_header(sink.read(str(name)), str(name))
        check_name(header, name)
        headers.append(header)
    for header in headers[1:]:
        check_same(headers[0], header)
    follows = {header.after for header in headers if header.after is not None}
    if len(follows) > 1:
        followed = " and ".join(map(as_words, sorted(follows)))
        raise CutError(f"{as_words(cut.at)} does not fit together: its parts follow {followed}.")
    after = next(iter(follows), None)
    bases = frozenset(header.rank for header in headers if header.is_base)
    return Head(headers[0], after, bases, any(header.is_void for header in headers))


def read_parts(sink: DeltaSink, names: Iterable[PartName], head: Head) -> Iterator[tuple[Part, bytes]]:
    """Read chunks of a cut one after the other.

    Args:
        sink: Where they are.
        names: Which.
        head: What the cut's first chunks say; the others must say the same.

    Yields:
        The chunk, and the last bytes of its form, which are its checksum.

    Raises:
        KeyError: A chunk is not there any more.
        PartError: It is torn, of another schema, or no part.
        CutError: It does not belong to this cut.
    """
    for name in names:
        data = sink.read(str(name))
        part = decode(data, str(name))
        check_name(part.header, name)
        check_same(head.header, part.header)
        if part.header.is_base != (name.rank in head.bases) or part.header.after not in (None, head.after):
            raise CutError(f"{name} does not fit the first chunk of its part: the two follow different cuts.")
        yield part, data[-8:]


def check_name(header: Header, name: PartName) -> None:
    """Check that a chunk is what its name says.

    Raises:
        PartError: It is another one.
    """
    if header.name != name:
        raise PartError(
            f"{name} says of itself that it is {header.name}: a part was copied or renamed. Only names that the "
            "training gave can be read."
        )


def check_same(one: Header, other: Header) -> None:
    """Check that two parts can belong to one cut.

    Raises:
        CutError: They differ in what all parts of a cut have in common.
    """
    if other.run != one.run:
        raise CutError(
            f"{other.name} is of the run {other.run!r}, {one.name} of the run {one.run!r}. Give each run a sink of its "
            "own."
        )
    for what in ("tables", "num_pending", "global_step", "fit", "found"):
        if getattr(one, what) != getattr(other, what):
            raise CutError(
                f"{other.name} and {one.name} are parts of one cut and differ in {what}: {getattr(other, what)} and "
                f"{getattr(one, what)}. Two trainings have written into this sink: give each run a sink of its own."
            )


def as_words(at: CutId | None) -> str:
    """Return what messages call a cut."""
    return "no cut" if at is None else f"the cut of generation {at[0]}, step {at[1]}"
