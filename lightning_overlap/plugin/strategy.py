"""`OverlapEmbeddingStrategy`: shards a LightningModule's tables and overlaps their lookup with the dense part."""

from __future__ import annotations

import contextlib
import sys
import warnings
from collections.abc import Callable, Iterator
from functools import partial
from typing import Any, TypeVar

import torch.distributed as dist
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import GradientAccumulationScheduler
from lightning.pytorch.strategies import StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from ..distributed import FirstCause, GroupConsensus, default_store, groups
from ..runtime import Executor, LookupOrder, Observer, StageTimer, Streams, make_streams, observe_nothing
from ..schedules import (
    Schedule,
    Stage,
    StreamName,
    check_lookup_threads,
    check_stash,
    resolve_schedule,
    resolve_stream,
    with_exact_warmup,
)
from ..sparse import GradientStash, SparseOptions, SparsePipeline, StaleRows
from ..tables import (
    FusedOptimizer,
    Sharding,
    check_dense_optimizers,
    check_fused_optimizer,
    has_model_parallel_tables,
    has_tables,
    leave_shards_behind,
    rate_setter,
    shard_tables,
    sharded_modules,
    sharded_state_names,
)
from . import checkpoint_links, evaluation_loops, fit_loop, processes, sigterm, step_hooks
from .checkpoint_hooks import SavesShards
from .step_hooks import runs_between_backward_and_step
from .unsupported import refuse_callbacks, refuse_precision

T = TypeVar("T")

STRATEGY_NAMES = {
    "overlap_embedding": "popen",
    "overlap_embedding_spawn": "spawn",
    "overlap_embedding_fork": "fork",
    "overlap_embedding_notebook": "fork",
}
"""What `Trainer(strategy=...)` takes, as Lightning's `ddp`, `ddp_spawn`, ...: the name, how processes are started."""

_NO_DDP_OPTIONS = frozenset(
    {
        *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
        *("process_group_backend", "timeout", "start_method"),
    }
)
"""What `DDPStrategy` takes that is of no concern to DistributedDataParallel."""

SAVE_TIMEOUT_S = 20
"""How long a rank that failed waits for the others to fail too, before it saves with them."""


