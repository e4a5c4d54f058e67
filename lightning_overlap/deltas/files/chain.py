"""Find the next cut of a replica, also after lost files, crashes, resumes and bases."""

import logging
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ...storage import Store
from ...text import some
from .cuts import Cut, CutError, CutId, Head, LostError, as_words, read_head
from .form import FileName, parse_names, read_header

_log = logging.getLogger(__name__)
_MOST_HEADS = 10_000
QUICK_S = 2.0  # seconds in which no training can restart and reach the same step again


class Move(NamedTuple):
    """Files that bring a replica to a newer state: of one cut, or of the cuts from every rank's base on."""

    files: Sequence[tuple[Head, FileName]]  # in order, each with the head of its cut
    is_base: bool  # whether every rank's files begin with a base, so that the replica needs nothing earlier


class Chain:
    """The cuts in a sink."""

    def __init__(self, sink: Store) -> None:
        self.sink = sink
        self.run: str | None = None  # the accepted training; None accepts any
        self.fit = ""  # the fit that wrote the last applied cut; empty if unknown
        self.cuts: list[Cut] = []  # of the last listing, whole or not, in order
        self._by_generation: dict[int, list[Cut]] = {}
        self._listed, self._unseen_s = time.monotonic(), 0.0  # time of the last listing, and since the previous one
        self._heads: dict[Cut, Head] = {}

    def list_sink(self) -> None:
        """List the sink and sort its files into cuts."""
        now = time.monotonic()
        self._unseen_s, self._listed = now - self._listed, now
        names = parse_names(set(self.sink.names()))
        self.cuts = [Cut(at, tuple(of_cut)) for at, of_cut in groupby(names, key=lambda name: name.cut)]
        self._by_generation = {number: [*cuts] for number, cuts in groupby(self.cuts, key=lambda cut: cut.at[0])}

    def forget(self) -> None:
        """Forget headers, so that they are read again."""
        self._heads.clear()

    def next(self, at: CutId | None) -> Move | None:
        """Return what a replica at this cut (None: a new one) applies next; a CutError names missing files."""
        if not self.cuts:
            return None
        try:
            return self._first() if at is None else self._following(at)
        except CutError as err:
            if isinstance(err, LostError):
                self.forget()
            start = None if at is None else self.start(newer_than=at)
            if start is None and isinstance(err, LostError):
                start = self.start()
            if start is not None:
                base = as_words(start.files[-1][1].cut)
                _log.warning("embedding deltas: starting again from the base of %s: %s", base, err)
            elif not self._base_is_coming():
                raise
            return start

    def _following(self, at: CutId) -> Move | None:
        """Return the first cut of the newest generation that can follow, else the next cut of the same generation."""
        newest = self.cuts[-1]
        firsts = [cuts[0] for generation, cuts in self._by_generation.items() if generation > at[0]]
        own = self._by_generation.get(at[0], [])
        place = bisect_right(own, at, key=lambda cut: cut.at)
        problems: list[str] = []
        waits = False
        for cut in [*reversed(firsts), *own[place : place + 1]]:
            is_own = cut.at[0] == at[0]
            if cut.is_whole:
                head = self._head(cut)
                self._check_not_lost(head, at)
                if is_own and head.is_void:
                    return self.start(newer_than=at)  # None: wait for the base
                if head.after is None or head.after == at or (head.after < at and not is_own):
                    files = [(head, name) for name in cut.names]
                    return Move(files, is_base=len(head.bases) == cut.names[0].world_size)
                follows, applied = as_words(head.after), as_words(at)
                problems.append(f"{as_words(cut.at)} follows {follows}, which is missing; applied so far: {applied}.")
            elif self._is_broken(cut):
                problems.append(_lacks(cut))
            elif cut.at[0] == newest.at[0]:
                waits = True
            # otherwise its fit crashed in its first cut, and a newer generation replaces it
        if problems and not waits:
            raise CutError("\n".join(problems))
        if newest.at <= at and newest.is_whole:  # the sink may have been emptied or written by another fit
            if newest.at < at or self._unseen_s > QUICK_S:
                self._heads.pop(newest, None)
            head = self._head(newest)
            if newest.at[0] == at[0]:
                self._check_not_lost(head, at)
        return None

    def _check_not_lost(self, head: Head, at: CutId) -> None:
        """Check that a cut of the same generation is of the same fit, and that another fit knew the applied cut."""
        header, problem = head.header, None
        if header.generation == at[0]:
            if self.fit and header.fit and header.fit != self.fit:
                problem = (
                    f"is not of the fit that wrote {as_words(at)}, which is applied: the sink lost files of that fit, "
                    "and the training was resumed from an earlier checkpoint."
                )
        elif head.after is not None and header.found is not None and at > header.found:
            problem = (
                f"replaces only cuts that its fit found in the sink, up to {as_words(header.found)}; applied so far: "
                f"{as_words(at)}, which the sink had lost."
            )
        if problem is not None:
            raise LostError(f"{as_words(header.name.cut)} {problem}")

    def _first(self) -> Move | None:
        if (start := self.start()) is not None:
            return start
        newest = self._by_generation[self.cuts[-1].at[0]][0]
        if not newest.is_whole and not self._is_broken(newest):
            return None  # it is being written
        if any(cut.is_whole and self._head(cut).is_void for cut in self.cuts):
            return None  # a base of every rank follows
        broken = [cut for cut in self.cuts if self._is_broken(cut)]
        raise CutError(
            f"the sink lacks a base of every rank, so a new replica cannot start. It has {len(self.cuts)} cuts, from "
            f"{as_words(self.cuts[0].at)} to {as_words(self.cuts[-1].at)}. "
            + "".join(f"{_lacks(cut)} " for cut in broken[:3])
            + "Start from a state that a replica saved, or let the training write a base."
        )

    def start(self, newer_than: CutId | None = None) -> Move | None:
        """Return the newest base of every rank, in one cut or several consecutive cuts."""
        for cuts in reversed(self._by_generation.values()):
            base_of: dict[int, int] = {}
            for index in reversed(range(len(cuts))):
                cut = cuts[index]
                if not cut.is_whole or self._head(cut).is_void:
                    base_of.clear()  # later cuts do not follow earlier cuts
                    continue
                head = self._head(cut)
                if base_of and self._head(cuts[index + 1]).after not in (None, cut.at):
                    base_of.clear()
                if newer_than is not None and not base_of and cut.at <= newer_than:
                    return None
                for rank in head.bases:
                    base_of.setdefault(rank, index)
                if len(base_of) == cut.names[0].world_size:
                    last = max(base_of.values())
                    files = [
                        (self._head(taken), name)
                        for place, taken in enumerate(cuts[index : last + 1], index)
                        for name in taken.names
                        if base_of.get(name.rank, last + 1) <= place
                    ]
                    return Move(files, is_base=True)
        return None

    def _is_broken(self, cut: Cut) -> bool:
        """Return whether a cut will never be whole; a newer generation replaces a cut that a crash left incomplete."""
        if cut.conflict is not None:
            return True
        later = (other for other in self.cuts if other.at[0] == cut.at[0] and other.at > cut.at)
        wrote_later = {name.rank for other in later for name in other.names}
        return bool(cut.missing.keys() & wrote_later)

    def _base_is_coming(self) -> bool:
        """Return whether a base is being written, which makes earlier problems irrelevant."""
        for cut in reversed(self.cuts):
            if cut.is_whole or self._is_broken(cut):
                return False
            first = cut.names[0]
            if read_header(self.sink.read(str(first)), str(first)).is_base:
                return True
        return False

    def _head(self, cut: Cut) -> Head:
        if (head := self._heads.get(cut)) is None:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            head = self._heads[cut] = read_head(self.sink, cut)
        if self.run is not None and head.header.run != self.run:
            raise CutError(
                f"{as_words(cut.at)} is of the run {head.header.run!r}, this replica is of the run {self.run!r}. Start "
                "a new replica, or use the sink of this replica's run."
            )
        return head


def _lacks(cut: Cut) -> str:
    lacks = [name for names in cut.missing.values() for name in names]
    return cut.conflict or f"{as_words(cut.at)} lacks {some(lacks, 8)}, but has later files of these ranks."
