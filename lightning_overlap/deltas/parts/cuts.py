"""The cuts that a sink holds: which are whole, what they lack, and what their headers say."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from functools import cached_property
from itertools import groupby
from typing import Protocol

from .form import Header, Part, PartError, PartName, decode, read_header

CutId = tuple[int, int]
"""Generation and step: cuts follow each other in this order."""


_TWO_TRAININGS = "two trainings have written into this sink. Give each run a sink of its own."


class PartSource(Protocol):
    """What a chain of cuts reads of a sink."""

    def names(self) -> Iterable[str]:
        """Return the names of all parts."""

    def read(self, name: str) -> bytes:
        """Return a part; raise a KeyError if there is none of that name."""


class CutError(ValueError):
    """What a sink holds makes no tables: parts are missing, repeated, out of order, or of another run."""


class LostError(CutError):
    """The sink has lost cuts that a replica has applied: nothing there can follow them."""


@dataclass(frozen=True)
class Cut:
    """The chunks of one cut that a sink has, sorted; the cut may not be whole."""

    at: CutId
    names: tuple[PartName, ...]

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
            return f"{as_words(self.at)} has parts of {ranks}: {_TWO_TRAININGS}"
        for rank, names in groupby(self.names, key=lambda name: name.rank):
            counts = sorted({name.num_chunks for name in names})
            if len(counts) > 1:
                chunks = " and of ".join(f"{count} chunks" for count in counts)
                return f"{as_words(self.at)} has the part of rank {rank} twice, of {chunks}: {_TWO_TRAININGS}"
        return None

    @cached_property
    def missing(self) -> dict[int, list[str]]:
        """By rank the names of its chunks that are not there; `*` stands for all chunks of a part."""
        found: dict[int, list[str]] = {}
        there = {name.rank: name for name in self.names}
        for rank in range(self.num_ranks):
            if rank not in there:
                found[rank] = [f"{str(self.names[0]._replace(rank=rank)).partition('-c')[0]}-c*"]
                continue
            expected = {there[rank]._replace(chunk=chunk) for chunk in range(there[rank].num_chunks)}
            if lacks := sorted(expected.difference(self.names)):
                found[rank] = list(map(str, lacks))
        return found

    @property
    def is_whole(self) -> bool:
        """Whether every chunk of every rank's part is there."""
        return self.conflict is None and not self.missing


@dataclass(frozen=True)
class Head:
    """What the headers of a whole cut say."""

    header: Header
    """The header of one of its parts."""
    after: CutId | None
    """The cut that it follows; None where every part is a base."""
    bases: frozenset[int]
    """The ranks whose parts are bases."""
    is_void: bool
    """Whether a rank says that the cut must not be applied."""


def read_head(sink: PartSource, cut: Cut) -> Head:
    """Read the headers of a whole cut, from the first chunk of each part.

    Raises:
        KeyError: A part is not there any more.
        PartError: One is torn, of another schema, or no part.
        CutError: They do not belong together.
    """
    headers: list[Header] = []
    for name in cut.names:
        if name.chunk == 0:
            headers.append(read_header(sink.read(str(name)), str(name)))
            _check_belongs(headers[-1], name, headers[0])
    follows = {header.after for header in headers if header.after is not None}
    if len(follows) > 1:
        followed = " and ".join(map(as_words, sorted(follows)))
        raise CutError(f"{as_words(cut.at)} does not fit together: its parts follow {followed}.")
    after = next(iter(follows), None)
    bases = frozenset(header.rank for header in headers if header.is_base)
    return Head(headers[0], after, bases, any(header.is_void for header in headers))


def part_of(data: bytes, name: PartName, head: Head) -> Part:
    """Read a chunk, and check that it belongs to its cut.

    Args:
        data: The chunk.
        name: Its name in the sink.
        head: What `read_head` returned for its cut.

    Raises:
        PartError: It is torn, of another schema, or no part.
        CutError: It does not belong to the cut.
    """
    part = decode(data, str(name))
    _check_belongs(part.header, name, head.header)
    if part.header.is_base != (name.rank in head.bases) or part.header.after not in (None, head.after):
        raise CutError(f"{name} does not fit the first chunk of its part: the two follow different cuts.")
    return part


def _check_belongs(header: Header, name: PartName, first: Header) -> None:
    """Check that a chunk is what its name says, and can belong to the cut of another one."""
    if header.name != name:
        raise PartError(
            f"{name} says of itself that it is {header.name}: a part was copied or renamed. Only names that the "
            "training gave can be read."
        )
    if header.run != first.run:
        raise CutError(
            f"{name} is of the run {header.run!r}, {first.name} of the run {first.run!r}. Give each run a sink of its "
            "own."
        )
    for what in ("tables", "num_pending", "global_step", "fit", "found"):
        own, others = getattr(header, what), getattr(first, what)
        if own != others:
            raise CutError(
                f"{name} and {first.name} are parts of one cut and differ in {what} ({own} and {others}): "
                f"{_TWO_TRAININGS}"
            )


def as_words(at: CutId | None) -> str:
    """Return what messages call a cut."""
    return "no cut" if at is None else f"the cut of generation {at[0]}, step {at[1]}"