class OverlapEmbeddingStrategy(
    evaluation_loops.EvaluatesAhead, step_hooks.WalksSteps, SavesShards, processes.StartsProcesses
):
    """Trains an unmodified LightningModule with TorchRec tables, the lookup of coming batches overlapped.

    The tables are sharded over all ranks; the rest of the module is wrapped in DistributedDataParallel (on one rank
    only where options of its are given). A module without tables trains exactly as with `DDPStrategy`.

    Args:
        pipeline: A mode's name (see `lightning_overlap.MODES`) or a `Schedule`.
        stream: Where early lookups run: `current`, `data_dist` or `dedicated`.
        sharding: None for TorchRec's planner; a sharding type for all tables; `{"table": "table_wise", ...}`
            (the planner decides about tables that are not named); a planner; a `ShardingPlan`. Unless told so,
            tables with a fused optimizer do not become data-parallel, where they would lose it.
        fused_optimizer: `(class, kwargs)` or `functools.partial(class, **kwargs)`, applied in backward to the
            tables that have no optimizer applied in backward yet. Without it the planner may leave such tables
            whole on every rank (data-parallel), for the optimizer of `configure_optimizers`; it says so.
        staleness: Of `pipeline="async_lookup"`: how many updates, in batches, a lookup does not see; from 1 on.
        defer_update: In a mode with a staleness, let the all-to-all of gradients travel beside the optimizer step and
            the next forward, and update the tables then; the staleness stays what it is. An evaluation, a checkpoint
            and the end of an epoch find the tables up to date; a callback at the end of a batch finds them without
            that batch's update.
        stash_gradients: In a mode of staleness k, let each step of the dense optimizers apply the gradients of k steps
            before, so that they are as old as the rows. The first k steps have none to apply; the last k steps'
            gradients are applied at the end of `fit`. A checkpoint holds those that wait.
        num_lookup_threads: In a mode with a staleness, on a CPU: so many threads run the kernels of early lookups
            beside the backward, a module each; the main thread sends what they find. 0: it looks up, too.
        start_batch: A mode with a staleness begins with this batch, counted over all epochs; the ones before it train
            exactly, as in `fused_sparse_dist`. No batch is lost or looked up twice, and no device is waited for.
        end_batch: From this batch on exactly again; the lookups under way are still used.
        release_features: Give the memory of a batch's ids back as soon as they are sent, steps before the batch is
            trained. `training_step` can then hand a KeyedJaggedTensor to its module and read its keys and lengths; its
            values and weights are gone, and reading them is an error that says so.
        copy_in_place: On CUDA, let batches take their memory on the device from the compute stream's pool, where they
            take turns with activations, in the place of a pool of their own. Their copy then begins behind the forward.
        observer: Called with ("issue" | "wait", stage, batch) for every stage issued and every result waited for.
        checkpoint_format: `sharded` (a folder, every rank writes its shards), `full` (one file, gathered on the host
            of rank 0, for the unsharded module too), or None: sharded above one rank or with `async_checkpoint`.
            Either loads whatever the format, the number of ranks and the sharding plan of the run.
        async_checkpoint: Write folders beside training, from a copy of this rank's shards on the host. The next save
            and the end of `fit` wait for the one under way, and raise its error.
        **kwargs: What `DDPStrategy` takes. With a `start_method` of "spawn" or "fork" (in notebooks) the process that
            starts the others gets whole tables back into its module, which stays unsharded.

    Raises:
        ValueError: Unknown mode, stream or checkpoint format (the nearest names are listed), a Schedule that cannot
            run, a `staleness`, `defer_update`, `stash_gradients`, `start_batch` or `end_batch` that the mode does not
            take, or `async_checkpoint` with `checkpoint_format="full"`.
        TypeError: An argument of the wrong type.
    """

    def __init__(
        self,
        pipeline: str | Schedule = "fused_sparse_dist",
        stream: str = "data_dist",
        sharding: Sharding = None,
        fused_optimizer: FusedOptimizer | None = None,
        *,
        staleness: int | None = None,
        defer_update: bool = False,
        stash_gradients: bool = False,
        num_lookup_threads: int = 0,
        start_batch: int = 0,
        end_batch: int | None = None,
        release_features: bool = False,
        copy_in_place: bool = False,
        observer: Observer | None = None,
        checkpoint_format: str | None = None,
        async_checkpoint: bool = False,
        **kwargs: Any,
    ) -> None:
        self.schedule = resolve_schedule(pipeline, staleness, defer_update)
        self._schedules = with_exact_warmup(self.schedule, start_batch, end_batch)
        self._stash_gradients = check_stash(stash_gradients, self.schedule)
        self._num_lookup_threads = check_lookup_threads(num_lookup_threads, self.schedule)
        self._release_features = release_features
        self._copy_in_place = copy_in_place
        self.stream = stream
        self._lookup_stream = resolve_stream(stream)
        check_fused_optimizer(fused_optimizer)
        super().__init__(checkpoint_format=checkpoint_format, async_checkpoint=async_checkpoint, **kwargs)
        self._has_ddp_options = not kwargs.keys() <= _NO_DDP_OPTIONS
        self.sharding = sharding
        self.fused_optimizer = fused_optimizer
        self._observer = observer
        self._warned: set[tuple[str, str | None]] = set()
        self._group_timeout = kwargs.get("timeout", default_pg_timeout)
        self.forget_run()

    @override
    def forget_run(self) -> None:
        self._trainer: Trainer | None = None
        self._groups: groups.Groups | None = None
        self._first_cause: FirstCause | None = None
        self._all_failed = False
        self._executor = self._sparse = self._streams = self._evaluations = self._transferred = None
        self.save_through(None)
        self._stash = GradientStash()

    @override
    def __repr__(self) -> str:
        # The Trainer of the package `pytorch_lightning`, which has classes of its own, prints this as it refuses it.
        return (
            f"<{type(self).__name__}(pipeline={self.schedule.name!r}, stream={self.stream!r}): this is a "
            "lightning.pytorch strategy: use lightning.pytorch.Trainer (import lightning.pytorch as pl)>"
        )

    # -- set-up -------------------------------------------------------------------------------------------------

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.model is not None
        self._stop_pipeline()  # where a callback raised in its on_exception, nobody has done so
        overlaps = has_tables(self.model)
        fitting = trainer.state.fn == TrainerFn.FITTING
        if overlaps:
            refuse_precision(self.precision_plugin.precision)
            if fitting:
                refuse_callbacks(trainer.callbacks, self.model)  # type: ignore[attr-defined]
            self._join_groups()
            store, self._all_failed = default_store(), False
            self._first_cause = FirstCause(store, self.global_rank) if store is not None else None
            self._trainer = trainer
            self._evaluations = evaluation_loops.Evaluations(
                partial(self._make_pipeline, self.schedule.evaluation), self._make_evaluation_executor
            )
            evaluation_loops.install(trainer, self._evaluations.make_executor)
            sigterm.install(trainer)
        if overlaps and fitting:
            # Before super().setup(): configure_optimizers may ask for the number of steps, which sets up the data.
            fit_loop.install(trainer, self._make_executor)
            checkpoint_links.install(trainer, self.on_commit)
            self._warn_of_ignored_options(trainer)
        super().setup(trainer)
        if overlaps and self._streams is None:
            assert self.lightning_module is not None
            # Data-parallel lookups alone have no all-to-all to hide behind: another stream would only cost.
            travels = has_model_parallel_tables(self.lightning_module)
            side = self._lookup_stream if travels else StreamName.COMPUTE
            self._streams = make_streams(self.root_device, side)
        if overlaps and fitting:
            self._sparse = self._make_pipeline(self.schedule, "training_step")
            self._sparse.attach()

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        # Tables first, each shard straight to its rank: whole tables may not fit on any one device.
        if self._groups is not None:
            shard_tables(
                self.model,
                sharding=self.sharding,
                fused_optimizer=self.fused_optimizer,
                group=self._groups.tables,
                device=self.root_device,
                local_world_size=self.num_processes,
            )
            leave_shards_behind(self.model)
            ignored = sharded_state_names(self.model)
            DistributedDataParallel._set_params_and_buffers_to_ignore_for_model(self.model, ignored)
        super().model_to_device()

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        if self._groups is not None and self.world_size == 1 and not self._has_ddp_options:
            return  # nobody to share gradients with: they are what they would be, in less time
        ignored = sharded_state_names(self.model)
        if not any(p.requires_grad for name, p in self.model.named_parameters() if name not in ignored):
            return
        super().configure_ddp()

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        assert self.lightning_module is not None
        check_dense_optimizers(self.lightning_module, self.optimizers)

    def _warn_of_ignored_options(self, trainer: Trainer) -> None:
        if self.global_rank != 0:
            return
        schedulers = [c for c in trainer.callbacks if isinstance(c, GradientAccumulationScheduler)]  # type: ignore[attr-defined]
        if trainer.accumulate_grad_batches != 1 or any(s.going_to_accumulate_grad_batches() for s in schedulers):
            number = f"accumulate_grad_batches={trainer.accumulate_grad_batches}"
            warnings.warn(
                f"{type(schedulers[0]).__name__ if schedulers else number} accumulates dense gradients only: "
                "fused tables are updated inside the backward of every batch.",
                UserWarning,
                stacklevel=2,
            )
        if trainer.gradient_clip_val:
            warnings.warn(
                f"gradient_clip_val={trainer.gradient_clip_val} clips dense gradients only: those of fused tables "
                "never leave the backward kernel (FBGEMM clips them by its own fused_params).",
                UserWarning,
                stacklevel=2,
            )

    def _join_groups(self) -> None:
        joined = groups.join(self._group_timeout, multi_node=self.world_size > self.num_processes)
        if joined is not self._groups:
            self._groups = joined
            self.save_through(self._groups.checkpoints)

    @property
    def _consensus(self) -> GroupConsensus | None:
        return None if self._groups is None else self._groups.consensus

    def _make_pipeline(self, schedule: Schedule, step: str) -> SparsePipeline:
        assert self.lightning_module is not None
        assert self._streams is not None
        assert self._groups is not None
        lookup = schedule.step_of(Stage.EMBEDDING_LOOKUP)
        trains = Stage.BACKWARD in schedule.training_stages
        options = SparseOptions(
            step=step,
            trains=trains,
            observer=self._observer if trains and self._observer is not None else observe_nothing,
            rank=self.global_rank,
            store=default_store(),
            set_rates=rate_setter(self.optimizers) if trains else None,
            warned=self._warned,
            num_threads=self._num_lookup_threads if trains and self.root_device.type == "cpu" else 0,
            prefetches=schedule.step_of(Stage.PREFETCH) is not None,
            releases=self._release_features and trains,
            multi_node=self._groups.multi_node,
            any_rank=self.any_rank,
            timeout_s=self._group_timeout.total_seconds(),
            # With manual optimization there may be several backwards, of which nobody says what each of them writes.
            fills_waits=trains and self.lightning_module.automatic_optimization,
        )
        order = LookupOrder(self._streams, StreamName.COMPUTE if lookup is None else lookup.stream)
        return SparsePipeline(sharded_modules(self.lightning_module), self._groups.lookahead, order, options)

    def shortest_epoch(self, num_batches: float) -> float:
        """Return the fewest batches that any rank has in an epoch; `inf` where no loader has a length."""
        return num_batches if self._consensus is None else self._consensus.shortest(num_batches)

    def gather(self, value: Any) -> list[Any]:
        """Return every rank's value, by rank, on the host; anything that can be pickled. All ranks call this."""
        return [value] if self._consensus is None else self._consensus.gather(value)

    def any_rank(self, flag: bool) -> bool:
        """Whether any rank says so; all of them wait for each other."""
        return self._consensus is not None and self._consensus.any(flag)

    def _make_executor(self, fetcher: fit_loop.LookaheadFetcher) -> Executor:
        assert self._sparse is not None
        assert self._trainer is not None
        self._executor = Executor(
            self._schedules,
            fetcher,
            self._sparse,
            self._sparse.order,
            consensus=self._consensus,
            lookup_context=self.precision_plugin.train_step_context,
            observer=self._observer,
            rank=self.global_rank,
            num_before=partial(fit_loop.num_trained, self._trainer),
            any_rank=self.any_rank,
            hooks_read_tables=runs_between_backward_and_step(self._trainer),
        )
        return self._executor

    @property
    def streams(self) -> Streams | None:
        """The streams that the stages run on; None for a module without tables, which has no pipeline."""
        return self._streams

    @property
    def num_in_flight(self) -> int:
        """Batches fetched whose step is not over, or whose update of the tables is still to come."""
        if self._executor is None:
            return 0
        return self._executor.num_ahead + (self._executor.current is not None) + self._executor.num_to_update

    def watch(self, timer: StageTimer | None) -> None:
        """Let a clock see the coming steps of this fit, or none."""
        if self._sparse is not None:
            self._sparse.order.timer = timer

    def stale_rows(self) -> StaleRows | None:
        """Return what counts the rows that this fit reads stale; None in exact modes, and without fused tables."""
        if not self.schedule.staleness or self._sparse is None:
            return None
        assert self._streams is not None
        assert self._groups is not None
        lookup = self.schedule.step_of(Stage.EMBEDDING_LOOKUP)
        assert lookup is not None
        rows = StaleRows(self._sparse, lambda: self._executor, self._groups.lookahead, self._streams, lookup.stream)
        return rows if rows.tables else None

    # -- evaluation ---------------------------------------------------------------------------------------------

    def _make_evaluation_executor(self, fetcher: fit_loop.LookaheadFetcher, sparse: SparsePipeline) -> Executor:
        return Executor(
            self.schedule.evaluation,
            fetcher,
            sparse,
            sparse.order,
            consensus=self._consensus,
            lookup_context=self.precision_plugin.val_step_context,
            rank=self.global_rank,
            any_rank=self.any_rank,
        )

    @override
    def _begin_evaluation(self, step: str) -> None:
        self.update_tables()
        super()._begin_evaluation(step)

    def update_tables(self) -> None:
        """Make the updates of tables that a deferring schedule has left for later; all ranks call this."""
        if self._executor is not None:
            self._executor.updates.make_all()

    def tables_changed(self) -> None:
        """Say that a callback or a hook has written tables between two steps; all ranks call this alike.

        What has been looked up for the batches to come is left aside; they are looked up anew in their own step.
        """
        if self._executor is not None:
            self._executor.writes.tables_changed()

    @override
    def _end_evaluation(self) -> None:
        super()._end_evaluation()
        if self._executor is not None:
            self._executor.writes.ask()

    # -- checkpoints, and what ranks tell each other ------------------------------------------------------------

    @override
    @contextlib.contextmanager
    def saving(self) -> Iterator[None]:
        with contextlib.ExitStack() as stack:
            if self._executor is not None:
                self._executor.updates.make_all()
                stack.enter_context(self._executor.without_lookups_ahead())
                self._executor.wait_for_lookups()
                self._executor.writes.ask()
            yield

    @property
    @override
    def checkpoint_group(self) -> dist.ProcessGroup | None:
        return None if self._groups is None else self._groups.checkpoints

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        save = partial(super().save_checkpoint, checkpoint, filepath, storage_options)
        self._first_error_first("no checkpoint of it was saved", save)

    @override
    def broadcast(self, obj: Any, src: int = 0) -> Any:
        self._save_together_or_not()
        # `Trainer(max_time=...)` broadcasts for every batch: with NCCL the host would wait for the device each time.
        group = None if self._groups is None else self._groups.consensus
        if self._interrupted and self.checkpoint_group is not None:
            self._end_save(sys.exception())  # a thread uses its group until then
            group = GroupConsensus(self.checkpoint_group)  # in the other one, questions may be under way
        broadcast = super().broadcast if group is None else group.broadcast
        return self._first_error_first("a broadcast that followed it failed", partial(broadcast, obj, src))

    def _save_together_or_not(self) -> None:
        """Let no callback save in `on_exception` unless all ranks do: the others would be waited for, for long.

        Raises:
            BaseException: This rank's own error: with a note, and in the place of a timeout's.
        """
        first = sys.exception()
        if first is None or self._first_cause is None or self._all_failed or not self._interrupted:
            return
        # Those that wait for this rank fail when the group's time is up: that is not together.
        timeout_s = min(SAVE_TIMEOUT_S, self._group_timeout.total_seconds() / 2)
        place = "" if self._executor is None else f"{self._executor.place} of {self._executor.num_fetched}"
        self._all_failed = self._first_cause.all_failed(self.world_size, place, timeout_s)
        if not self._all_failed:
            first.add_note(f"no checkpoint of it was saved: other ranks did not fail there too, within {timeout_s:g} s")
            raise self._torn_down(first)

    def _first_error_first(self, what: str, action: Callable[[], T]) -> T:
        """Do something; while a run's error is handled, turn what that raises into a note of it, and raise that one."""
        first = sys.exception() if self._interrupted else None
        try:
            return action()
        except Exception as err:
            if first is None or err is first:
                raise
            first.add_note(f"{what}: {type(err).__name__}: {err}")
        raise self._torn_down(first)

    def _torn_down(self, first: BaseException) -> BaseException:
        """Do what Lightning does after the callbacks' `on_exception`, so that one of them may raise the run's error."""
        trainer = self._trainer
        self.on_exception(first)
        if trainer is not None:
            fit_loop.tear_down(trainer)
        return first

    def _end_save(self, error: BaseException | None) -> None:
        """Wait for the save that goes on beside training; its failure is a note of an error that is handled."""
        try:
            self._folder_saver.wait()
        except Exception as err:
            if error is None:
                raise
            error.add_note(f"And the checkpoint that was being written beside training failed: {err}")

    @property
    @override
    def _running_trainer(self) -> Trainer | None:
        return self._trainer

    @property
    def _interrupted(self) -> bool:
        return self._trainer is not None and self._trainer.interrupted

    # -- the end ------------------------------------------------------------------------------------------------

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self._folder_saver.wait()

    @override
    def on_exception(self, exception: BaseException) -> None:
        super().on_exception(exception)
        place = "outside of training" if self._executor is None else self._executor.place
        if groups.timed_out(exception):
            waited_s = self._group_timeout.total_seconds()
            exception.add_note(
                f"Another rank did not answer within {waited_s:g} s: see what it said last. If it only takes longer, "
                "pass a longer timeout= to the strategy."
            )
        if self._executor is not None:
            exception.add_note(f"rank {self.global_rank} was {place}")
            missing = self._executor.updates.settle(SAVE_TIMEOUT_S)
            if missing is not None:
                exception.add_note(f"{missing}, the dense part has it: resume from a checkpoint")
        if self._first_cause is not None:
            self._first_cause.note(exception, place)
        self._stop_pipeline()
        groups.forget()
        self._end_save(exception)

    @override
    def teardown(self) -> None:
        self._stop_pipeline()
        module = self.lightning_module
        # What is on meta cannot be moved to a CPU either: the error would hide the one that came before sharding.
        if module is None or not (sharded_modules(module) or any(weight.is_meta for weight in module.parameters())):
            super().teardown()
            return
        # As FSDPStrategy: shards stay where they are, for a later fit, validate, test or predict.
        if isinstance(self.model, DistributedDataParallel):
            self.model = self.lightning_module
        fit_loop.revert_layer_sync(self)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    def _stop_pipeline(self) -> None:
        """Drop what is in flight and put everything back that was put in place."""
        if self._executor is not None:
            with contextlib.suppress(RuntimeError):  # a broken device must not hide what broke it
                self._executor.wait_for_lookups()
            self._executor.abandon()
            self._executor = None
        if self._evaluations is not None:
            self._evaluations.abandon()
            self._evaluations = None
        if self._sparse is not None:
            self._sparse.detach()
            self._sparse = None
        if self._trainer is not None:
            sigterm.uninstall(self._trainer)
            evaluation_loops.uninstall(self._trainer)
            fit_loop.uninstall(self._trainer)
            checkpoint_links.uninstall(self._trainer)
            self._trainer = None

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        what = "TorchRec tables sharded, their lookup overlapped with the dense part"
        for name, start_method in STRATEGY_NAMES.items():
            if name not in strategy_registry:
                description = f"{what}, with `start_method` '{start_method}'"
                strategy_registry.register(name, cls, description=description, start_method=start_method)


OverlapEmbeddingStrategy.register_strategies(StrategyRegistry)
