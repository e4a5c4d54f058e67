"""What the step under way has changed: a resumed fit begins its batch anew, and would change it twice."""

from enum import IntEnum

from torch import nn

from ..checkpoint import Generators
from ..compat.torch import buffers_of, num_writes
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
        self._buffers = [
            (buffers_of(module), name)
            for path, module in model.named_modules()
            for name in buffers_of(module)
            if f"{path}.{name}".lstrip(".") not in sharded
        ]
        self._buffers_before: list[tuple[int, int]] = []  # as the step began
        self._generators: Generators | None = None

    def begin(self) -> None:
        """Note that a step begins."""
        self._part, self._buffers_before = _Part.FORWARD, self._buffers_now() if self._buffers else []
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
    def is_under_way(self) -> bool:
        """Whether a step is under way."""
        return self._part is not _Part.NONE

    @property
    def generators(self) -> Generators | None:
        """The states of generators before the step that is under way; None without one, or if no module draws rows."""
        return self._generators

    def changed(self, *, has_looked_up: bool) -> str | None:
        """Return what the step has changed; None if nothing that the checkpoint would have."""
        if self._part is _Part.BACKWARD:
            return "its forward is over, and its tables may have been updated"
        if self._part is _Part.FORWARD:
            if self._draws and has_looked_up:
                return "managed collision modules have seen its ids"
            if self._buffers_now() != self._buffers_before:
                return "buffers, such as statistics of BatchNorm, have been updated"
        return None

    def _buffers_now(self) -> list[tuple[int, int]]:
        """Return which tensor each buffer is, and how often it has been written."""
        found = [buffers.get(name) for buffers, name in self._buffers]
        return [(id(one), 0 if one is None or one.is_inference() else num_writes(one)) for one in found]


def refusal(changed: str) -> RuntimeError:
    """Return the error for a save of which `changed` is in the checkpoint, and the rest of the step is not."""
    return RuntimeError(
        f"a checkpoint cannot be saved in the middle of a step: {changed}, and a fit that resumes from it would begin "
        "this batch anew. Save in on_train_batch_end or in a later hook. With weights_only=True, which no fit resumes "
        "from, trainer.save_checkpoint works anywhere."
    )
