"""How far a check is: a bar over the steps of all its fits, with an estimate of the time that is left."""

from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Self

from lightning.pytorch import Callback
from tqdm import tqdm
from typing_extensions import override


class Progress(Callback):
    """A bar on stderr over all fits, and a callback of each that moves it; closed at the end of a `with` block.

    Fits differ in what they watch, so the estimate is rough; it is right from about the second fit on.

    Args:
        num_steps: The steps of all fits.
        shown: Whether there is a bar; None: if stderr is a terminal, so not where pytest captures what is printed.
    """

    def __init__(self, num_steps: int, shown: bool | None) -> None:
        disable = None if shown is None else not shown
        self._bar = tqdm(total=num_steps, unit="step", disable=disable, leave=False, dynamic_ncols=True)

    def __enter__(self) -> Self:
        return self

    def __exit__(self, *_: Any) -> None:
        self._bar.close()

    @contextmanager
    def of(self, fit: str, num_steps: int) -> Iterator[None]:
        """Name the fit of the block; at its end all its steps count as done, also if it was shorter."""
        before = self._bar.n
        self._bar.set_description(f"check_module: {fit}")
        yield
        self._bar.update(max(0, before + num_steps - self._bar.n))
        self._bar.refresh()

    @override
    def on_train_batch_end(self, *_: Any, **__: Any) -> None:
        if self._bar.n < self._bar.total:  # a fit that has no place in the sum makes no bar of more than 100 %
            self._bar.update()
