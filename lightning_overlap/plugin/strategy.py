"""`OverlapEmbeddingStrategy`: takes the user's options, and makes a run's shards, streams, pipelines and walkers."""

import warnings
from collections.abc import Callable
from datetime import timedelta
from functools import partial
from inspect import Parameter, signature
from typing import Any, get_args

from lightning.pytorch import LightningModule, Trainer
from lightning.pytorch.strategies import DDPStrategy, StrategyRegistry
from lightning.pytorch.trainer.states import TrainerFn
from lightning.pytorch.utilities.parsing import lightning_getattr, lightning_hasattr
from lightning.pytorch.utilities.seed import isolate_rng
from torch import nn
from torch.distributed.constants import default_pg_timeout
from torch.nn.parallel import DistributedDataParallel
from typing_extensions import override

from .. import checkpoint as checkpoints
from .. import tables
from ..balance import Balance, Balanced, Balancer, check_balance
from ..compat import lightning as compat
from ..compat.torch import ignore_in_ddp
from ..distributed import default_store, warn_on_rank_zero
from ..runtime import BatchSource, Observer, Rates, Streams, Telemetry, Walker, make_streams
from ..schedules import (
    Mode,
    ModeName,
    Schedule,
    Schedules,
    Stage,
    StreamName,
    StreamPolicy,
    resolve_mode,
    resolve_stream,
)
from ..sparse import SparseOptions, SparsePipeline, StaleRows
from ..tables import FusedOptimizer, OutOfRangeIds, QuantizedComms, ReplicateTables, Sharding
from ..text import check_known, some
from ..tuning import TRIED, Auto, Tuner, resolve_auto
from ..versions import check_names
from . import checkpoint_links, first_words, found_checkpoints, unsupported
from .learning_rates import LearningRates
from .loops import BatchStream, LookaheadFetcher, StepArguments, evaluation_loops, fit_loop, preemption, sigterm
from .nonfinite import Nonfinite, NonfiniteLosses, check_nonfinite
from .processes import StartsProcesses
from .run import Evaluation, Fit, Run
from .split_backward import check_all_ranks, split_layers, why_whole
from .step_hooks import WalksSteps, hooks_run_after
from .table_reads import ReadsTables

STRATEGY_NAMES = {
    "overlap_embedding": "popen",
    "overlap_embedding_spawn": "spawn",
    "overlap_embedding_fork": "fork",
    "overlap_embedding_notebook": "fork",
}
"""Names for `Trainer(strategy=...)`, like Lightning's `ddp`, `ddp_spawn`, ..., with the `start_method` of each."""

_SHORTEST, _LONGEST = timedelta(milliseconds=1), timedelta(days=36_525)  # what torch can represent as a timeout

_DDP_DEFAULTS = {  # LightningCLI passes them all
    name: one.default
    for kind in (DistributedDataParallel, DDPStrategy)
    for name, one in signature(kind).parameters.items()
}
_NO_DDP_OPTIONS = {  # arguments of `DDPStrategy` that it does not pass on to DistributedDataParallel
    *("accelerator", "parallel_devices", "cluster_environment", "checkpoint_io", "precision_plugin"),
    *("process_group_backend", "start_method"),
}


