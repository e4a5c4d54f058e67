"""Find the end of an epoch: after the same batch on all ranks, though their data differ."""

import warnings

from ..distributed import ASK_FOR_LAST, MAX_INTERVAL, Answer, Consensus, PollInterval, StepFlags
from .interfaces import NO_RATES, BatchSource, InFlightBatch, Rates


class EndOfData:
    """Asks all ranks whether they have the next batches, and learns where the data of the first rank ends.

    A question is an exchange on the host (`Consensus.ask`), and its answer is read a step later. If the length of
    every rank's epoch is known, the ranks ask about occasional batches (`PollInterval`) and about each of the last.
    If not, each rank says with a question how many further batches it surely has (`BatchSource.num_certain`), and the
    next question is about the last batch that all ranks surely have.

    All ranks decide by the same answers, at the same step of the schedule. `depth` is the most batches in flight.
    """

    def __init__(self, source: BatchSource, consensus: Consensus | None, rank: int, depth: int) -> None:
        self._source, self._consensus, self._rank, self._depth = source, consensus, rank, depth
        self.asks = consensus is not None  # whether there are other ranks to ask
        self.reset()

    def reset(self) -> None:
        """Begin an epoch."""
        self.answers: dict[int, Answer] = {}  # not read yet, by batch number
        self.num_batches: int | None = None  # that all ranks have, without None batches; None until it is known
        self.stop_agreed = False  # whether a rank was told to stop
        self.save_agreed = False  # whether a rank was told to save
        self._poll_interval: PollInterval | None = None  # between questions; None if lengths are not known
        self._next_asked = 0  # if lengths are not known: the first batch that needs a question
        self._ask_all_from: float = 0  # if lengths are known: from this batch on each one needs a question
        self._asked_now_and_then = -1  # the last batch asked about before `_ask_all_from`
        self._compare_rates = NO_RATES.compare

    def is_last(self, index: int, num_ahead: int) -> bool:
        """Whether a batch is known to be the last one, on all ranks; `num_ahead` batches after it are fetched."""
        return self.num_batches == index + 1 if self.asks else num_ahead == 0 and self._source.exhausted

    def ask(self, index: int, *, lacks: bool, latest_none: int = -1, rates: Rates = NO_RATES) -> None:
        """Ask all ranks whether they have batch `index`, without None batches, if it needs a question; do not wait."""
        if self._consensus is None:
            return
        if index == 0:
            self._poll_interval = PollInterval() if self._source.length_known else None
            self._ask_all_from = max(0, self._source.num_batches - ASK_FOR_LAST)
        requested_interval = 0
        if self._poll_interval is not None and index < self._ask_all_from:
            if lacks and self._source.exhausted:
                raise RuntimeError(
                    f"rank {self._rank} has only {index} batches to train of the {self._source.num_batches:g} in its "
                    "loader's length: most of the last batches are None. The other ranks have more and would wait for "
                    "it. Drop samples instead of whole batches, or give the loader no length."
                )
            if lacks or not self._poll_interval.due(index):
                return  # `max_steps` holds it back, on every rank
            requested_interval = self._poll_interval.ask(index)
            self._asked_now_and_then = index
        elif self._poll_interval is None:
            if index < self._next_asked:
                return
            requested_interval = MAX_INTERVAL - max(1, min(self._source.num_certain, MAX_INTERVAL))
        last, stop, save = self._source.exhausted, self._source.stop_requested, self._source.save_requested
        flags = StepFlags(not lacks, lacks, last, stop, latest_none, requested_interval, save, rates.digest)
        self._compare_rates = rates.compare
        self.answers.setdefault(index, self._consensus.ask(flags))

    def hear(self, index: int, in_flight: dict[int, InFlightBatch]) -> None:
        """Read the answer whether all ranks have a batch, on all ranks alike; drop batches past the end."""
        if index not in self.answers:
            return
        said = self.answers.pop(index).wait()
        if said.rates < 0:
            self._compare_rates()
        self.stop_agreed |= said.stop
        self.save_agreed |= said.save
        if self._poll_interval is not None and index == self._asked_now_and_then:
            self._poll_interval.hear(said.requested_interval, self._source.num_batches)
        if self._poll_interval is None:
            # If a rank lacked the batch, `max_steps` may only have held it back: ask about it again.
            self._next_asked = index if said.lacks else index + MAX_INTERVAL - said.requested_interval
        if said.latest_none >= 0:  # the epoch is shorter: ask about each batch, from the first that no rank has reached
            self._ask_all_from = min(self._ask_all_from, index + self._depth + 1)
        if not said.has or not (said.lacks or said.last) or self.num_batches is not None:
            return
        self.num_batches = index if said.lacks else index + 1
        dropped = [ahead for ahead in in_flight if ahead >= self.num_batches]
        for ahead in dropped:
            del in_flight[ahead]
        if dropped or not self._source.exhausted:
            warnings.warn(
                f"The data of another rank ended after {self.num_batches} batches. Rank {self._rank} has more and ends "
                "there too: all ranks take the same number of batches.",
                stacklevel=2,
            )
