"""Where in a fit a checkpoint was saved: a fit that resumes from it continues exactly there, any number of times.

Lightning guesses the place from its counters. It loses validations and ends of epochs, and after a resume at the end of
an epoch its counters are those of another place, so that a second resume repeats batches.
"""

from dataclasses import dataclass
from enum import StrEnum
from typing import Any

from lightning.pytorch import Trainer

from ...checkpoint import Generators
from ...compat.lightning import (
    callback_metrics,
    epoch_results,
    restore_callback_metrics,
    restore_epoch_results,
    set_restarting,
)
from ...tables import hands_out_rows

_PLACE = "lightning_overlap_place"  # entry of the fit loop's state
METRICS = "lightning_overlap_metrics"  # the same, of one rank


class Rest(StrEnum):
    """What is left to do of the last trained batch when a checkpoint is saved."""

    NOTHING = "nothing"
    UPDATE = "update"  # the step of ReduceLROnPlateau, and counting
    VALIDATION = "validation"  # and the validation, if one is due
    UNKNOWN = "unknown"  # the checkpoint does not say: it was saved with another strategy


@dataclass(eq=False)
class Resume:
    """What is over of a fit's batches and epochs, for its checkpoints; and where it continues if it was resumed."""

    trainer: Trainer
    num_over: int  # batches of all epochs of which nothing is left to do
    num_validated: int = -1  # batches up to the last validation that has ended
    num_plateau: int = -1  # batches up to the last step of ReduceLROnPlateau at an epoch's end
    validations: Any = None  # total progress of the epoch's validations before the current one
    rest: Rest = Rest.NOTHING  # what is left to do first
    loaded: bool = False  # whether a checkpoint was loaded and the fit has not begun
    enters_epoch: bool = False  # whether the fit continues inside an epoch, and has not entered it
    owes_plateau: bool = False  # whether ReduceLROnPlateau has a step left of the epoch that is over
    has_metrics: bool = True  # whether the metrics are known that ReduceLROnPlateau would need
    _generators: Generators | None = None  # before the current validation, if modules draw rows
    _place: Any = None
    _metrics: Any = None

    @property
    def _fit_loop(self) -> Any:
        return self.trainer.fit_loop

    @property
    def knows_metrics(self) -> bool:
        """Whether there are the metrics that ReduceLROnPlateau monitors: all checkpoints of this strategy have them."""
        return self.has_metrics or self.rest is Rest.NOTHING

    def batch_is_over(self) -> None:
        """Note that nothing is left to do of the latest batch."""
        self.rest, self.num_over = Rest.NOTHING, self._fit_loop.epoch_loop.batch_progress.total.ready

    def validation_ends(self) -> None:
        """Note that the validation after the latest batch has only its `on_validation_end` left."""
        if not self.trainer.sanity_checking:
            self.num_validated = self._fit_loop.epoch_loop.batch_progress.total.ready

    # -- saving ------------------------------------------------------------------------------------------------------

    def save(self, state: dict[str, Any]) -> None:
        """Add the place and this rank's metrics to the fit loop's state; all ranks call this."""
        loop, epochs = self._fit_loop.epoch_loop, self._fit_loop.epoch_progress.current
        batches, validations = loop.batch_progress, loop.val_loop.batch_progress.total
        rest = self._rest_now
        is_between_epochs = epochs.completed < epochs.processed == epochs.started
        state[_PLACE] = {
            "rest": str(rest),
            "plateau": is_between_epochs and loop.epoch_is_over and batches.total.ready != self.num_plateau,
            "validations": self.validations if self._repeats_validation else validations.state_dict(),
        }
        state[METRICS] = {
            "callback": callback_metrics(self.trainer),
            "epoch": epoch_results(loop) if epochs.processed < epochs.started else [],
        }

    @property
    def _rest_now(self) -> Rest:
        """What is left to do of the last trained batch now."""
        batches = self._fit_loop.epoch_loop.batch_progress
        if batches.current.ready > batches.current.processed or batches.total.ready == self.num_over:
            return Rest.NOTHING  # the next batch may have begun
        return Rest.UPDATE if batches.total.ready == self.num_validated else Rest.VALIDATION

    @property
    def _repeats_validation(self) -> bool:
        """Whether a fit that resumes from a checkpoint of this moment begins a validation anew that has begun."""
        return self._rest_now is Rest.VALIDATION and bool(self.trainer.validating)

    def begin_validation(self) -> None:
        """Note what a validation changes that follows: called before it takes its first batch."""
        self.validations = self._fit_loop.epoch_loop.val_loop.batch_progress.total.state_dict()
        self._generators = Generators.now() if hands_out_rows(self.trainer.lightning_module) else None

    def generators_before_validation(self) -> Generators | None:
        """Return the states of generators before the validation under way, if it would begin anew and modules draw."""
        return self._generators if self._repeats_validation else None

    # -- loading -----------------------------------------------------------------------------------------------------

    def take(self, state: dict[str, Any]) -> None:
        """Take what `save` has added to the fit loop's state; the counters are not loaded yet."""
        self._place, self._metrics = state.get(_PLACE), state.get(METRICS)
        self.has_metrics = self._metrics is not None

    def roll_back(self) -> None:
        """Set the counters of a checkpoint to those of a fit that was not stopped, at the place where it continues.

        That is between two batches, or between two epochs: work that was under way begins anew.
        """
        fit_loop, loop = self._fit_loop, self._fit_loop.epoch_loop
        epochs, batches = fit_loop.epoch_progress, loop.batch_progress
        of_batch, place = batches.current, self._place or {}
        self.rest = Rest(place.get("rest", Rest.UNKNOWN))
        self.owes_plateau = place.get("plateau", False)
        if not place:
            was_in_hook = of_batch.completed < of_batch.processed == of_batch.ready  # on_train_batch_end
            if was_in_hook and batches.is_last_batch and epochs.current.processed < epochs.current.started:
                epochs.increment_processed()  # Lightning drops the rest of the epoch, whose metrics are not there
                loop.num_stepped += 1
            elif was_in_hook:
                self.rest = Rest.UPDATE  # nor does Lightning validate
            elif loop.val_loop.batch_progress.total.ready > loop.val_loop.batch_progress.total.completed:
                self.rest = Rest.VALIDATION
        for of_epochs in (epochs.total, epochs.current):
            of_epochs.ready, of_epochs.completed = of_epochs.started, of_epochs.processed
        self.loaded, self.enters_epoch = True, epochs.current.processed < epochs.current.started
        if self.enters_epoch:
            if of_batch.ready > of_batch.processed:
                batches.is_last_batch = False  # it was said of the batch that begins anew
            begun, started = of_batch.ready - of_batch.processed, max(0, of_batch.started - of_batch.processed)
            ended = of_batch.processed - of_batch.completed
            for count in (batches.total, of_batch):
                count.ready, count.started, count.completed = (
                    count.ready - begun,
                    count.started - started,
                    count.completed + ended,
                )
            optimizer = loop.automatic_optimization.optim_progress.optimizer
            others = (loop.scheduler_progress, loop.manual_optimization.optim_step_progress)
            for progress in (optimizer.step, optimizer.zero_grad, *others):
                for count in (progress.total, progress.current):
                    count.reset_on_restart()
            validations = loop.val_loop.batch_progress.total
            validations.load_state_dict(place.get("validations", {}))
            validations.reset_on_restart()
        else:
            self.rest = Rest.NOTHING
        total = batches.total.ready
        self.num_over = total if self.rest is Rest.NOTHING else -1
        self.num_validated = total if self.rest is Rest.UPDATE else -1

    @property
    def begins_epoch(self) -> bool:
        """Whether the resumed fit begins with an epoch's first batch, at the beginning of the data."""
        batches = self._fit_loop.epoch_loop.batch_progress
        # A fit that `max_steps` ended in the middle of the data continues there, in a new epoch.
        between = batches.is_last_batch or batches.total.ready == 0 or self.trainer.max_steps == -1
        return self.loaded and not self.enters_epoch and between

    @property
    def begins_data(self) -> bool:
        """Whether the resumed fit takes its first batch from the beginning of the data."""
        num_trained = self._fit_loop.epoch_loop.batch_progress.current.processed
        return self.begins_epoch or (self.loaded and self.enters_epoch and num_trained == 0)

    def begin(self) -> None:
        """Begin the resumed fit: called before Lightning's fit loop looks at its counters."""
        if not self.loaded:
            return
        set_restarting(self._fit_loop, not self.begins_epoch)
        self.loaded = False
        if self._metrics is not None:
            restore_callback_metrics(self.trainer, self._metrics["callback"])

    def begin_epoch(self) -> None:
        """Continue in the epoch's loop, whose counters Lightning has looked at; also called if nothing was resumed."""
        fit_loop = self._fit_loop
        if fit_loop.restarting and self.has_metrics:
            set_restarting(fit_loop, False)  # with True, Lightning would do no step of ReduceLROnPlateau
        set_restarting(fit_loop.epoch_loop, False)
        if self._metrics is not None and self._metrics["epoch"]:
            restore_epoch_results(self.trainer, self._metrics["epoch"])
        self._metrics = None
