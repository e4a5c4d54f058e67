"""How far a sink is behind the training: in the loggers' words, and what follows from it."""

from __future__ import annotations

import warnings

from lightning.pytorch import Trainer

from ..deltas import DeltaSink
from ..plugin import logged_step

ON_LAG = ("warn", "stop")


class LagLog:
    """Logs the lag of a sink; past what is allowed it warns, or stops the training.

    The arguments are those of `EmbeddingDeltas`.

    Raises:
        ValueError: A `max_lag_steps` below `every_n_steps`, or an unknown `on_lag`.
    """

    def __init__(
        self, sink: DeltaSink, every_n_steps: int, max_lag_steps: int | None, on_lag: str, name: str | None
    ) -> None:
        if max_lag_steps is not None and max_lag_steps < every_n_steps:
            raise ValueError(
                f"max_lag_steps={max_lag_steps} is below every_n_steps={every_n_steps}: replicas are always that many "
                "batches behind before the next cut."
            )
        if on_lag not in ON_LAG:
            raise ValueError(f"on_lag is one of {', '.join(ON_LAG)}, got {on_lag!r}.")
        self._sink, self._every, self._most, self._stops = sink, every_n_steps, max_lag_steps, on_lag == "stop"
        self._prefix = "deltas" if name is None else f"deltas/{name}"
        self.begin()

    def begin(self) -> None:
        """Begin a fit: nothing has been warned of."""
        self._is_late = False

    def hear(self, trainer: Trainer, behind: int, num_waiting: int, num_bytes: int) -> None:
        """Log, and warn once each time that the lag becomes more than is allowed.

        The slowest rank is `behind` batches; `num_waiting` rows of this rank are marked, and `num_bytes` written.
        """
        values = {"steps_behind": behind, "rows_waiting": num_waiting, "bytes": num_bytes}
        metrics = {f"{self._prefix}/{what}": float(value) for what, value in values.items()}
        for logger in trainer.loggers:
            logger.log_metrics(metrics, step=logged_step(trainer))
        was_late, self._is_late = self._is_late, self._most is not None and behind > self._most
        if was_late or not self._is_late:
            return
        if self._stops:
            trainer.should_stop = True
        if trainer.is_global_zero:
            stops = "Training stops (on_lag='stop')." if self._stops else "Training goes on."
            warnings.warn(
                f"{self._sink} is {behind} batches behind the training, more than max_lag_steps="
                f"{self._most}: it takes longer to write than {self._every} batches to train. {stops} Take a larger "
                f"every_n_steps or a faster sink; {num_waiting} rows at most wait on this rank.",
                UserWarning,
                stacklevel=2,
            )
