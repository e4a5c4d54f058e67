"""The hooks of a strategy around checkpoints: which format is written and read, on every rank."""

import pickle
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from contextlib import ExitStack, contextmanager, suppress
from functools import partial
from pkgutil import resolve_name
from typing import Any, ClassVar

import torch
from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import Checkpoint, ModelCheckpoint
from lightning.pytorch.plugins.io import TorchCheckpointIO
from lightning.pytorch.trainer.states import TrainerFn
from torch import Tensor
from torch.optim import Optimizer
from typing_extensions import override

from .. import checkpoint as checkpoints
from ..checkpoint import (
    ASSIGNING_RANKS,
    COLLISIONS,
    FULL,
    INCREMENTAL,
    LOADERS,
    SHARDED,
    FolderSaver,
    Generators,
    Increments,
)
from ..compat.lightning import AFTER_SAVE, uploads_checkpoints
from ..distributed import gather_on_rank_zero, vote_together
from ..storage import About, DamagedError, Place, can_hold_folders, is_address, or_warn, place_at
from ..tables import hands_out_rows, has_tables, processor_buffers, rate_setter
from ..text import some, without_secrets
from . import checkpoint_links, first_words, found_checkpoints, mid_step
from .loops import METRICS
from .run import Fit, HasRun

# Entries of a checkpoint.
_LOADER = "combined_loader"  # Lightning's, with the states of this rank's data loaders
_CHOICE = "lightning_overlap_auto"  # the mode that `pipeline="auto"` has chosen