class OverlapEmbeddingStrategy(ReadsTables, WalksSteps, StartsProcesses):
    """Trains an unmodified LightningModule with TorchRec tables, the lookup of coming batches overlapped.

    The tables are sharded over all ranks; the rest of the module is wrapped in DistributedDataParallel (on one rank
    only if you pass options of it). A module without tables trains exactly as with `DDPStrategy`.

    Args:
        pipeline: A mode's name (see `lightning_overlap.MODES`, or as the log prints it: "async_lookup_3"), a `Mode` (a
            name and its options), a `Schedule` or its text, or "auto" (or `Auto`, its options): exact modes take turns
            during training until the fastest one is chosen.
        stream: Where early lookups run: `current`, `data_dist` or `dedicated`.
        sharding: None for TorchRec's planner; a sharding type for all tables; `{"item_table": "table_wise", ...}`, by
            the `name` in a table's config (the planner decides about the others); a planner; a `ShardingPlan`. A table
            that is made data-parallel here, and not by `replicate_tables`, loses its fused optimizer.
        fused_optimizer: `(class, kwargs)` or `functools.partial(class, **kwargs)`; in YAML
            `[torch.optim.SGD, {lr: 0.1}]`, or `class_path:` and `init_args:`. It is applied in backward to the tables
            that have no such optimizer yet. Without it such a table is refused, unless `sharding` makes it
            data-parallel, for the optimizer of `configure_optimizers`.
        quantized_comms: Precision in which embeddings and their gradients are sent between ranks: "fp16", "bf16",
            "fp8", "int8" or "mx4", one for each direction (`("fp16", "bf16")`), or TorchRec's `QCommsConfig`; None:
            full precision. TorchRec sends 65504 for a number that FP16 cannot hold, and rounds small ones to zero.
        replicate_tables: Tables that every rank holds whole; their fused optimizer updates them alike on all ranks.
            None: tables with fewer rows than a rank's `batch_size` (of the data module or the module), unless
            `sharding` names their sharding type; a number: tables with fewer rows; names: these tables; False: none.
        rate_per_table: Give each table a kernel, and a parameter group of `combined_optimizer`, of its own, so that a
            schedule can move or stop one table. Lookups of several tables in one kernel are faster.
        release_features: Free the memory of a batch's ids as soon as they are sent. `training_step` can then pass a
            KeyedJaggedTensor to its module and read its keys and lengths, but not its values or weights.
        copy_in_place: On CUDA, allocate batches in the compute stream's memory pool, which activations can use again.
            The copy of a batch then begins after the forward.
        max_queued_steps: On CUDA, how many steps the host may queue before the device has ended them; None: any number.
            More take memory: blocks that two streams have used are free only once the device is past both uses.
        out_of_range_ids: On a CPU, what to do about an id that its table has no row for: "error", "warning" (once, then
            as FBGEMM does) or "fbgemm" (no check). On CUDA the kernels' `bounds_check_mode` alone decides.
        nonfinite: What to do about a loss that is not finite on some rank: "skip" (its backward trains nothing: tables,
            dense weights and optimizer states of all ranks stay as they are), "error" (a RuntimeError on all ranks,
            with the same state) or None (it trains). Before each backward the ranks then exchange a flag.
        balance: A `Balance`, whose function gives the cost of each sample: before a batch is copied to the device, the
            ranks exchange its samples so that their costs are alike, while earlier batches train. None: each rank
            trains the batches of its data loader.
        observer: Called with ("issue" | "wait", stage, batch) for every issued stage and every wait for a result.
        checkpoint_format: `sharded` (a folder, every rank writes its shards), `full` (one file, gathered on the host
            of rank 0, which the unsharded module can load), `incremental` (folders that have the rows which changed,
            and share the rest with earlier ones), or None: sharded above one rank or with `async_checkpoint`. A
            run loads all formats, from any number of ranks and any sharding plan.
        async_checkpoint: Write folders while training goes on, from a copy of this rank's shards on the host. The next
            save and the end of `fit` wait for the save under way, and raise its error.
        most_increments: With `checkpoint_format="incremental"`: once the changed rows since the last whole tables were
            written have more than this part of their bytes, the next checkpoint is whole. 0: every second one.
        calm_libraries: Filter out log records and warnings of TorchRec and FBGEMM about their own calls.
        timeout: How long a rank waits for the others in a collective: a number of seconds or a `datetime.timedelta`, in
            LightningCLI also "h:mm:ss". None: torch's default, 30 minutes.
        **kwargs: Arguments of `DDPStrategy`. With a `start_method` of "spawn" or "fork" (in notebooks) the module of
            the process that starts the others stays unsharded and gets whole tables back.

    Raises:
        ValueError: An unknown name, a Schedule that cannot run, or `async_checkpoint` with `checkpoint_format="full"`.
        TypeError: An argument of the wrong type, or one that DistributedDataParallel does not know either.
    """

    def __init__(
        self,
        pipeline: ModeName | str | Mode | Schedule | Auto = "fused_sparse_dist",
        stream: StreamPolicy = "data_dist",
        sharding: Sharding = None,
        fused_optimizer: FusedOptimizer | None = None,
        *,
        quantized_comms: QuantizedComms = None,
        replicate_tables: ReplicateTables = None,
        rate_per_table: bool = False,
        release_features: bool = False,
        copy_in_place: bool = False,
        max_queued_steps: int | None = 2,
        out_of_range_ids: OutOfRangeIds = "error",
        nonfinite: Nonfinite = None,
        balance: Balance | None = None,
        observer: Observer | None = None,
        checkpoint_format: str | None = None,
        async_checkpoint: bool = False,
        most_increments: float = 0.5,
        calm_libraries: bool = True,
        timeout: timedelta | float | None = default_pg_timeout,
        **kwargs: Any,
    ) -> None:
        # Checks.
        unsupported.check_arguments(type(self), kwargs, pipeline)
        auto = resolve_auto(pipeline)
        mode = resolve_mode(TRIED[0] if auto is not None or isinstance(pipeline, Auto) else pipeline)
        lookup_stream = resolve_stream(stream)
        tables.check_sharding_types(sharding)
        tables.check_fused_optimizer(fused_optimizer)
        tables.check_replicate_tables(replicate_tables)
        comms = tables.resolve_quantized_comms(quantized_comms)
        _check_queued_steps(max_queued_steps)
        check_known("choice", out_of_range_ids, get_args(OutOfRangeIds), "out_of_range_ids: ")
        check_nonfinite(nonfinite)
        check_balance(balance)
        checkpoints.check_format(checkpoint_format, async_checkpoint, most_increments)
        if not (observer is None or callable(observer)):
            raise TypeError(f"observer is called with (kind, stage, batch), got {observer!r}.")

        super().__init__(timeout=_as_timedelta(timeout), **kwargs)
        chosen = {name for name, value in kwargs.items() if value is not _DDP_DEFAULTS.get(name, Parameter.empty)}
        self._has_ddp_options = not chosen <= _NO_DDP_OPTIONS
        self._mode, self._schedule = mode, mode.schedule  # with "auto" those that a fit begins with
        self._tuner = None if auto is None else Tuner(auto, stream)
        self._schedules = self._tuner or mode.schedules  # which table is walked for which batch
        self.stream, self._lookup_stream = stream, lookup_stream
        self.sharding, self.fused_optimizer, self.replicate_tables = sharding, fused_optimizer, replicate_tables
        self.quantized_comms, self.rate_per_table = comms, bool(rate_per_table)
        self._release_features, self._copy_in_place = release_features, copy_in_place
        self._max_queued_steps, self._out_of_range_ids = max_queued_steps, out_of_range_ids
        self.nonfinite, self.balance = nonfinite, balance
        self.checkpoint_format, self.async_checkpoint = checkpoint_format, async_checkpoint
        self.most_increments = most_increments
        self._observer, self._calm_libraries = observer, calm_libraries
        self._warned: set[tuple[str, str | None]] = set()

    @override
    def __repr__(self) -> str:
        # The Trainer of the package `pytorch_lightning` prints this when it refuses the strategy.
        chosen = f"pipeline={self.schedule.name!r}, stream={self.stream!r}"
        return f"<{type(self).__name__} for lightning.pytorch.Trainer: {chosen}>"

    @property
    def schedule(self) -> Schedule:
        """The mode; with `pipeline="auto"` the mode of the next batch, which changes until one is chosen."""
        return self._schedule if self._tuner is None else self._tuner.schedule

    @override
    def connect(self, model: LightningModule) -> None:
        if self.model is not None and model is not self.model:  # Lightning has set `lightning_module` already
            self.streams = None  # they depend on whether the module has lookups to send
            if self._tuner is not None:
                self._tuner.forget()
        super().connect(model)

    @override
    def setup(self, trainer: Trainer) -> None:
        assert self.model is not None
        self.stop_run()  # a run whose callback raised in on_exception was not stopped
        fits = trainer.state.fn == TrainerFn.FITTING
        self._check_collections(self.model)
        if tables.has_tables(self.model):
            self._begin_run(trainer, self.model, fits)
        elif self.balance is not None:
            warn_on_rank_zero(
                "balance has no effect: the module has no TorchRec tables, so it trains as with DDPStrategy."
            )
        if not tables.has_tables(self.model):
            self._warn_of_options_of_tables()
        super().setup(trainer)
        if fits and self.nonfinite is not None:
            consensus = None if self._run is None else self._consensus
            self._losses = NonfiniteLosses(self.nonfinite, trainer, self.root_device, consensus)
        if self._run is None:
            return
        sends_embeddings = tables.has_model_parallel_tables(self._module)
        if self.streams is None:
            # If all tables are data-parallel there is no all-to-all to hide, and another stream would only cost.
            lookup_stream = self._lookup_stream if sends_embeddings else StreamName.COMPUTE
            self.streams = make_streams(self.root_device, lookup_stream)
        if fits:
            self._begin_fit(self._run, self.streams, sends_embeddings)

    def _check_collections(self, model: nn.Module) -> None:
        """Refuse options that name tables which nothing shards; warn once of collections that no sharder takes."""
        tables.refuse_compiled_collections(model)
        tables.check_named_tables(model, self.sharding, self.replicate_tables)
        for one in tables.collections_left_whole(model):
            if self.global_rank == 0 and (one.name, one.message) not in self._warned:
                self._warned.add((one.name, one.message))
                warnings.warn(one.message, stacklevel=2)

    def _warn_of_options_of_tables(self) -> None:
        """Say once which options nothing takes, as the module has no tables."""
        ignored = tables.options_of_tables(
            self.sharding, self.fused_optimizer, self.replicate_tables, self.rate_per_table
        )
        others = ("quantized_comms", "checkpoint_format", "async_checkpoint")
        ignored += [f"{name}=" for name in others if getattr(self, name)]
        ignored += ["release_features="] if self._release_features else []
        message = f"{some(ignored, 9)} of the strategy has no effect: the module has no TorchRec tables. Leave it out."
        if ignored and ("", message) not in self._warned:
            self._warned.add(("", message))
            warn_on_rank_zero(message)

    def _begin_run(self, trainer: Trainer, model: nn.Module, fits: bool) -> None:
        unsupported.refuse_device(self.root_device)
        on_cpu = self.root_device.type == "cpu"
        first_words.calm_libraries(self._calm_libraries)
        unsupported.refuse_precision(self.precision_plugin.precision)
        if fits:
            static_graph = bool(compat.ddp_options(self).get("static_graph"))
            unsupported.refuse_fit(trainer, model, on_cpu=on_cpu, static_graph=static_graph)
            if on_cpu:
                tables.refuse_reset_rows(model, self.fused_optimizer)
        self.join_groups()
        self.compare_reads()
        self._run = Run(trainer)
        tables.ledger_of(self._module).exchange_beside(self)
        samples = None if self._groups is None else self._groups.samples
        if self.balance is not None and samples is not None:
            self._run.balancer = Balancer(self.balance, samples, first_words.warn)
            self._run.undo.callback(self._run.balancer.close)
        check_names("lightning", compat.PRIVATE_NAMES, {"Trainer": trainer})  # `owners` reads its names
        check_names("lightning", compat.PRIVATE_NAMES, compat.owners(trainer))
        undo = self._run.undo
        for changes in (evaluation_loops, preemption, sigterm):
            changes.install(trainer, undo)
        found_checkpoints.install(trainer, undo, self.gather)
        if fits:
            # Before super().setup(): configure_optimizers may ask for the number of steps, which sets up the data.
            fit_loop.install(trainer, undo)
            checkpoint_links.install(trainer, undo, self._folder_saver.on_commit)

    def _begin_fit(self, run: Run, streams: Streams, sends_embeddings: bool) -> None:
        module, schedule, is_first = self._module, self.schedule, self.global_rank == 0
        self._ledger.check_trained("a fit would train averages")
        self.check_checkpoint_paths(run.trainer)
        unsupported.refuse_clipping(run.trainer, module, run.undo)
        if is_first:
            unsupported.warn_of_ignored_options(run.trainer, module)
            self.warn_of_uploads(run.trainer)
            if self.nonfinite == "skip":
                tables.warn_of_moves_on_zeros(module)
        rates = LearningRates(run.trainer, self.gather) if self.world_size > 1 else None
        set_rates = tables.rate_setter(self.optimizers)
        for kernel in tables.replica_kernels(module):
            kernel.set_rates = set_rates
            kernel.pass_on = None if self._losses is None else self._losses.guard.pass_on
        sparse = self._make_pipeline(schedule, "training_step")
        fit = run.fit = Fit(self._module, sparse, rates, self._tuner)
        run.undo.callback(sparse.detach)
        sparse.attach()
        self.begin_increments(fit, run.undo)
        whole = why_whole(module, self.optimizers, compat.ddp_options(self), sparse)
        check_all_ranks(schedule.name, whole, self.gather)
        if whole is None and (schedule.splits_backward or fit.tuner is not None):
            fit.split_layers = split_layers(module, self.model, compat.comm_hook(self), self.gather)
            run.undo.callback(fit.split_layers.detach)
        if fit.tuner is not None:
            run.undo.callback(fit.tuner.stop)
            fit.tuner.begin(
                self.root_device,
                streams,
                self.gather,
                first_words.tell if is_first else first_words.tell_nobody,
                moves_lookups=sends_embeddings,
                splits=whole is None,
                per_step=run.trainer.accumulate_grad_batches,
            )
        of_kernels: dict[str, str] = {}
        if tables.sharded_by_user(module) or tables.trains_itself(module):
            for theirs in self.gather(tables.kernel_optimizers(module)):
                of_kernels |= theirs
        if is_first:
            first_words.tell("\n  ".join(self._first_lines(sparse, whole, of_kernels)))

    def _first_lines(self, sparse: SparsePipeline, whole: str | None, of_kernels: dict[str, str]) -> list[str]:
        """Return what the log says as a fit begins; `whole`: why its backward cannot be split.

        `of_kernels` has what trains the tables that the strategy has given no fused optimizer.
        """
        mode = first_words.of_mode(self._mode) if self._tuner is None else self._tuner.first_words
        if self.schedule.splits_backward and whole is not None:
            mode += f" (the backward runs whole: {whole})"
        ranks = f"{self.world_size} rank{'s' * (self.world_size != 1)}"
        schedulers = [config.scheduler for config in self.lr_scheduler_configs]
        moved = any(getattr(one.optimizer, "fused_groups", None) for one in schedulers)  # of combined_optimizer
        return [
            f"lightning_overlap: {mode}, stream {self.stream}, {ranks}",
            *tables.table_lines(self._module, self.optimizers, of_kernels, scheduled=bool(schedulers), moved=moved),
            *tables.dense_lines(self.optimizers),
            *[f"{name} runs unpipelined: {reason}" for name, reason in sparse.unpipelined.items()],
        ]

    @override
    def model_to_device(self) -> None:
        assert self.model is not None
        # Tables first, each shard straight to its rank: whole tables may not fit on any one device.
        on_cpu = self.root_device.type == "cpu"
        if self._groups is not None:
            # From where `BatchSizeFinder` looks for it: data module, module, their hyperparameters.
            module, has_size = self._module, lightning_hasattr(self._module, "batch_size")
            batch_size = lightning_getattr(module, "batch_size") if has_size else None
            # DDPStrategy draws nothing here: from now on ranks toss the same coins, and dropout drops the same.
            with isolate_rng(include_cuda=not on_cpu):
                options = tables.ShardingOptions(
                    sharding=self.sharding,
                    fused_optimizer=self.fused_optimizer,
                    quantized_comms=self.quantized_comms,
                    replicate_tables=self.replicate_tables,
                    rate_per_table=self.rate_per_table,
                    group=self._groups.tables,
                    on_host=self._groups.checkpoints,
                    device=self.root_device,
                    local_world_size=self.num_processes,
                    batch_size=batch_size if isinstance(batch_size, int) and batch_size > 0 else None,
                    sends_buffers=bool(compat.ddp_options(self).get("broadcast_buffers", True)),
                    # Between hosts on a CPU a part is updated and looked up while the other part's gradients arrive.
                    in_two_parts=self._schedule.updates_before_step and on_cpu and self.world_size > self.num_processes,
                )
                before = set(tables.sharded_modules(self.model).values())
                tables.shard_tables(self.model, options)
                self._groups.users.update(set(tables.sharded_modules(self.model).values()) - before)
            ignored = tables.ShardedStateNames(self.model)
            ignore_in_ddp(self.model, ignored)
        super().model_to_device()

    @override
    def configure_ddp(self) -> None:
        assert self.model is not None
        if self._groups is not None and self.world_size == 1 and not self._has_ddp_options:
            return  # one rank has no gradients to average
        ignored = tables.ShardedStateNames(self.model)
        if not any(p.requires_grad for name, p in self.model.named_parameters() if name not in ignored):
            return
        super().configure_ddp()
        if isinstance(self.model, DistributedDataParallel):
            self.model.parameters_to_ignore = ignored  # it has made a plain set of the names

    @override
    def setup_optimizers(self, trainer: Trainer) -> None:
        super().setup_optimizers(trainer)
        tables.check_dense_optimizers(self._module, self.optimizers)
        tables.check_schedulers(config.scheduler for config in self.lr_scheduler_configs)

    def _make_pipeline(self, schedule: Schedule, method: str) -> SparsePipeline:
        """Make the pipeline of a schedule, whose modules the user's method calls (`training_step`, ...)."""
        assert self.streams is not None
        assert self._groups is not None
        lookup, module = schedule.step_of(Stage.EMBEDDING_LOOKUP), self._module
        trains = Stage.BACKWARD in schedule.training_stages
        options = SparseOptions(
            method=method,
            trains=trains,
            rank=self.global_rank,
            store=default_store(self.timeout_s),
            set_rates=tables.rate_setter(self.optimizers) if trains else None,
            warned=self._warned,
            prefetches=schedule.step_of(Stage.PREFETCH) is not None,
            releases=self._release_features and trains,
            multi_node=self.world_size > self.num_processes,
            any_rank=self.any_rank,
            out_of_range_ids=self._out_of_range_ids,
            guard=self._losses.guard if trains and self._losses is not None else None,
            timeout_s=self.timeout_s,
            # With manual optimization there may be several backwards, and it is not known which tables each writes.
            fills_waits=trains and module.automatic_optimization,
        )
        # All pipelines of a run have the same streams.
        self.streams.lookup = StreamName.COMPUTE if lookup is None else lookup.stream
        telemetry = Telemetry(self._observer if trains else None, self.global_rank)
        return SparsePipeline(tables.sharded_modules(module), self._groups.lookahead, self.streams, telemetry, options)

    def look_ahead(
        self, inner: compat.DataFetcher, step_arguments: StepArguments, next_number: Callable[[], int] | None = None
    ) -> LookaheadFetcher:
        """Return a fetcher that stages the batches of `inner` ahead; `next_number` gives a fit's next `batch_idx`."""
        assert self._run is not None
        trains, sends_sizes = next_number is not None, self.schedule.has_sparse_stages
        balancer, fn = self._run.balancer, self._run.trainer.state.fn
        if balancer is not None and not trains and not (balancer.options.evaluation and fn != TrainerFn.PREDICTING):
            balancer = None
        stream = BatchStream(
            inner,
            self._run.trainer,
            trains=trains,
            sends_sizes=sends_sizes,
            balancer=balancer,
            rates_now=self._learning_rates if trains else Rates,
        )
        return LookaheadFetcher(stream, step_arguments, self._begin_shared_calls, next_number)

    def make_walker(self, stream: BatchStream) -> Walker:
        """Make the walker of training, or of the evaluation that has begun, with its source of batches."""
        run = self._run
        assert run is not None
        if stream.trains:
            assert run.fit is not None
            run.fit.walker = self._training_walker(run.fit, run.trainer, stream)
            return run.fit.walker
        assert run.evaluation is not None
        schedule, context = self.schedule.evaluation, self.precision_plugin.val_step_context
        run.evaluation.walker = self._walker_of(run.evaluation.sparse, schedule, stream, lookup_context=context)
        return run.evaluation.walker

    def _training_walker(self, fit: Fit, trainer: Trainer, stream: BatchStream) -> Walker:
        epoch_loop = trainer.fit_loop.epoch_loop
        runs_whole = self.schedule.splits_backward and fit.split_layers is None
        return self._walker_of(
            fit.sparse,
            self.schedule.with_whole_backward if runs_whole else self._schedules,
            stream if fit.tuner is None else fit.tuner.timed(stream),
            lookup_context=self.precision_plugin.train_step_context,
            num_before=lambda: epoch_loop.total_batch_idx + 1,
            hooks_run_after=partial(hooks_run_after, trainer),
            weight_gradients=fit.split_layers,
        )

    def _walker_of(self, sparse: SparsePipeline, schedules: Schedules, source: BatchSource, **options: Any) -> Walker:
        return Walker(
            schedules,
            source,
            sparse,
            sparse.streams,
            sparse.telemetry,
            consensus=self._consensus,
            any_rank=self.any_rank,
            max_queued_steps=self._max_queued_steps,
            **options,
        )

    def begin_evaluation(self, method: str) -> None:
        """Update the tables, and replace the modules' forwards for an evaluation; all ranks call this.

        `method` is the user's for a batch: `validation_step`, `test_step` or `predict_step`.
        """
        run = self._run
        assert run is not None
        if run.fit is not None:
            run.fit.disturbs(method)
        self._begin_shared_calls()
        self.settle_save()
        self.update_tables()
        if method not in run.pipelines:
            run.pipelines[method] = self._make_pipeline(self.schedule.evaluation, method)
        run.evaluation = Evaluation(run.pipelines[method])
        run.evaluation.sparse.attach()
        if self.averages is not None:
            self.averages.begin_evaluation()

    def before_end_hooks(self) -> None:
        """Note that all that is left of an evaluation are its hooks `on_validation_end` and the like."""
        if self.averages is not None:
            self.averages.end_evaluation()

    def end_evaluation(self) -> None:
        """Complete the work that was started for batches that are not evaluated, on all ranks alike."""
        self._begin_shared_calls()
        run = self._run
        assert run is not None
        if run.evaluation is not None and run.evaluation.walker is not None:
            run.evaluation.walker.drain()
        self.settle_exchanges()
        run.abandon_evaluation()
        if (walker := self._walker) is not None:
            walker.writes.poll_next()  # before the next training batch: the evaluation may have written tables

    @property
    def balanced(self) -> Balanced | None:
        """What `balance` did to the batch that is being trained; None if it stayed as it was, and between batches."""
        current = None if self._walker is None else self._walker.batches.current
        return None if current is None else current.balanced

    def stale_rows(self) -> StaleRows | None:
        """Return a counter of the rows that this fit reads stale; None in exact modes, and without fused tables."""
        fit, groups = self._fit, self._groups
        if not self.schedule.staleness or fit is None or groups is None:
            return None
        rows = StaleRows(fit.sparse.modules, fit.sparse.shared, lambda: fit.walker, groups.lookahead)
        return rows if rows.tables else None

    @override
    def teardown(self) -> None:
        self.stop_run()
        if self._is_sharded:
            self.compare_later_reads()
        module = self.lightning_module
        # Lightning would move the module to the CPU. Tensors on meta cannot be moved: that error would hide the first.
        if not self._is_sharded and not (module is not None and any(weight.is_meta for weight in module.parameters())):
            super().teardown()
            return
        # As in FSDPStrategy shards stay where they are, for a later fit, validate, test or predict.
        if isinstance(self.model, DistributedDataParallel):
            self.model = module
        if self.model is not None:
            self.model = compat.without_layer_sync(self, self.model)
        assert self.cluster_environment is not None
        assert self.accelerator is not None
        self.cluster_environment.teardown()
        self.precision_plugin.teardown()
        self.accelerator.teardown()
        self.checkpoint_io.teardown()

    @classmethod
    @override
    def register_strategies(cls, strategy_registry: Any) -> None:
        what = "TorchRec tables sharded, their lookup overlapped with the dense part"
        for name, start_method in STRATEGY_NAMES.items():
            if name not in strategy_registry:
                words = f"{what}, with `start_method` '{start_method}'"
                strategy_registry.register(name, cls, description=words, start_method=start_method)


