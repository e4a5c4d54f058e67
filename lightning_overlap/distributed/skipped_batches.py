"""Tell all ranks through the store which None batches each has skipped: with others they would validate apart."""

from __future__ import annotations

import itertools
import json
import time
from collections.abc import Callable

from .failures import Store

WAIT_S = 60.0
"""How long a rank waits for another one that may be about to skip the same None batch, in seconds."""

_num_runs = itertools.count()


class SkippedBatches:
    """Tells all ranks which None batches of a fit this one has skipped, and compares them with theirs.

    Without None batches it reads the store once for each validation. No collective is used, as the ranks may be at
    different ones. Every rank makes equally many of these objects, in the same order.

    Args:
        store: The store of the process group.
        rank: This process's rank.
        num_ranks: How many ranks there are.
    """

    def __init__(self, store: Store, rank: int, num_ranks: int) -> None:
        self._store, self._rank, self._num_ranks = store, rank, num_ranks
        self._key = f"lightning_overlap/skipped/{next(_num_runs)}"
        self._epoch = 0
        self._mine: list[tuple[int, int]] = []

    def begin_epoch(self) -> None:
        """Count the batches of an epoch; all ranks call this alike."""
        self._epoch += 1

    def note(self, num_before: int) -> None:
        """Tell the others of a None batch before this rank takes part in the next batch.

        Args:
            num_before: How many other batches of the epoch come before it.
        """
        self._mine.append((self._epoch, num_before))
        self._tell()

    def forget(self, num: int) -> None:
        """Take back the last `num` None batches, which were fetched ahead and which the epoch does not reach."""
        if num:
            del self._mine[-num:]
            self._tell()

    def _tell(self) -> None:
        self._store.set(f"{self._key}/{self._rank}", json.dumps(self._mine))
        self._store.add(f"{self._key}/num", 1)

    @property
    def is_any(self) -> bool:
        """Whether a rank has skipped a batch."""
        return bool(self._store.add(f"{self._key}/num", 0))

    def check(self, num_before: int, num_skipped: int, *, at_skipped: bool, over_epochs: bool) -> None:
        """Check that all ranks come to a validation after the same step, where its interval counts skipped batches.

        Args:
            num_before: Batches of the epoch that this rank has trained.
            num_skipped: None batches of the epoch that it has skipped so far.
            at_skipped: Whether the last batch was a None batch.
            over_epochs: Whether None batches of earlier epochs count too.

        Raises:
            RuntimeError: Another rank has skipped fewer, or more, so that it validates after another step.
        """
        if not self.is_any:
            return
        earlier = sum(epoch < self._epoch for epoch, _ in self._mine) if over_epochs else 0
        mine, deadline = earlier + num_skipped, time.monotonic() + WAIT_S
        for rank in range(self._num_ranks):
            while True:
                theirs = self._of(rank, over_epochs)
                fewest, most = (sum(place < num_before + late for place in theirs) for late in (0, 1))
                if (fewest < mine <= most) if at_skipped else fewest == mine:
                    break
                # All ranks have fetched what this one has trained. What comes next one of them may not know yet.
                if not at_skipped or fewest >= mine or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"rank {self._rank} comes to a validation after {num_before} batches of an epoch and {mine} "
                        f"that are None, rank {rank} has skipped {most if at_skipped else fewest} by then: it would "
                        "validate after another batch, and each wait for the other. Let all ranks skip alike (drop "
                        "samples in place of whole batches), or validate at the end of epochs (val_check_interval=1.0)."
                    )
                time.sleep(0.01)

    def check_window(
        self, num_batches: int, num_skipped: int, number: int, every: int, *, by_end: bool, waits: bool
    ) -> None:
        """Check that a batch begins and ends the window of an optimizer step on all ranks, or on none.

        Args:
            num_batches: Trained batches of the epoch up to it.
            num_skipped: None batches of the epoch that this rank has skipped before it.
            number: Number of the batch in this rank's count of both.
            every: Batches of a window (`accumulate_grad_batches`).
            by_end: Whether all ranks step with it since it is the last one.
            waits: Whether to wait for a rank that may be about to fetch it.

        Raises:
            RuntimeError: Another rank has skipped fewer, or more, so that its windows are others.
        """
        edges = (number,) if by_end else (number, number + 1)
        self._compare(
            *(num_batches, num_skipped, waits),
            lambda more: all(((edge + more) % every == 0) == (edge % every == 0) for edge in edges),
            f"with accumulate_grad_batches={every} they would step their optimizers after other batches, and each wait "
            "for the other",
        )

    def check_rates(self, num_batches: int, num_skipped: int, *, waits: bool) -> None:
        """Check that the schedulers of all ranks have stepped as often, where they count skipped batches.

        Another rank that skips one later than this check makes one of its own. See `check_window` for the arguments.

        Raises:
            RuntimeError: Another rank has skipped fewer, or more, so that its learning rates are others.
        """
        self._compare(
            *(num_batches, num_skipped, waits),
            lambda more: more == 0,
            'a scheduler with interval="step" counts these, so the learning rates of the ranks, and their dense '
            "weights, would differ",
        )

    def _compare(
        self, num_batches: int, num_skipped: int, waits: bool, agrees: Callable[[int], bool], otherwise: str
    ) -> None:
        """Compare how many None batches each rank has skipped before a batch.

        Args:
            num_batches: As in `check_window`.
            num_skipped: As in `check_window`.
            waits: As in `check_window`.
            agrees: Whether a rank that has skipped so many more than this one does the same.
            otherwise: What would happen if it does not, for the message.

        Raises:
            RuntimeError: A rank does not agree.
        """
        deadline = time.monotonic() + WAIT_S
        for rank in range(self._num_ranks):
            while True:
                theirs = sum(place < num_batches for place in self._of(rank, False))
                more = theirs - num_skipped
                if agrees(more):
                    break
                if not waits or more > 0 or time.monotonic() > deadline:
                    raise RuntimeError(
                        f"rank {self._rank} has taken {num_batches} batches of an epoch and skipped {num_skipped} that "
                        f"are None, rank {rank} has skipped {theirs} by then: {otherwise}. Let all ranks skip alike "
                        "(drop samples in place of whole batches), or give the loader no length: then the ranks agree "
                        "on each step."
                    )
                time.sleep(0.01)

    def _of(self, rank: int, over_epochs: bool) -> list[int]:
        """Return how many other batches of the epoch come before each None batch of a rank; -1 for earlier epochs."""
        key = f"{self._key}/{rank}"
        told: list[tuple[int, int]] = json.loads(self._store.get(key)) if self._store.check([key]) else []
        earlier = [-1 for epoch, _ in told if over_epochs and epoch < self._epoch]
        return earlier + [num_before for epoch, num_before in told if epoch == self._epoch]