class SavesShards(HasRun):
    """The hooks of a strategy around checkpoints; a module without sharded tables is saved as DDPStrategy does."""

    checkpoint_readers: ClassVar[dict[str, str]] = {}
    """SCHEME -> the function that reads `ckpt_path="SCHEME://REST"`, by its name, "module:function".

    All ranks call it with REST and the trainer. It loads tables and fused state into the trainer's module, and returns
    Lightning's checkpoint: its `state_dict` shares the module's memory, and its entry of fused optimizers is None.
    """
    checkpoint_format: str | None
    async_checkpoint: bool
    most_increments: float
    _newest: Place | None = None  # the newest checkpoint from which a training can go on
    _newest_time = 0.0  # of the newest checkpoint that was saved or loaded
    _generators: Generators | None = None  # of a checkpoint that was loaded for a fit that has not begun
    _is_in_thread = False  # whether the newest save is made in a thread; the same on all ranks
    _told_of_folders = False
    _saves_at_once = False  # whether a checkpoint has to be complete when its save returns

    @override
    def forget_run(self) -> None:
        super().forget_run()
        self._generators = None
        self._folder_saver = FolderSaver(None)  # writes folders while training goes on

    @override
    def join_groups(self) -> None:
        before = self._joined
        super().join_groups()
        if self._joined is not before:
            self._folder_saver = FolderSaver(self.checkpoint_group)

    def finish_save(self, error: BaseException | None = None) -> None:
        """Wait for the save under way, if any, and raise its error, or note it in the error that is being handled."""
        self.settle_save()
        try:
            self._folder_saver.wait()
        except Exception as err:
            if error is None:
                raise
            error.add_note(f"The checkpoint that was being written in the background has failed as well: {err}")

    @override
    def on_train_end(self) -> None:
        super().on_train_end()
        self.finish_save()

    @contextmanager
    def saving_at_once(self) -> Iterator[None]:
        """Within this context a checkpoint is complete when its save returns, also with `async_checkpoint`."""
        self._saves_at_once = True
        try:
            yield
        finally:
            self._saves_at_once = False

    @property
    @override
    def restore_checkpoint_after_setup(self) -> bool:
        # A checkpoint of shards can be loaded into sharded tables only; TorchRec splits whole tables as it loads them.
        return self.model is not None and has_tables(self.model)

    @override
    def optimizer_state(self, optimizer: Optimizer) -> dict[str, Any]:
        state = super().optimizer_state(optimizer)
        if not self._is_sharded:
            return state
        return checkpoints.by_name(optimizer, state, self._module)

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        if not self._is_sharded:
            self._is_in_thread = False
            super().save_checkpoint(checkpoint, filepath, storage_options)
            return
        if self.is_within_step and self._fit is not None and "optimizer_states" in checkpoint and not self._interrupted:
            has_looked_up = self._fit.sparse.forwards.are_called
            # One rank alone may write a buffer, and the others would save without it.
            by_rank = self.gather(self._fit.mid_step.changed(has_looked_up=has_looked_up))
            if (changed := next((one for one in by_rank if one is not None), None)) is not None:
                raise mid_step.refusal(changed)
        self.settle_save()
        # Its thread uses `checkpoint_group`, as everything below does.
        self._folder_saver.wait()
        self._refuse_unequal_buffers()
        with self.saving():
            path = self.broadcast(filepath)
            self._save(checkpoint, path, self.choose_format(filepath, path), storage_options)

    def _refuse_unequal_buffers(self) -> None:
        """Raise a ValueError on all ranks if buffers of feature processors differ: a checkpoint has one value."""
        buffers = {name: one.detach().cpu() for name, one in processor_buffers(self._module).items()}
        of_ranks = self.gather(buffers) if buffers else []
        wrong = [name for name in buffers if any(not _same_bytes(one[name], of_ranks[0][name]) for one in of_ranks)]
        if wrong:
            raise ValueError(
                f"{some(wrong)}: these buffers of feature processors differ by rank, and a checkpoint would have one "
                "rank's values: the processors of a rank see the features of its own tables only. Register them with "
                "persistent=False if they need not be saved, keep such state in a module of your own, or train on one "
                "rank."
            )

    def begin_increments(self, fit: Fit, undo: ExitStack) -> None:
        """Begin to mark the rows that the next checkpoint has to have; all ranks call this as a fit begins."""
        if self.checkpoint_format == INCREMENTAL:
            if others := checkpoints.immovable_collisions(self._module):
                raise ValueError(
                    f"{others}: checkpoint_format='incremental' holds the ids of MCHManagedCollisionModule only. Use "
                    "checkpoint_format='sharded'."
                )
            access = fit.sparse.table_access
            fit.increments = Increments(self._module, access, self.checkpoint_group, self.most_increments)
            undo.callback(fit.increments.detach)

    def check_checkpoint_paths(self, trainer: Trainer) -> None:
        """Raise a ValueError before training if a callback would save where its checkpoints cannot be."""
        for callback in trainer.checkpoint_callbacks if self._format_of_saves != FULL else []:
            folder = getattr(callback, "dirpath", None)  # a ModelCheckpoint without one has got it in its set-up
            if _saves(callback) and folder is not None:
                checkpoints.check_folder_path(f"{str(folder).rstrip('/')}/last.ckpt", None, self.world_size)

    def warn_of_uploads(self, trainer: Trainer) -> None:
        """Warn of loggers that are to upload checkpoints and leave out folders; rank 0 calls this as a fit begins."""
        saves = any(
            isinstance(callback, ModelCheckpoint) and _saves(callback) for callback in trainer.checkpoint_callbacks
        )
        loggers = [type(logger).__name__ for logger in trainer.loggers if uploads_checkpoints(logger)]
        if saves and loggers and self._format_of_saves != FULL:
            first_words.warn(
                f"{some(loggers)} with log_model uploads no checkpoint of this run: it uploads files, and with "
                f"checkpoint_format='{self._format_of_saves}' a checkpoint is a folder. Use "
                "OverlapEmbeddingStrategy(checkpoint_format='full'), or upload what "
                "`python -m lightning_overlap.consolidate FOLDER` makes."
            )

    @property
    def _format_of_saves(self) -> str:
        """The format of new checkpoints; known once the tables are sharded."""
        whole = self.world_size == 1 and not self.async_checkpoint
        return self.checkpoint_format or (FULL if whole else SHARDED)

    def choose_format(self, own_path: Any, path: Any) -> str:
        """Return the format of a checkpoint at `path`, which rank 0 was given, and this rank `own_path`.

        All ranks call this.
        """
        return self._format_of_saves

    def _save(self, checkpoint: dict[str, Any], filepath: Any, saved_format: str, storage_options: Any) -> None:
        module, serves = self._module, self.saves_averages
        resumable = "optimizer_states" in checkpoint and not serves
        place = self._place_of_save(filepath, storage_options, saved_format)
        # Outside of training nothing would wait for a thread, nor raise its error.
        in_fit = self.running_trainer is not None and self._fits
        self._is_in_thread = self.async_checkpoint and in_fit and not self._saves_at_once and saved_format != FULL
        # Without optimizers, or with averages as weights, a checkpoint has other state than the increments.
        increments = self._fit.increments if self._fit is not None and in_fit and resumable else None
        follows = increments is not None and place is not None and increments.can_follow(place)
        # Rank 0 alone writes the state that is not sharded, so it gets the loader states and metrics of all ranks. They
        # may be the user's: what cannot be pickled on one rank is an error on all.
        fit_loop = _fit_loop(checkpoint)
        pickled = partial(pickle.dumps, (fit_loop.get(_LOADER), fit_loop.pop(METRICS, None)))
        own, all_follow = vote_together(pickled, follows, self.checkpoint_group)
        of_ranks = map(pickle.loads, gather_on_rank_zero(own, self.checkpoint_group))
        for name, states in zip((LOADERS, METRICS), zip(*of_ranks, strict=True), strict=False):  # on rank 0
            if any(states):
                checkpoint[name] = list(states)
        if hands_out_rows(module):
            checkpoint[ASSIGNING_RANKS] = self.world_size
        if self._tuner is not None and self._tuner.has_chosen:
            checkpoint[_CHOICE] = self._tuner.state_dict()
        # What is saved after an error may be half of a step: "last" does not find it.
        stands_for: tuple[str, ...] = ()
        if resumable and place is not None and not self._interrupted:
            stands_for = checkpoint_links.stands_for(self.running_trainer, place)
        # Clocks of hosts differ, and the newest of a run has to be known.
        self._newest_time = max(time.time(), self._newest_time + 1e-3)
        about = About(self._newest_time, stands_for, resumable)
        generators = self._generators_of_place()
        if saved_format == FULL:
            content = checkpoints.gather_checkpoint(checkpoint, module, self.checkpoint_group, generators)
            if not _is_plain_file(filepath, storage_options, self.checkpoint_io):
                if type(self.checkpoint_io) is TorchCheckpointIO and storage_options is None:
                    checkpoints.upload_file(content, str(filepath), self.checkpoint_group)
                else:
                    super().save_checkpoint(content or {}, filepath, storage_options)
                if self.is_global_zero:
                    checkpoints.discard_folder(filepath, storage_options)  # of the same name, which loads would prefer
                return
            assert place is not None
            checkpoints.write_file(content, place, self.checkpoint_group, about)
        else:
            assert place is not None
            self._tell_of_folders(place)
            self._folder_saver.save(
                checkpoint,
                place,
                module,
                asynchronous=self._is_in_thread,
                about=about,
                increments=increments,
                follows=all_follow,
                generators=generators,
            )
        if resumable:
            self._newest = place  # complete before `on_commit` calls anything

    def _tell_of_folders(self, place: Place) -> None:
        """Say once how a folder is read without this strategy: Lightning's own error says that it is a folder."""
        if self.is_global_zero and not self._told_of_folders:
            self._told_of_folders = True
            first_words.tell(
                f"lightning_overlap: {place} is a folder, and so is each checkpoint of this run. ckpt_path= takes it. "
                "MyModule.load_from_checkpoint takes lightning_overlap.open_checkpoint(FOLDER), or the file that "
                "`python -m lightning_overlap.consolidate FOLDER` makes."
            )

    def _generators_of_place(self) -> Generators | None:
        """Return the states of generators where a resumed fit continues; None: as they are now."""
        fit, trainer = self._fit, self.running_trainer
        if fit is None or trainer is None:
            return None
        fit_loop: Any = trainer.fit_loop
        return fit.mid_step.generators or fit_loop.resume.generators_before_validation()

    def _place_of_save(self, filepath: Any, storage_options: Any, saved_format: str) -> Place | None:
        """Return the place of a new checkpoint; None if Lightning's plugin alone knows it."""
        if saved_format != FULL:
            return checkpoints.check_folder_path(filepath, storage_options, self.world_size)
        plain = _is_plain_file(filepath, storage_options, self.checkpoint_io)
        return place_at(filepath) if plain else None

    def _on_commit(self, action: Callable[[], None]) -> None:
        """Call a function on this rank when the save under way is complete; if that fails then, training goes on.

        Users may have renamed, removed or replaced by then what the function acts on.
        """
        self._folder_saver.on_commit(partial(or_warn, action))

    @override
    def barrier(self, name: str | None = None) -> None:
        # After a save in a thread there is nothing to wait for, and with NCCL the host would wait for the device.
        if not (name == AFTER_SAVE and self._is_in_thread):
            super().barrier(name)

    @override
    def remove_checkpoint(self, filepath: Any) -> None:
        # Only once the checkpoint that was saved after it is complete.
        remove_own = partial(super().remove_checkpoint, filepath)
        in_store = self._is_sharded and can_hold_folders(filepath)
        if not _is_plain_file(filepath, None, self.checkpoint_io) and not in_store:
            self._folder_saver.on_commit(remove_own)
        elif self.is_global_zero:
            last = list(checkpoint_links.keeping_last(self.running_trainer))
            place = place_at(filepath)
            remove = partial(_remove, place, self._newest, last)
            # An earlier fit may have written a folder there, and other checkpoints may list its files.
            may_be_file = in_store and self._format_of_saves == FULL
            self._on_commit(lambda: remove_own() if may_be_file and not place.is_folder() else remove())

    @override
    def load_checkpoint(self, checkpoint_path: Any, weights_only: bool | None = None) -> dict[str, Any]:
        if self._is_sharded:
            self._ledger.check_trained("a checkpoint would be loaded into averages")
        self.settle_save()
        self._folder_saver.wait()
        checkpoint_path = self.broadcast(checkpoint_path)
        scheme, _, rest = str(checkpoint_path).partition("://")
        if scheme in self.checkpoint_readers:
            read: Any = resolve_name(self.checkpoint_readers[scheme])
            return read(rest, self._module.trainer)  # type: ignore[no-any-return]
        options = [] if weights_only is None else [weights_only]  # Lightning 2.5 has no such argument
        load_plain = partial(super().load_checkpoint, checkpoint_path, *options)

        def find() -> tuple[Any, bool]:
            if not _is_plain_file(checkpoint_path, None, self.checkpoint_io):
                try:
                    if (folder := checkpoints.folder_at(checkpoint_path)) is not None:
                        return folder, True
                    return load_plain(), False
                except Exception as err:
                    loader = type(self.checkpoint_io).__name__
                    shown = without_secrets(str(checkpoint_path))
                    err.add_note(f"{loader} could not load {shown}. Pass the path of a whole checkpoint.")
                    raise
            place = checkpoints.resolve_path(place_at(checkpoint_path))
            with suppress(DamagedError):  # a load says so
                self._newest_time = max(self._newest_time, place.about().time)
            return place, place.is_folder()

        def read_file() -> tuple[Any, bool]:
            return checkpoints.load_file(checkpoint.path, weights_only=weights_only), False

        read_alike = partial(found_checkpoints.read_alike, path=checkpoint_path, group=self.checkpoint_group)
        checkpoint: Any = read_alike(find)
        if isinstance(checkpoint, Place) and not checkpoint.is_folder():
            checkpoints.check_file(checkpoint.path, self.checkpoint_group)  # before anything of it is used
            checkpoint = read_alike(read_file)
        if not isinstance(checkpoint, dict):  # of a folder, which all ranks read together
            load = partial(
                checkpoints.load_folder,
                weights_only=weights_only,
                with_optimizers=self._fits,
                moves_rates=self._fits and rate_setter(self.optimizers) is not None,
                averages=None if self.averages is None else self.averages.memory,
            )
            checkpoint = load(checkpoint, self._module, self.checkpoint_group, strict=self._module.strict_loading)
        elif (seen := checkpoint.get(COLLISIONS)) is not None:
            own = checkpoints.pieces_for(seen, self.checkpoint_group)
            checkpoint[COLLISIONS] = {name: seen[name] for name in own}
        states = checkpoint.pop(LOADERS, [])
        if len(states) == self.world_size:  # else all ranks take the states of rank 0
            _fit_loop(checkpoint)[_LOADER] = states[self.global_rank] or []
        if metrics := checkpoint.pop(METRICS, None):
            # Other ranks' sums of an epoch cannot be divided anew. A metric that all ranks share is in each of them.
            same = len(metrics) == self.world_size
            _fit_loop(checkpoint)[METRICS] = metrics[self.global_rank] if same else {**metrics[0], "epoch": []}
        return checkpoint  # type: ignore[no-any-return]

    @override
    def load_model_state_dict(self, checkpoint: Mapping[str, Any], strict: bool = True) -> None:
        module, group = self._module, self.checkpoint_group
        moves: Sequence[checkpoints.Move] = ()
        num_ranks = checkpoint.get(ASSIGNING_RANKS, self.world_size)
        if num_ranks != self.world_size and (fixed := checkpoints.immovable_collisions(module)):
            raise RuntimeError(
                f"{fixed}: the checkpoint has these managed collision modules of {num_ranks} ranks, this run has "
                f"{self.world_size}. Only the ids of MCHManagedCollisionModule move to other ranks. Load it on "
                f"{num_ranks} ranks."
            )
        try:
            checkpoints.check_tables(module, checkpoint["state_dict"])
            sharded = checkpoint
            if hands_out_rows(module):
                sharded, moves = checkpoints.load_collisions(checkpoint, module, group)
            super().load_model_state_dict(sharded, strict)
            if self._is_sharded and self.root_device.type != "cpu":
                # Lightning's strategies load a module before they move it to its device.
                checkpoints.move_unsharded(module, self.root_device)
        except RuntimeError as err:
            err.add_note("The checkpoint's module has other tables or another dense part than this module.")
            raise
        if self.averages is not None:
            self.averages.load(checkpoint)
        if hands_out_rows(module):
            generators = checkpoints.load_collision_state(module, checkpoint.get(COLLISIONS, {}), group)
            self._generators = generators if self._fits else None
        if self._fits and self._is_sharded:
            if self._tuner is not None:
                self._tuner.load_state_dict(checkpoint.get(_CHOICE, {}))
            assert isinstance(checkpoint, dict)
            schedulers = [config.scheduler for config in self.lr_scheduler_configs]
            checkpoints.load_fused(checkpoint, self.optimizers, schedulers, module, group, moves)

    def take_generators(self) -> Generators | None:
        """Return the states of generators of the loaded checkpoint, once."""
        generators, self._generators = self._generators, None
        return generators

    @override
    def load_optimizer_state_dict(self, checkpoint: Mapping[str, Any]) -> None:
        checkpoints.load_dense(checkpoint, self.optimizers, self._module)

    @property
    def _fits(self) -> bool:
        with suppress(RuntimeError):  # it has no trainer, as in the process that has spawned the ranks of a fit
            return self._module.trainer.state.fn == TrainerFn.FITTING  # also after training, as in `on_fit_end`
        return False


def _saves(callback: Checkpoint) -> bool:
    return not isinstance(callback, ModelCheckpoint) or callback.save_top_k != 0 or bool(callback.save_last)


def _fit_loop(checkpoint: dict[str, Any]) -> Any:
    return checkpoint.get("loops", {}).get("fit_loop", {}).get("state_dict", {})


def _remove(place: Place, newest: Place | None, last: Sequence[ModelCheckpoint]) -> None:
    """Remove a checkpoint; last checkpoints that need it then lead to the newest one beside it."""
    if newest is not None and newest != place and place.beside(newest.name) == newest and newest.exists():
        for leaning in place.leaning(partial(checkpoint_links.is_last, last)) if last else ():
            leaning.lead(newest)
    place.discard()


def _is_plain_file(path: Any, storage_options: Any, checkpoint_io: Any) -> bool:
    return not is_address(path) and storage_options is None and type(checkpoint_io) is TorchCheckpointIO


def _same_bytes(one: Tensor, other: Tensor) -> bool:
    """Whether two tensors are equal, NaN included."""
    if (one.dtype, one.shape) != (other.dtype, other.shape):
        return False
    return torch.equal(one.reshape(-1).view(torch.uint8), other.reshape(-1).view(torch.uint8))
