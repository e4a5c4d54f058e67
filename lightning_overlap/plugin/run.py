"""State that the base classes of the strategy share: the current run, and the objects that outlive it."""

from collections.abc import Iterator, Mapping, Sequence
from contextlib import AbstractContextManager, ExitStack, contextmanager, suppress
from datetime import timedelta
from functools import partial
from typing import Any, Protocol

import torch.distributed as dist
from lightning.pytorch import LightningModule, Trainer
from torch import nn
from torch.distributed.constants import default_pg_timeout

from ..balance import Balance, Balancer
from ..checkpoint import INCREMENTAL, Increments, Piece
from ..compat.lightning import Strategy
from ..compat.torch import never_compile_methods
from ..dense import SplitLayers
from ..distributed import Call, Consensus, Lowest, SharedCalls, groups
from ..runtime import Rates, StageTimer, Streams, TableAccess, Telemetry, Walker, free_abandoned
from ..schedules import StreamName
from ..sparse import SparsePipeline
from ..tables import KeptPlan, Ledger, OtherWeights, ledger_of, plan_of, sharded_modules
from ..tuning import Tuner
from .learning_rates import LearningRates
from .mid_step import MidStep
from .nonfinite import NonfiniteLosses


class Fit:
    """The training of a fit."""

    def __init__(
        self, model: nn.Module, sparse: SparsePipeline, rates: LearningRates | None, tuner: Tuner | None
    ) -> None:
        self.sparse = sparse
        self.rates = rates  # None on one rank: several ranks compare theirs
        self.tuner = tuner  # tries modes until it has chosen one; None if the user has named a mode
        self.split_layers: SplitLayers | None = None  # the layers whose backward is split, if the mode splits any
        self.walker: Walker | None = None  # None until the fit loop wants its first batch
        self.increments: Increments | None = None  # with checkpoint_format="incremental"
        self.mid_step = MidStep(model)  # whether a save would have a part of a step

    def disturbs(self, what: str) -> None:
        """Tell the tuner that `what` takes time between two steps, which then do not count; all ranks call this."""
        if self.tuner is not None:
            self.tuner.void(what)

    def finish(self) -> None:
        """Complete the work that was started, on all ranks alike."""
        if self.walker is not None:
            self.walker.drain()
            self.walker.wait_for_lookups()
        if self.tuner is not None:
            self.tuner.finish()

    def abandon(self) -> None:
        """Drop the work in flight, without a collective."""
        if self.walker is not None:
            with suppress(RuntimeError):  # a broken device must not hide what broke it
                self.walker.wait_for_lookups()
            self.walker.abandon()
            self.walker = None


class Evaluation:
    """A validation, a test or predictions; also a validation inside a fit."""

    def __init__(self, sparse: SparsePipeline) -> None:
        self.sparse = sparse
        self.walker: Walker | None = None  # None until its loop wants the first batch, and with `dataloader_iter`

    def abandon(self) -> None:
        """Drop the work in flight, without a collective, and give the modules their former forwards back."""
        if self.walker is not None:
            self.walker.abandon()
        self.sparse.detach()


class Run:
    """One call of the trainer's `fit`, `validate`, `test` or `predict`, for a module with tables."""

    def __init__(self, trainer: Trainer) -> None:
        self.trainer = trainer
        self.undo = ExitStack()  # undoes the changes of Lightning's objects and of the module when it is closed
        self.fit: Fit | None = None  # None until the tables are sharded, and in another run than a fit
        self.evaluation: Evaluation | None = None  # the current one
        self.pipelines: dict[str, SparsePipeline] = {}  # of evaluations, by the user's method (`validation_step`, ...)
        self.balancer: Balancer | None = None  # on several ranks, with the option `balance`

    def abandon_evaluation(self) -> None:
        """Drop an evaluation's work in flight, without a collective."""
        if self.evaluation is not None:
            self.evaluation.abandon()
            self.evaluation = None

    def stop(self) -> None:
        """Drop all work in flight, without a collective, and give the modules their own forwards back."""
        if self.fit is not None:
            self.fit.abandon()
        self.abandon_evaluation()
        self.undo.close()


class WeightAverages(Protocol):
    """What keeps averages of a module's weights: the strategy loads them, and evaluates them."""

    def memory(self) -> Mapping[str, Piece]:
        """Return the memory of averages by the weights' names in `state_dict`, to load into; all ranks call this."""

    def load(self, checkpoint: Mapping[str, Any]) -> None:
        """Take the averages of a checkpoint whose weights are in the module; all ranks call this."""

    def begin_evaluation(self) -> None:
        """Let the module have the averages, before the hooks of an evaluation; all ranks call this."""

    def end_evaluation(self) -> None:
        """Let the module have its trained weights again, before the hooks at the evaluation's end."""


