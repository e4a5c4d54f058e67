"""How long a module's `self.log` takes, in the steps that are measured."""

from __future__ import annotations

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import LightningModule

from ..profiling import SpanRecorder


@contextmanager
def timed_log(module: LightningModule, recorder: SpanRecorder) -> Iterator[None]:
    """Let a recorder see the calls of a module's `log`; `log_dict` calls it too.

    Args:
        module: Gets a `log` of its own meanwhile.
        recorder: Takes the times.
    """
    own = vars(module).get("log")
    log = module.log

    def timed(*args: Any, **kwargs: Any) -> None:
        with recorder.log():
            log(*args, **kwargs)

    vars(module)["log"] = timed
    try:
        yield
    finally:
        if own is None:
            del vars(module)["log"]
        else:
            vars(module)["log"] = own
