"""What all ranks do together, so that an error of one is the error of all."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any

from ..distributed import together
from ..plugin import OverlapEmbeddingStrategy


class Together:
    """Lets all ranks of a strategy fail alike; all of them call each method at the same point."""

    def __init__(self, strategy: OverlapEmbeddingStrategy) -> None:
        self._strategy = strategy

    def do(self, do: Callable[[], None]) -> None:
        """Do something that waits for no rank after what may fail on one alone; raise as `raise_together` does."""
        error: Exception | None = None
        try:
            do()
        except Exception as err:
            error = err
        self.raise_together(error)

    def raise_together(self, error: BaseException | None) -> None:
        """Raise if any rank has an error.

        Raises:
            RuntimeError: With the error of each rank that has one.
            ValueError: This rank's, where all ranks have the same.
        """
        said = self._strategy.gather(None if error is None else f"{type(error).__name__}: {error}")
        if isinstance(error, ValueError) and len(set(said)) == 1:
            raise error
        causes = [f"rank {rank}: {cause}" for rank, cause in enumerate(said) if cause is not None]
        causes = causes[:1] if len(set(said)) == 1 else causes
        if causes:
            raise RuntimeError(f"embedding deltas cannot be sent. {'; '.join(causes)}") from error

    def ask_first(self, ask: Callable[[], Any]) -> Any:
        """Return what rank 0 finds out, anything that can be pickled.

        Raises:
            RuntimeError: It failed there, on all ranks.
        """
        gather = self._strategy.gather
        found = together(ask if self._strategy.global_rank == 0 else lambda: None, gather)
        return gather(found)[0]