@never_compile_methods
class HasRun(Strategy):
    """Base of the strategy's other base classes: state that several of them need, and exchanges between ranks.

    A step that is compiled may call any method of a strategy, and by manual optimization does.
    """

    def __init_subclass__(cls, **kwargs: Any) -> None:
        super().__init_subclass__(**kwargs)
        never_compile_methods(cls)

    balance: Balance | None = None  # the strategy's option
    checkpoint_format: str | None = None  # the strategy's option
    averages: WeightAverages | None = None  # of a callback, which sets it before this strategy's set-up
    _tuner: Tuner | None = None  # with `pipeline="auto"`: tries modes, or has chosen one

    def __init__(self, **kwargs: Any) -> None:
        super().__init__(**kwargs)
        self._group_timeout: timedelta = kwargs.get("timeout") or default_pg_timeout
        self.timeout_s = self._group_timeout.total_seconds()  # how long a rank waits for the others in a collective
        self.forget_run()

    def forget_run(self) -> None:
        """Reset all state of runs, as before the first run; a copy of the strategy also starts like this."""
        self._run: Run | None = None  # None outside of runs, and for a module without tables
        self.leave_groups()
        self.streams: Streams | None = None  # of the stages; None before the tables are sharded
        self._shared_calls: SharedCalls | None = None  # of users' reads of tables; None on one rank
        self._losses: NonfiniteLosses | None = None  # of the last fit, with the option `nonfinite`
        self._waits_in: Call | None = None  # while this rank waits for the same call of all ranks
        self._num_stages_done = 0  # of training: forwards, backwards and optimizer steps

    def stop_run(self) -> None:
        """Drop the work in flight of the run that goes on, if any, and undo its changes."""
        if self._losses is not None:
            self._losses.end()
        if self._run is not None:
            self._run.stop()
            self._run = None

    # What goes on.

    @property
    def _module(self) -> LightningModule:
        module = self.lightning_module
        assert module is not None
        return module

    @property
    def _is_sharded(self) -> bool:
        return self.lightning_module is not None and bool(sharded_modules(self.lightning_module))

    @property
    def running_trainer(self) -> Trainer | None:
        """The trainer of the run that goes on; None outside of runs, and without tables."""
        return None if self._run is None else self._run.trainer

    @property
    def _fit(self) -> Fit | None:
        """The training that goes on; None outside of a fit, and without tables."""
        return None if self._run is None else self._run.fit

    @property
    def is_within_step(self) -> bool:
        """Whether a step of training is under way, up to the end of its optimizer's step."""
        return self._fit is not None and self._fit.mid_step.is_under_way

    @property
    def _walker(self) -> Walker | None:
        """The walker of training; None before its first batch, and outside of a fit."""
        fit = self._fit
        return None if fit is None else fit.walker

    @property
    def sharding_plan(self) -> KeptPlan:
        """The plan that the tables were sharded by: keep it with `torch.save`, and pass it as `sharding=` again."""
        if self.lightning_module is None:
            raise RuntimeError("no module yet: read the plan in fit (in on_fit_start, say) or after it.")
        return plan_of(self.lightning_module)

    @property
    def telemetry(self) -> Telemetry | None:
        """What tells profilers and timers of this fit's stages; None outside of a fit, and without tables."""
        return None if self._fit is None else self._fit.sparse.telemetry

    @property
    def table_access(self) -> TableAccess | None:
        """Who uses the tables of this fit beside its steps; None outside of a fit, and without tables."""
        return None if self._fit is None else self._fit.sparse.table_access

    @property
    def num_in_flight(self) -> int:
        """Batches fetched whose step is not over, or whose update of the tables is still to come."""
        return 0 if self._walker is None else self._walker.num_in_flight

    @property
    def num_nonfinite(self) -> int:
        """With `nonfinite="skip"`: backwards of the last fit that trained nothing, as their loss was not finite."""
        return 0 if self._losses is None else self._losses.num_found

    def num_pending_updates(self) -> int:
        """Return the number of batches that have ended their step and not yet updated the tables."""
        return 0 if self._walker is None else len(self._walker.updates.to_update)

    def watch(self, timer: StageTimer | None) -> None:
        """Let a timer record the coming steps of this fit; None stops recording."""
        if self.telemetry is not None:
            self.telemetry.timer = timer

    # The tables between two steps.

    def update_tables(self) -> None:
        """Make the updates of tables that a deferring schedule has deferred; all ranks call this."""
        if self._walker is not None:
            self._walker.updates.make_all()

    def settle_exchanges(self) -> None:
        """Wait until the ranks have exchanged the samples of the batches that were taken; all ranks call this."""
        if self._run is not None and self._run.balancer is not None:
            self._run.balancer.settle()

    def settle_save(self) -> None:
        """Wait until the rows of an incremental checkpoint are copied, so that it can be completed."""
        if self._fit is not None and self._fit.increments is not None:
            self._fit.increments.settle()

    def end_epoch(self) -> None:
        """Make the updates that are left in an epoch; all ranks call this."""
        self.settle_save()
        if self._fit is not None:
            self._fit.disturbs("epoch")
            self.update_tables()

    def tables_changed(self) -> None:
        """Announce that a callback or a hook has written tables between two steps; all ranks call this alike.

        The early lookups of coming batches are dropped and repeated in the batches' own steps. Raises a RuntimeError if
        an update of tables is still to come (`defer_update`), or if the ids of the next batches were
        released (`release_features`).
        """
        if self._walker is not None:
            self._walker.writes.tables_changed()
        if self.table_access is not None:
            self.table_access.num_changed += 1

    @contextmanager
    def saving(self) -> Iterator[None]:
        """Within this context tables and kernels' iteration counts have the state after the last trained batch.

        The module has its trained weights, or the averages if the user has asked for them: see `saves_averages`.
        """
        if self._fit is not None:
            self._fit.disturbs("save")
        saved = self._ledger.holding(self._saved_weights)
        if (walker := self._walker) is None:
            with saved:
                yield
            return
        walker.updates.make_all()
        with saved, walker.without_lookups_ahead():
            walker.wait_for_lookups()
            walker.writes.poll_next()
            yield

    @property
    def _ledger(self) -> Ledger:
        return ledger_of(self._module)

    @property
    def _saved_weights(self) -> OtherWeights | None:
        """What a save takes as the module's weights now, None for the trained ones: what the user has asked for.

        While callbacks handle an error, a save is for a resume: it takes the trained weights.
        """
        return None if self._interrupted else self._ledger.asked

    @property
    def saves_averages(self) -> bool:
        """Whether a save would now have averages in the place of the module's weights; the same on all ranks."""
        return self._saved_weights is not None

    def trained_weights(self) -> AbstractContextManager[None]:
        """Return a context within which the module has its trained weights; all ranks enter it alike."""
        return self._ledger.holding(None)

    @property
    def _interrupted(self) -> bool:
        """Whether callbacks handle an error of the run."""
        return self._run is not None and self._run.trainer.interrupted

    @contextmanager
    def between_lookups(self) -> Iterator[None]:
        """Within this context the compute stream may read and write tables: after all that was issued, before the rest.

        Early lookups are not repeated: write values that are the same again before training goes on.
        """
        fit, evaluation = self._fit, None if self._run is None else self._run.evaluation
        for wait in [] if fit is None else fit.sparse.table_access.readers:
            wait()
        streams = None if fit is None and evaluation is None else self.streams
        if streams is not None:
            streams.order(streams.lookup, then=StreamName.COMPUTE)
        try:
            yield
        finally:
            if streams is not None:
                streams.order(StreamName.COMPUTE, then=streams.lookup)

    @contextmanager
    def reading(self) -> Iterator[None]:
        """Within this context tables have the update of every backward that has ended, and no stream uses them."""
        if self._fit is not None:
            self._fit.disturbs("read of a table")
        self.update_tables()
        with self.between_lookups():
            yield

    # Exchanges between ranks.

    def _begin_shared_calls(self) -> None:
        """Begin the next part of a run; all ranks call this alike, before they wait for each other."""
        if self._shared_calls is not None:
            self._shared_calls.begin_shared_calls()

    def leave_groups(self) -> None:
        """Forget the process groups of earlier runs."""
        self._joined: groups.Groups | None = None  # None before the first run with tables in a default group

    def join_groups(self) -> None:
        """Join the process groups of the coming run; all ranks call this at the same point."""
        balances, multi_node = self.balance is not None, self.world_size > self.num_processes
        increments = self.checkpoint_format == INCREMENTAL
        free_abandoned()
        self._joined = groups.join(self._group_timeout, multi_node=multi_node, balances=balances, increments=increments)

    @property
    def _groups(self) -> groups.Groups | None:
        """The groups of this strategy's runs; joined anew if they have ended, as a run of another strategy failed."""
        if self._joined is not None and self._joined.has_ended:
            self.join_groups()
        return self._joined

    @property
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        """A gloo group of all ranks, for checkpoints alone; None on one rank."""
        return None if self._groups is None else self._groups.checkpoints

    @property
    def _consensus(self) -> Consensus | None:
        return None if self._groups is None else self._groups.consensus

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, any picklable object, by rank; all ranks call this and wait."""
        self._begin_shared_calls()
        return [value] if self._consensus is None else self._consensus.gather(value)

    def _learning_rates(self) -> Rates:
        """Return this rank's learning rates, for a comparison with other ranks'."""
        return Rates() if self._fit is None or self._fit.rates is None else self._fit.rates.now()

    def lowest(self, numbers: Sequence[int]) -> Lowest:
        """Start to find the minima over all ranks; return a function that waits for them. All ranks call this alike."""
        self._begin_shared_calls()
        return partial(list, numbers) if self._consensus is None else self._consensus.lowest(numbers)

    def any_rank(self, flag: bool) -> bool:
        """Return whether any rank passes True; all ranks call this and wait for each other."""
        self._begin_shared_calls()
        return flag if self._consensus is None else self._consensus.any(flag)
