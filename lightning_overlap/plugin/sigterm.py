"""SIGTERM on any rank ends all ranks after the same step.

Lightning broadcasts inside the signal handler, in between any other collective of the rank, and again for every
training batch, and each of its loops leaves at once on the rank that was told. Here the handler only remembers; the
ranks hear of it in the consensus that is asked with every batch.
"""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.utilities.exceptions import SIGTERMException


class Sigterm:
    """Stands in the place of Lightning's handler of SIGTERM while several ranks are at work.

    Owns whether this process has received one (`heard`).
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self.heard = False

    def __call__(self, signum: int, frame: Any) -> None:
        """Tell the processes that this one launched, and remember it for the next consensus."""
        if not self.heard and self._trainer.strategy.launcher is not None:
            self._trainer.strategy.launcher.kill(signum)
        self.heard = True


@contextmanager
def installed(trainer: Trainer) -> Iterator[None]:
    """Take the place of the handler of SIGTERM meanwhile, where there are several ranks.

    One rank alone leaves whenever it likes, as with Lightning.
    """
    connector = trainer._signal_connector
    if trainer.world_size > 1:
        connector._sigterm_notifier_fn = Sigterm(trainer)  # type: ignore[method-assign, assignment]
    yield
    vars(connector).pop("_sigterm_notifier_fn", None)


def heard(trainer: Trainer) -> bool:
    """Whether this process received SIGTERM."""
    handler = vars(trainer._signal_connector).get("_sigterm_notifier_fn")
    return handler.heard if isinstance(handler, Sigterm) else bool(trainer.received_sigterm)


def leave(trainer: Trainer) -> None:
    """Leave, as all ranks do now: Lightning ends the run in its usual way."""
    trainer._signal_connector.received_sigterm = True
    raise SIGTERMException
