"""`RayOverlapStrategy`: `OverlapEmbeddingStrategy` in the workers of Ray Train, which start again after a failure."""

from contextlib import nullcontext, suppress
from functools import partial
from pathlib import Path
from typing import Any

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer.states import TrainerFn
from typing_extensions import override

from .checkpoint import FULL
from .distributed import gather_objects
from .plugin import OverlapEmbeddingStrategy

try:
    from ray import train
    from ray.train import CheckpointConsistencyMode, CheckpointUploadMode
    from ray.train.lightning import RayDDPStrategy, RayLightningEnvironment, RayTrainReportCallback
except ImportError as err:
    raise ImportError(
        f"lightning_overlap.ray needs Ray Train, which cannot be imported ({err}): pip install 'lightning_overlap[ray]'"
    ) from err

_RAYS_OWN = ("process_group_backend", "start_method")  # arguments that have no effect, or a bad one, in Ray's workers
_NOTE = "lightning_overlap_saved.txt"  # in the run's folder of `RunConfig(storage_path=...)`


class RayOverlapStrategy(OverlapEmbeddingStrategy, RayDDPStrategy):  # type: ignore[misc]  # Any without Ray
    """`OverlapEmbeddingStrategy` for Ray Train: ranks, device and process group are those of Ray's workers.

    Use it with `plugins=[RayLightningEnvironment()]`; Ray's `prepare_trainer` accepts it. When Ray starts the workers
    again after a failure, the first fit has to load a checkpoint if an earlier start has saved one. Training goes on
    after a report of `RayTrainReportCallback` once Ray knows of it, which takes up to 2 seconds.

    Ranks that save at the same path, in a folder that all hosts share, write as ever. Ranks that save at different
    paths, as for `RayTrainReportCallback`, write one full file, gathered on the host of rank 0. With `async_checkpoint`
    a checkpoint that is not ModelCheckpoint's is written at once.

    Args:
        *args: As for `OverlapEmbeddingStrategy`.
        **kwargs: As for `OverlapEmbeddingStrategy`. `timeout` is that of the strategy's own process groups; that of the
            default group is `TorchConfig(timeout_s=...)` of Ray.

    Raises:
        ValueError: `process_group_backend` or `start_method`; a trainer without RayLightningEnvironment; a
            ModelCheckpoint with `save_last` that would save in Ray's working folder; ranks that save at different paths
            with a `checkpoint_format` of folders.
        RuntimeError: The first fit of the workers begins at step 0 after an earlier start has saved a checkpoint.
    """

    _has_begun = False  # of this class: whether a fit has begun in this process
    _waits = False  # whether Ray may not know yet of a checkpoint that was reported to it
    _has_noted = False  # whether it is noted in Ray's storage that there is a checkpoint

    def __init__(self, *args: Any, **kwargs: Any) -> None:
        if given := sorted(kwargs.keys() & set(_RAYS_OWN)):
            raise ValueError(
                f"{type(self).__name__}: Ray starts the processes and makes their process group, got "
                f"{', '.join(given)}. Leave it out; Ray's own option is TorchTrainer(torch_config=TorchConfig("
                "backend=...))."
            )
        super().__init__(*args, **kwargs)

    @property
    @override
    def num_processes(self) -> int:
        """Number of ranks on this host: the planner and the all-to-alls between hosts depend on it."""
        return int(train.get_context().get_local_world_size())

    @override
    def setup_environment(self) -> None:
        if not isinstance(self.cluster_environment, RayLightningEnvironment):
            raise ValueError(
                f"{type(self).__name__} has its ranks from Ray, got {type(self.cluster_environment).__name__}. Use "
                "Trainer(plugins=[RayLightningEnvironment()]), of ray.train.lightning."
            )
        super().setup_environment()

    @override
    def setup(self, trainer: Trainer) -> None:
        if trainer.state.fn == TrainerFn.FITTING:
            _refuse_working_folder(trainer)
        super().setup(trainer)

    @override
    def on_train_start(self) -> None:
        super().on_train_start()
        # A later fit of the script may begin anew: only the first one continues what an earlier start has begun.
        is_first, RayOverlapStrategy._has_begun = not RayOverlapStrategy._has_begun, True
        trainer = self._module.trainer
        if is_first and trainer.global_step == 0 and not trainer.ckpt_path and (saved := _saved_earlier()):
            raise RuntimeError(
                f"this fit begins at step 0, though an earlier start of this run has saved {saved}. Pass its path to "
                "trainer.fit(ckpt_path=...), or 'last' if ModelCheckpoint(dirpath, save_last=True) has saved it. To "
                "begin anew, give RunConfig another name."
            )

    @override
    def on_train_batch_start(self, batch: Any, batch_idx: int) -> None:
        super().on_train_batch_start(batch, batch_idx)
        if self._waits:
            # Ray knows of a report once its controller has polled all workers, and loses it if one dies before that.
            train.get_all_reported_checkpoints(consistency_mode=CheckpointConsistencyMode.COMMITTED)
            self._waits = False

    @override
    def choose_format(self, own_path: Any, path: Any) -> str:
        if not any(gather_objects(str(own_path) != str(path), self.checkpoint_group)):
            return super().choose_format(own_path, path)
        if self.checkpoint_format not in (None, FULL):
            raise ValueError(
                f"checkpoint_format={self.checkpoint_format!r}: the ranks save at different paths, here at {own_path}, "
                "as for RayTrainReportCallback. Each host would have a part of the checkpoint. Leave the option out "
                "for one full file, or save with ModelCheckpoint in a folder that all hosts share."
            )
        return FULL

    @override
    def save_checkpoint(self, checkpoint: dict[str, Any], filepath: Any, storage_options: Any = None) -> None:
        resumable, is_kept = "optimizer_states" in checkpoint, _is_kept(self._module.trainer, filepath)
        # Whoever reports a checkpoint to Ray copies it right after the save.
        with nullcontext() if is_kept else self.saving_at_once():
            super().save_checkpoint(checkpoint, filepath, storage_options)
        self._waits |= not is_kept and _reports_at_once(self._module.trainer)
        # Ray itself knows of a checkpoint that is reported to it, and of no other.
        if resumable and is_kept and self.is_global_zero and not self._has_noted:
            self._has_noted = True
            self._folder_saver.on_commit(partial(_note, str(filepath)))


