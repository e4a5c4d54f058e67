"""What a config chooses by name: modes, stream, precision. Checked without torch, which takes seconds to import."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

from .modes import resolve_schedule, resolve_stream
from .schedule import Schedule

Config = Mapping[str, Any]
"""The composed config as plain containers; nothing behind the command sees OmegaConf's."""


def modes(config: Config) -> list[Schedule]:
    """Return the schedules to train, the one asked for last.

    Raises:
        ValueError: An unknown mode, or a schedule that cannot run.
    """
    own = config["pipeline"].get("schedule")
    wanted = Schedule.parse(own) if own else resolve_schedule(config["pipeline"]["name"])
    others = [resolve_schedule(name) for name in config["compare"]]
    return [other for other in others if other != wanted] + [wanted]


def check(config: Config) -> None:
    """Check the choices.

    Raises:
        ValueError: An unknown mode or stream, a schedule that cannot run, or a precision that scales the loss.
    """
    modes(config)
    resolve_stream(config["stream"]["name"])
    if str(config["trainer"].get("precision")) in ("16-mixed", "16"):
        raise ValueError(
            "trainer.precision=16-mixed scales the loss, and fused tables would be updated with scaled gradients "
            "inside backward. Use trainer.precision=bf16-mixed, which needs no scaling."
        )