def _check_queued_steps(number: int | None) -> None:
    if number is not None and (not isinstance(number, int) or isinstance(number, bool)):
        raise TypeError(f"max_queued_steps is a number of steps, or None for any number, got {number!r}.")
    if number is not None and number < 1:
        raise ValueError(f"max_queued_steps must be at least 1, got {number}. With None the host never waits.")


def _as_timedelta(timeout: timedelta | float | None) -> timedelta | None:
    """Return the strategy's `timeout`, a number of seconds as a timedelta; raise a TypeError or ValueError."""
    if isinstance(timeout, bool) or not isinstance(timeout, timedelta | int | float | None):
        raise TypeError(
            "timeout is how long a rank waits for the others: a number of seconds or a datetime.timedelta, got "
            f"{timeout!r}. For example: timeout=1800."
        )
    try:
        time = timeout if timeout is None or isinstance(timeout, timedelta) else timedelta(seconds=timeout)
    except (ValueError, OverflowError):  # it is not finite
        time = timedelta(0)
    if time is not None and not _SHORTEST <= time <= _LONGEST:
        raise ValueError(
            f"timeout must be from a millisecond to 100 years, got {timeout!r}. With None it is torch's default, "
            f"{default_pg_timeout.total_seconds():g} seconds."
        )
    return time


OverlapEmbeddingStrategy.register_strategies(StrategyRegistry)
