"""Which cut comes next, through lost parts, crashes, resumed trainings and bases; and what nobody needs any more."""

from __future__ import annotations

import logging
import os
import time
from bisect import bisect_right
from collections.abc import Sequence
from itertools import groupby
from typing import NamedTuple

from ..text import some
from .cuts import Cut, CutError, CutId, Head, LostError, as_words, read_head
from .parts import PartName, parse_names, read_header
from .sink import DeltaSink, resolve_sink

_log = logging.getLogger(__name__)
_MOST_HEADS = 10_000
QUICK_S = 2.0
"""In less no training begins again and comes to the same step: from one listing to the next one of a sink."""


class Move(NamedTuple):
    """What brings a replica to a newer state: one cut, or for one that begins, the cuts from its ranks' bases on."""

    chunks: Sequence[tuple[Head, PartName]]
    """What is to be applied, in order: each with what its cut says."""
    is_base: bool
    """Whether a replica needs nothing before it: every rank's parts begin with a base."""


class Chain:
    """Finds the next cut in a sink."""

    def __init__(self, sink: DeltaSink) -> None:
        self.sink = sink
        self.run: str | None = None
        """The training that parts must be of; None takes that of the first cut."""
        self.fit = ""
        """Wrote the cut that was applied last; empty where nobody knows."""
        self.cuts: list[Cut] = []
        """As the sink was listed last."""
        self._by_generation: dict[int, list[Cut]] = {}
        self._listed, self._unseen_s = time.monotonic(), 0.0
        self._heads: dict[Cut, Head] = {}

    def list_sink(self) -> None:
        """Look which cuts the sink has."""
        now = time.monotonic()
        self._unseen_s, self._listed = now - self._listed, now
        names = parse_names(set(self.sink.names()))
        self.cuts = [Cut(at, tuple(parts)) for at, parts in groupby(names, key=lambda name: name.cut)]
        self._by_generation = {number: [*cuts] for number, cuts in groupby(self.cuts, key=lambda cut: cut.at[0])}

    def forget(self) -> None:
        """Read all headers anew."""
        self._heads.clear()

    def next(self, at: CutId | None) -> Move | None:
        """Return what follows a cut, or None where the last listing has nothing yet that does.

        Raises:
            CutError: Parts are missing and no base leads past them; the message names them.
            KeyError: A part is not there any more.
            PartError, SinkError: A part cannot be read.
        """
        if not self.cuts:
            return None
        try:
            return self._first() if at is None else self._following(at)
        except CutError as err:
            is_lost = isinstance(err, LostError)
            if is_lost:
                self.forget()
            start = None if at is None else self.start(newer_than=at)
            if start is None and is_lost:
                start = self.start()
            if start is None and not self._base_is_coming():
                raise
            if start is not None:
                base = as_words(start.chunks[-1][1].cut)
                _log.warning("embedding deltas: begins again with the base of %s: %s", base, err)
            return start

    def _following(self, at: CutId) -> Move | None:
        """Return the next cut: the first of the newest generation that can follow, or the next of the same one."""
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
                    return self.start(newer_than=at)  # or waits for it
                if head.after is None or head.after == at or (head.after < at and not is_own):
                    chunks = [(head, name) for name in cut.names]
                    return Move(chunks, is_base=len(head.bases) == cut.num_ranks)
                follows, applied = as_words(head.after), as_words(at)
                problems.append(f"{as_words(cut.at)} follows {follows}, which is not there; applied so far: {applied}.")
            elif self._is_broken(cut):
                problems.append(_lacks(cut))
            elif cut.at[0] == newest.at[0]:
                waits = True
            # else a crash in its first cut, which a newer generation has made good
        if problems and not waits:
            raise CutError("\n".join(problems))
        if newest.at <= at and newest.is_whole:  # a sink that was emptied, or written again: the header tells for whom
            if newest.at < at or self._unseen_s > QUICK_S:
                self._heads.pop(newest, None)
            head = self._head(newest)
            if newest.at[0] == at[0]:
                self._check_not_lost(head, at)
        return None

    def _check_not_lost(self, head: Head, at: CutId) -> None:
        """Check that a cut of the same generation is of the same fit, and that another fit knew of what was applied."""
        header, problem = head.header, None
        if header.generation == at[0]:
            if self.fit and header.fit and header.fit != self.fit:
                problem = (
                    f"is not of the fit that wrote {as_words(at)}, which is applied: the sink lost its parts, and the "
                    "training was resumed from a checkpoint of before them."
                )
        elif head.after is not None and header.found is not None and at > header.found:
            problem = (
                f"corrects what its fit found in the sink, up to {as_words(header.found)}; applied so far: "
                f"{as_words(at)}, which the sink had lost."
            )
        if problem is not None:
            raise LostError(f"{as_words(header.name.cut)} {problem}")

    def _first(self) -> Move | None:
        """Return what a replica that has nothing begins with."""
        if (start := self.start()) is not None:
            return start
        newest = self._by_generation[self.cuts[-1].at[0]][0]
        if not newest.is_whole and not self._is_broken(newest):
            return None  # it is being written
        if any(cut.is_whole and self._head(cut).is_void for cut in self.cuts):
            return None  # a base of every rank is to come
        broken = [cut for cut in self.cuts if self._is_broken(cut)]
        raise CutError(
            f"no base of every rank is in the sink, which has {len(self.cuts)} cuts, from {as_words(self.cuts[0].at)} "
            f"to {as_words(self.cuts[-1].at)}: a replica that has nothing cannot begin. "
            + "".join(f"{_lacks(cut)} " for cut in broken[:3])
            + "Start it from a state that a replica saved, or let the training write a base."
        )

    def start(self, newer_than: CutId | None = None) -> Move | None:
        """Return the newest base of every rank: one cut, or several that follow each other."""
        for cuts in reversed(self._by_generation.values()):
            base_of: dict[int, int] = {}
            for index in reversed(range(len(cuts))):
                cut = cuts[index]
                if not cut.is_whole or self._head(cut).is_void:
                    base_of.clear()  # what follows it was not applied to what is before it
                    continue
                head = self._head(cut)
                if base_of and self._head(cuts[index + 1]).after not in (None, cut.at):
                    base_of.clear()
                if newer_than is not None and not base_of and cut.at <= newer_than:
                    return None
                for rank in head.bases:
                    base_of.setdefault(rank, index)
                if len(base_of) == cut.num_ranks:
                    last = max(base_of.values())
                    chunks = [
                        (self._head(taken), name)
                        for place, taken in enumerate(cuts[index : last + 1], index)
                        for name in taken.names
                        if base_of.get(name.rank, last + 1) <= place
                    ]
                    return Move(chunks, is_base=True)
        return None

    def _is_broken(self, cut: Cut) -> bool:
        """Whether a cut will never be whole: it has a conflict, or a rank has written parts after one that it lacks.

        Ranks write their parts in order, and one may be ahead of another. (One that a crash has left in parts is not
        broken; a newer generation makes it good.)
        """
        if cut.conflict is not None:
            return True
        later = (other for other in self.cuts if other.at[0] == cut.at[0] and other.at > cut.at)
        wrote_later = {name.rank for other in later for name in other.names}
        return bool(cut.missing.keys() & wrote_later)

    def _base_is_coming(self) -> bool:
        """Whether a cut that begins anew is being written: what is wrong before it does not matter then."""
        for cut in reversed(self.cuts):
            if cut.is_whole or self._is_broken(cut):
                return False
            first = cut.names[0]
            if read_header(self.sink.read(str(first)), str(first)).is_base:
                return True
        return False

    def _head(self, cut: Cut) -> Head:
        head = self._heads.get(cut)
        if head is None:
            if len(self._heads) >= _MOST_HEADS:
                self._heads.clear()
            head = self._heads[cut] = read_head(self.sink, cut)
        if self.run is not None and head.header.run != self.run:
            raise CutError(
                f"{as_words(cut.at)} is of the run {head.header.run!r}, this replica is of the run {self.run!r}. Begin "
                "a new replica, or give it the sink of its own run."
            )
        return head


def _lacks(cut: Cut) -> str:
    lacks = [name for names in cut.missing.values() for name in names]
    return cut.conflict or f"{as_words(cut.at)} lacks {some(lacks, 8)}, and later parts are there."


def prune(sink: str | os.PathLike[str] | DeltaSink) -> list[str]:
    """Remove the parts that no replica needs any more: those older than the newest base of all ranks.

    Replicas that are further behind go on from that base, and so does a training that resumes: a base has every row.

    Args:
        sink: A sink, or its address.

    Returns:
        The names of the parts that were removed, oldest first; none where no base of all ranks is there.

    Raises:
        PartError: A part that has to be read is torn.
        SinkError: The sink cannot be read or written.
    """
    chain = Chain(resolve_sink(sink))
    chain.list_sink()
    start = chain.start()
    if start is None:
        return []
    needed = start.chunks[0][1].cut
    old = [str(name) for cut in chain.cuts if cut.at < needed for name in cut.names]
    chain.sink.remove(old)
    return old
