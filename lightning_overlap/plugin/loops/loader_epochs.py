"""The epochs in which a fit's data loaders were made, by `reload_dataloaders_every_n_epochs`.

Lightning's checkpoints do not have them. A resumed fit would make its loaders in the epoch in which it begins, and
count the epochs up to the next ones from there: it would train on other data than a fit that was not stopped.
"""

from collections.abc import Callable, Iterator, Mapping
from contextlib import AbstractContextManager, contextmanager, nullcontext
from typing import Any

from lightning.pytorch import Trainer

from ...compat.lightning import MakesLoaders


class LoaderEpochs:
    """Saves the epochs, and lets a resumed fit make the loaders that the fit had which was not stopped."""

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._to_make: set[str] = set()  # the loops whose loaders are to be made as in the saved epochs
        self._present: int | None = None  # the epoch that the fit is in, while loaders of another one are made

    @property
    def _loops(self) -> Mapping[str, MakesLoaders]:
        fit_loop: Any = self._trainer.fit_loop
        return {"training": fit_loop, "validation": fit_loop.epoch_loop.val_loop}

    def state_dict(self) -> dict[str, int]:
        """Return the epochs by loop; a loop without loaders is left out."""
        return {name: int(loop.loaders_epoch) for name, loop in self._loops.items() if loop.loaders_epoch >= 0}

    def load_state_dict(self, saved: Mapping[str, int]) -> None:
        """Take the epochs of a checkpoint; called before the resumed fit makes its loaders."""
        self._to_make = {*saved} if self._trainer.reload_dataloaders_every_n_epochs else set()  # type: ignore[attr-defined]
        for name, epoch in saved.items():
            self._loops[name].loaders_epoch = epoch

    def make(self, loop: MakesLoaders, make: Callable[[], None], *, is_early: bool = False) -> None:
        """Let a loop make its loaders by `make`; not yet if it `is_early` and the next ones are due."""
        waiting = [name for name in self._to_make if self._loops[name] is loop]
        if waiting and is_early and loop.makes_loaders_anew:
            return
        self._to_make.difference_update(waiting)
        if not waiting or loop.makes_loaders_anew:
            make()
            return
        epoch, self._present = int(loop.loaders_epoch), self._trainer.current_epoch
        try:
            with self._in(epoch):
                make()
        finally:
            self._present = None
        loop.loaders_epoch = epoch

    def making_iterator(self) -> AbstractContextManager[None]:
        """Return a context in which `trainer.current_epoch` is the fit's, also while loaders of another are made."""
        return nullcontext() if self._present is None else self._in(self._present)

    @contextmanager
    def _in(self, epoch: int) -> Iterator[None]:
        """Within this context `trainer.current_epoch` is another one."""
        progress = self._trainer.fit_loop.epoch_progress.current
        before, progress.completed = progress.completed, epoch
        try:
            yield
        finally:
            progress.completed = before