def _storage() -> Any:
    """Return where Ray keeps the files of this run; None in its local mode, which has no second start."""
    with suppress(NotImplementedError):
        return train.get_context().get_storage()
    return None


def _is_kept(trainer: Trainer, path: Any) -> bool:
    """Whether a checkpoint is in the folder of a ModelCheckpoint, which nobody copies from there."""
    callbacks = [one for one in trainer.checkpoint_callbacks if isinstance(one, ModelCheckpoint)]
    return any(one.dirpath is not None and Path(path).is_relative_to(one.dirpath) for one in callbacks)


def _reports_at_once(trainer: Trainer) -> bool:
    """Whether a callback reports checkpoints to Ray, and training waits until they are uploaded."""
    callbacks = [one for one in trainer.callbacks if isinstance(one, RayTrainReportCallback)]  # type: ignore[attr-defined]
    return any(one.checkpoint_upload_mode == CheckpointUploadMode.SYNC for one in callbacks)


def _refuse_working_folder(trainer: Trainer) -> None:
    """Refuse last checkpoints in Ray's working folder: another host has another one, and so has another session."""
    storage = _storage()
    for callback in trainer.checkpoint_callbacks if storage is not None else ():
        if isinstance(callback, ModelCheckpoint) and callback.save_last and callback.dirpath is not None:
            folder, of_ray = Path(callback.dirpath).resolve(), Path(storage.local_working_directory).resolve()
            if folder.is_relative_to(of_ray):
                raise ValueError(
                    f"ModelCheckpoint would save its last checkpoint in {folder}, in the folder where Ray starts the "
                    "workers of this host: workers that Ray starts again may not find it, and would begin at step 0. "
                    "Use ModelCheckpoint('/shared/run1', ...), with an absolute path that all hosts share."
                )


def _saved_earlier() -> str:
    """Return what an earlier start of this run has saved, as far as it is known; "" if nothing is."""
    if (reported := train.get_checkpoint()) is not None:
        return f"{reported.path} (ray.train.get_checkpoint())"
    storage = _storage()
    with suppress(FileNotFoundError):
        if storage is not None:
            with storage.storage_filesystem.open_input_stream(_note_path(storage)) as file:
                return f"{file.read().decode()}, or a later one beside it"
    return ""


def _note(checkpoint: str) -> None:
    """Note in Ray's storage, for later starts, that this one has saved a checkpoint."""
    if (storage := _storage()) is not None:
        storage.storage_filesystem.create_dir(storage.experiment_fs_path)
        with storage.storage_filesystem.open_output_stream(_note_path(storage)) as file:
            file.write(checkpoint.encode())


def _note_path(storage: Any) -> str:
    return f"{storage.experiment_fs_path}/{_NOTE}"
