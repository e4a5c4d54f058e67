"""Random generators of a resumed fit: where managed collision modules draw rows, they go on as they were saved."""

from collections.abc import Iterator
from contextlib import contextmanager

from lightning.pytorch import Trainer

from ...checkpoint import Generators


class ResumedGenerators:
    """Sets the generators to their saved states where the fit that was not stopped had them.

    Iterators of data loaders draw from them. A fit that was saved inside an epoch had drawn for its iterators. One that
    was saved between two epochs draws for the next epoch's after `on_train_epoch_start`; if it was resumed, Lightning
    has made that iterator before.
    """

    def __init__(self, trainer: Trainer) -> None:
        self._trainer = trainer
        self._saved: Generators | None = None  # None: nothing to set
        self._inside_epoch = False
        self._after_iterator: Generators | None = None

    def resume(self, saved: Generators | None, *, inside_epoch: bool) -> None:
        """Take the saved states; called before the first iterator of the resumed fit is made."""
        self._saved, self._inside_epoch = saved, inside_epoch
        self._set_between_epochs()

    def has_iterators(self) -> None:
        """Note that the loaders have an iterator."""
        if self._saved is not None and self._after_iterator is None:  # Lightning calls this again at each epoch
            self._after_iterator = Generators.now()

    def begin_epoch(self) -> None:
        """Set the states before an epoch's first hook."""
        self._set_between_epochs()

    @contextmanager
    def beginning_batches(self) -> Iterator[None]:
        """Within this context Lightning makes an iterator for the epoch, or none; afterwards it takes batches."""
        before = None if self._saved is None else Generators.now()
        yield
        saved, self._saved = self._saved, None
        if saved is None or before is None:
            return
        if self._inside_epoch:
            saved.set()
            return
        nothing_drawn = before.equal(saved) and before.equal(Generators.now())  # by hooks, by an iterator
        if nothing_drawn and self._trainer.current_epoch > 0 and self._after_iterator is not None:
            self._after_iterator.set()

    def _set_between_epochs(self) -> None:
        if self._saved is not None and not self._inside_epoch:
            self._saved.set()
