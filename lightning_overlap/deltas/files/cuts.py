"""The cuts in a sink: which are whole, which files are missing, and their headers."""

from dataclasses import dataclass
from functools import cached_property
from itertools import groupby

from ...storage import Store
from .form import CutFile, FileError, FileName, Header, decode, read_header

CutId = tuple[int, int]  # generation and step, the order of cuts
_TWO_TRAININGS = "two trainings wrote into this sink. Use a separate sink for each run."


class CutError(ValueError):
    """Files in a sink are missing, repeated, out of order, or of another run."""


class LostError(CutError):
    """The sink lost cuts that a replica has applied, so that no cut can follow them."""


@dataclass(frozen=True)
class Cut:
    """The files of a cut in a sink, sorted; some may be missing."""

    at: CutId
    names: tuple[FileName, ...]

    @cached_property
    def conflict(self) -> str | None:
        """Why the files cannot belong together, or None."""
        worlds = sorted({name.world_size for name in self.names})
        if len(worlds) > 1:
            ranks = " and of ".join(f"{world} ranks" for world in worlds)
            return f"{as_words(self.at)} has files of {ranks}: {_TWO_TRAININGS}"
        for rank, names in groupby(self.names, key=lambda name: name.rank):
            counts = sorted({name.num_chunks for name in names})
            if len(counts) > 1:
                totals = " and ".join(f"one of {count}" for count in counts)
                return f"{as_words(self.at)} has several series of files of rank {rank}, {totals}: {_TWO_TRAININGS}"
        return None

    @cached_property
    def missing(self) -> dict[int, list[str]]:
        """Rank -> names of missing files; `*` stands for all files of a rank."""
        found: dict[int, list[str]] = {}
        there = {name.rank: name for name in self.names}
        for rank in range(self.names[0].world_size):
            if rank not in there:
                found[rank] = [f"{str(self.names[0]._replace(rank=rank)).partition('-c')[0]}-c*"]
                continue
            expected = {there[rank]._replace(chunk=chunk) for chunk in range(there[rank].num_chunks)}
            if lacks := sorted(expected.difference(self.names)):
                found[rank] = list(map(str, lacks))
        return found

    @property
    def is_whole(self) -> bool:
        """Whether every file of every rank exists."""
        return self.conflict is None and not self.missing


@dataclass(frozen=True)
class Head:
    """The header of one file of a whole cut, and the cut that it follows (None if it is a base of every rank)."""

    header: Header
    after: CutId | None
    bases: frozenset[int]  # the ranks whose files are a base
    is_void: bool


def read_head(sink: Store, cut: Cut) -> Head:
    """Read the headers of a whole cut, from the first file of each rank; a FileNotFoundError if one was removed."""
    headers: list[Header] = []
    for name in cut.names:
        if name.chunk == 0:
            headers.append(read_header(sink.read(str(name)), str(name)))
            _check_belongs(headers[-1], name, headers[0])
    follows = {header.after for header in headers if header.after is not None}
    if len(follows) > 1:
        followed = " and ".join(map(as_words, sorted(follows)))
        raise CutError(f"the files of {as_words(cut.at)} do not belong together: they follow {followed}.")
    bases = frozenset(header.rank for header in headers if header.is_base)
    return Head(headers[0], next(iter(follows), None), bases, any(header.is_void for header in headers))


def file_of(data: bytes, name: FileName, head: Head) -> CutFile:
    """Decode the file `name`; raise a CutError if it does not belong to the cut of `head`."""
    file = decode(data, str(name))
    _check_belongs(file.header, name, head.header)
    if file.header.is_base != (name.rank in head.bases) or file.header.after not in (None, head.after):
        raise CutError(f"{name} and the first file of its rank follow different cuts.")
    return file


def _check_belongs(header: Header, name: FileName, first: Header) -> None:
    """Check that a file has its original name, and belongs to the cut of another file."""
    if header.name != name:
        raise FileError(f"{name} has the header of {header.name}: it was copied or renamed. Restore the original name.")
    if header.run != first.run:
        raise CutError(
            f"{name} is of the run {header.run!r}, {first.name} of the run {first.run!r}. Use a separate sink for each "
            "run."
        )
    for what in ("tables", "num_pending", "global_step", "fit", "found", "epoch", "batch", "row_wise", "raw_ids"):
        own, others = getattr(header, what), getattr(first, what)
        if own != others:
            differ = f"differ in {what} ({own} and {others})"
            raise CutError(f"{name} and {first.name} are of the same cut, but {differ}: {_TWO_TRAININGS}")


def as_words(at: CutId | None) -> str:
    """Return the description of a cut for messages."""
    return "no cut" if at is None else f"the cut of generation {at[0]}, step {at[1]}"
