"""What the step under way has changed: a resumed fit begins its batch anew, and would change it twice."""

from enum import IntEnum

from torch import nn

from ..checkpoint import Generators
from ..tables import ShardedStateNames, hands_out_rows


class _Part(IntEnum):
    """How far the step is."""

    NONE = 0  # no step is under way
    FORWARD = 1
    BACKWARD = 2  # from the hooks before it to the end of the optimizer's step


class MidStep:
    """Knows whether a checkpoint that is saved now has a part of a step."""

    def __init__(self, model: nn.Module) -> None:
        self._part = _Part.NONE
        self._draws = hands_out_rows(model)
        sharded = ShardedStateNames(model)
        # Such as the statistics of BatchNorm, which its forward changes.
        self._has_buffers = any(name not in sharded for name, _ in model.named_buffers())
        self._generators: Generators | None = None

    def begin(self) -> None:
        """Note that a step begins."""
        self._part = _Part.FORWARD
        if self._draws:
            self._generators = Generators.now()

    def end_forward(self) -> None:
        """Note that hooks before the backward follow, or the backward."""
        if self._part is not _Part.NONE:  # nobody tells the end of a step whose module does its own fetching
            self._part = _Part.BACKWARD

    def end(self) -> None:
        """Note that the step is over."""
        self._part, self._generators = _Part.NONE, None

    @property
    def generators(self) -> Generators | None:
        """The states of generators before the step that is under way; None without one, or if no module draws rows."""
        return self._generators

    def changed(self, *, has_looked_up: bool) -> str | None:
        """Return what the step has changed; None if nothing, as before its first lookup."""
        if self._part is _Part.BACKWARD:
            return "its forward is over, and its tables may have been updated"
        if self._part is _Part.FORWARD and has_looked_up:
            if self._draws:
                return "managed collision modules have seen its ids"
            if self._has_buffers:
                return "buffers, such as statistics of BatchNorm, may have been updated"
        return None


def refusal(changed: str) -> RuntimeError:
    """Return the error for a save of which `changed` is in the checkpoint, and the rest of the step is not."""
    return RuntimeError(
        f"a checkpoint cannot be saved in the middle of a step: {changed}, and a fit that resumes from it would begin "
        "this batch anew. Save in on_train_batch_end or in a later hook. With weights_only=True, which no fit resumes "
        "from, trainer.save_checkpoint works anywhere."
    )
