"""`ExponentialMovingAverage`: averages the weights over training, and evaluates the averages."""

import warnings
import weakref
from collections.abc import Iterator, Mapping
from contextlib import contextmanager
from typing import Any

from lightning.pytorch import Callback, LightningModule, Trainer
from torch import Tensor
from typing_extensions import override

from ..checkpoint import AVERAGES, Piece, gather
from ..compat.torch import never_compile_methods
from ..plugin import OverlapEmbeddingStrategy
from ..tables import Ledger, Request, ledger_of
from ..text import some
from .averages import AskedTables, Averages

STATE = "lightning_overlap_averaging"
"""Entry of a checkpoint: number of samples, step of the last one, names of what is averaged."""


@never_compile_methods
class ExponentialMovingAverage(Callback):
    """Averages the dense part and, if asked, tables over training; validation, test and predict use the averages.

    After the first sample the averages are the weights; each later sample moves them by `1 - decay` of the difference,
    as `torch.optim.swa_utils.get_ema_avg_fn` does. A table's row is visited only when it is updated: the samples since
    its last visit are made up for at once, which equals a visit at each sample to rounding.

    Evaluations swap the averages in, in place, and the trained weights back at their end, also after an error. A
    checkpoint has both: training resumes exactly, `trainer.validate(ckpt_path=...)` evaluates the averages, and a
    Trainer without this callback loads the trained weights. A checkpoint without averages begins new ones.

    Memory: a copy of the dense part and of the asked tables, and 4 bytes for each row of them.

    Args:
        decay: Weight of the old average in a sample, at least 0 and below 1.
        every_n_steps: Optimizer steps between two samples: after steps 1, 1 + n, 1 + 2n, ... as Lightning's
            `EMAWeightAveraging(update_every_n_steps=n)`.
        start_step: Number of optimizer steps before the first sample.
        tables: Whether to average tables that the backward updates, or the names of those to average. Tables of the
            dense optimizer belong to the dense part.
        use_buffers: Whether floating-point buffers of dense modules and feature processors are averaged, too, and
            others copied at each sample. With False evaluations use the buffers as they are.

    Raises:
        ValueError: An argument is out of its range; at the start of a fit, another strategy, a module without tables,
            an unknown table, or one whose rows cannot be averaged (of a managed collision module, in a cache, or with
            fewer than 32 bits).
    """

    def __init__(
        self,
        decay: float = 0.999,
        every_n_steps: int = 1,
        start_step: int = 0,
        tables: AskedTables = False,
        use_buffers: bool = True,
    ) -> None:
        if not 0 <= decay < 1:
            raise ValueError(f"decay must be at least 0 and below 1, got {decay}. 0.999 averages about 1,000 samples.")
        if every_n_steps < 1:
            raise ValueError(f"every_n_steps must be at least 1, got {every_n_steps}.")
        if start_step < 0:
            raise ValueError(f"start_step must be at least 0, got {start_step}.")
        if isinstance(tables, str) or not (isinstance(tables, bool) or all(isinstance(name, str) for name in tables)):
            raise TypeError(f"tables must be True, False or a list of names of tables, got {tables!r}.")
        self._decay, self._every, self._start = decay, every_n_steps, start_step
        self._tables, self._use_buffers = tables if isinstance(tables, bool) else tuple(tables), use_buffers
        self._warned = False
        self._forget_all()

    def _forget_all(self) -> None:
        self._strategy: OverlapEmbeddingStrategy | None = None
        self._module: weakref.ref[LightningModule] | None = None  # of the averages
        self._averages: Averages | None = None
        self._evaluation: Request | None = None  # for the averages, of the evaluation that goes on
        self._last = -1  # index of the last sampled optimizer step, from 0

    def __getstate__(self) -> dict[str, Any]:
        # Averages belong to a module and its ranks; a copy begins without any.
        new = type(self).__new__(type(self))
        new._forget_all()
        return {**vars(self), **vars(new)}

    @property
    def num_samples(self) -> int:
        """Number of samples in the averages; 0 before the first."""
        return 0 if self._averages is None else self._averages.num_samples

    @override
    def setup(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        strategy = trainer.strategy
        if not isinstance(strategy, OverlapEmbeddingStrategy):
            raise ValueError(
                f"ExponentialMovingAverage needs OverlapEmbeddingStrategy, got {type(strategy).__name__}: with other "
                "strategies use Lightning's EMAWeightAveraging."
            )
        others = [one for one in trainer.callbacks if isinstance(one, ExponentialMovingAverage)]  # type: ignore[attr-defined]
        if len(others) > 1:
            raise ValueError(f"a Trainer takes one ExponentialMovingAverage, got {len(others)}: remove the others.")
        self._strategy, strategy.averages = strategy, self
        if self._module is None or self._module() is not pl_module:
            self._forget(pl_module)

    def _forget(self, module: LightningModule) -> None:
        if self._module is not None and self._module() is not None:
            self.end_evaluation()  # the module of before keeps its trained weights
        self._end_watch()
        self._module, self._averages, self._last = weakref.ref(module), None, -1
        self._evaluation = None

    def _made(self) -> Averages:
        """Return the averages; made here the first time, of the sharded module."""
        module = None if self._module is None else self._module()
        assert module is not None, "no fit and no evaluation has begun"
        if self._averages is None:
            options: dict[str, Any] = {"tables": self._tables, "use_buffers": self._use_buffers}
            self._averages = Averages(module, decay=self._decay, **options)
        return self._averages

    @override
    def on_train_start(self, trainer: Trainer, pl_module: LightningModule) -> None:
        assert self._strategy is not None
        if (access := self._strategy.table_access) is None:
            raise ValueError(
                f"{type(pl_module).__name__} has no TorchRec tables: use Lightning's EMAWeightAveraging instead of "
                "ExponentialMovingAverage."
            )
        self._warned = False
        self._last = min(self._last, trainer.global_step - 1)  # another Trainer counts anew
        self._made().watch(access)
        self._sample_if_due(trainer)  # of a step whose checkpoint was saved before its sample

    @override
    def on_train_batch_end(
        self, trainer: Trainer, pl_module: LightningModule, outputs: Any, batch: Any, batch_idx: int
    ) -> None:
        self._sample_if_due(trainer)

    def _sample_if_due(self, trainer: Trainer) -> None:
        step = trainer.global_step - 1
        if step <= self._last or step < self._start or step // self._every == self._last // self._every:
            return
        self._last = step
        assert self._strategy is not None
        averages = self._made()
        with self._strategy.trained_weights():
            is_late = self._sample(averages)
        if is_late and not self._warned:
            self._warned = True
            warnings.warn(
                "tables were written between two steps while the averages of rows that were not updated lately had "
                "samples to make up for: these rows' older values are missing in them. Call "
                "ExponentialMovingAverage.bring_up_to_date() before you write tables.",
                stacklevel=2,
            )

    def _catch_up(self, trainer: Trainer) -> None:
        """Take the sample of the step that has ended: callbacks before this one may save, or read averages, first."""
        assert self._strategy is not None
        has_ended = trainer.training and not trainer.interrupted and not self._strategy.is_within_step
        if has_ended and self._averages is not None and self._averages.is_watched:
            self._sample_if_due(trainer)

    def _sample(self, averages: Averages) -> bool:
        """Take a sample; return whether a write by hand may have hidden older values of rows."""
        assert self._strategy is not None
        if self._tables:
            # A sample has the updates of its own step in every mode. Which step defers its update depends on where a
            # fit begins, so otherwise a resumed fit would take other samples.
            self._strategy.update_tables()
        if averages.num_samples and not averages.visits_all:
            return averages.sample()
        with self._strategy.between_lookups():
            return averages.sample()

    @override
    def on_train_epoch_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        self.bring_up_to_date()  # later hooks may write tables

    def bring_up_to_date(self) -> None:
        """Make up for the samples of all rows; call this before you write tables by hand in the middle of a fit.

        Without it the averages miss values that such a write replaces; a warning says so. Not needed in the end of an
        epoch, after an evaluation or a save, or if each step writes tables from the first one on.
        """
        averages, strategy = self._averages, self._strategy
        if averages is not None and strategy is not None and averages.num_samples and not averages.is_swapped:
            with strategy.between_lookups():
                averages.bring_all()

    @override
    def on_train_end(self, trainer: Trainer, pl_module: LightningModule) -> None:
        if self._strategy is not None:
            self._strategy.update_tables()
        self.bring_up_to_date()
        self._end_watch()

    def _end_watch(self) -> None:
        if self._averages is not None:
            self._averages.unwatch()

    def begin_evaluation(self) -> None:
        """Let the module have its averages, before any hook of an evaluation; the strategy calls this on all ranks."""
        self.end_evaluation()
        if self.num_samples:
            self._evaluation = self._ledger.ask(self._made())

    def end_evaluation(self) -> None:
        """End what `begin_evaluation` has asked for: before `on_validation_end` and the like, and after an error."""
        request, self._evaluation = self._evaluation, None
        if request is not None:
            self._ledger.end(request)

    @override
    def on_exception(self, trainer: Trainer, pl_module: LightningModule, exception: BaseException) -> None:
        try:
            self.end_evaluation()
        except Exception as err:  # the first error counts, and the strategy has to hear of it
            exception.add_note(f"The averages are still in the module: {type(err).__name__}: {err}")
        self._end_watch()

    @override
    def teardown(self, trainer: Trainer, pl_module: LightningModule, stage: str) -> None:
        self.end_evaluation()
        self._end_watch()

    @property
    def _ledger(self) -> Ledger:
        module = None if self._module is None else self._module()
        assert module is not None, "no fit and no evaluation has begun"
        return ledger_of(module)

    @contextmanager
    def averaged(self) -> Iterator[None]:
        """Within this context the module has the averages; all ranks enter it alike, in any hook or after a fit.

        Lookups, reads and copies of the module get the averages. `trainer.save_checkpoint(path)` saves them as the
        module's weights, for serving: a whole checkpoint of the strategy's format without `AVERAGES`, on which no
        increment stands, and which `ckpt_path="last"` does not find. Training within it is an error. Before the first
        sample the module keeps its weights.
        """
        if self._strategy is not None and self._strategy.running_trainer is not None:
            self._catch_up(self._strategy.running_trainer)
        if not self.num_samples:
            yield
            return
        assert self._strategy is not None
        self._strategy.update_tables()  # deferred updates belong to the trained weights
        with self._ledger.holding(self._made(), by_user=True):
            yield

    @contextmanager
    def trained_weights(self) -> Iterator[None]:
        """Within this context the module has its trained weights, also in an evaluation and within `averaged()`."""
        with self._ledger.holding(None, by_user=True):
            yield

    def averaged_state_dict(self) -> dict[str, Tensor]:
        """Return the module's `state_dict` with the averages in place of weights, on rank 0; all ranks call this.

        Tensors are copies on the host, whole tables among them; the unsharded module loads them. Other ranks get {}.
        """
        assert self._strategy is not None, "no fit and no evaluation has begun"
        module = self._strategy.lightning_module
        assert module is not None
        self._strategy.finish_save()  # its thread uses the same group
        with self.averaged():
            whole = gather(module.state_dict(), self._strategy.checkpoint_group)
            return {name: value.detach().clone() for name, value in whole}

    @override
    def on_save_checkpoint(self, trainer: Trainer, pl_module: LightningModule, checkpoint: dict[str, Any]) -> None:
        if self._strategy is not None and self._strategy.saves_averages:
            return
        self._catch_up(trainer)
        self.bring_up_to_date()
        state: dict[str, Any] = {"num_samples": self.num_samples, "last_step": self._last}
        checkpoint[STATE] = state
        if self.num_samples:
            averages = self._made()
            state |= {"num_whole": averages.num_whole, "names": sorted(averages.pieces)}
            checkpoint[AVERAGES] = dict(averages.pieces)

    def memory(self) -> Mapping[str, Piece]:
        """Return the memory of the averages by name; the strategy loads a checkpoint into it."""
        return self._made().pieces

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the averages of a checkpoint whose weights the module has; the strategy calls this on all ranks."""
        state, saved = checkpoint.get(STATE), checkpoint.get(AVERAGES)
        module = None if self._module is None else self._module()
        if module is None or self._strategy is None:
            return
        is_first = self._strategy.global_rank == 0
        if not state or not state["num_samples"]:
            self._forget(module)
            self._last = -1 if not state else state["last_step"]
            if state is None and is_first:
                warnings.warn(
                    "the checkpoint has no averages of ExponentialMovingAverage: it was saved without it, or within "
                    "averaged(). New averages begin with the loaded weights.",
                    stacklevel=2,
                )
            return
        averages = self._made()
        there = set(state["names"])
        names = there & set(averages.pieces)
        if isinstance(saved, Mapping):  # of a file; a folder's are loaded
            averages.fill({name: saved[name] for name in names})
        new, unused = sorted(set(averages.pieces) - names), sorted(there - names)
        averages.take_weights(module, new)
        averages.begin(state["num_samples"], state["num_whole"])
        self._last = state["last_step"]
        if (new or unused) and is_first:
            warnings.warn(
                "ExponentialMovingAverage: the checkpoint's averages are not those that this run asks for."
                f"{f' {some(new)}: averages begin with the loaded weights.' if new else ''}"
                f"{f' {some(unused)}: saved averages are not used.' if unused else ''}",
                stacklevel=2,
            )
