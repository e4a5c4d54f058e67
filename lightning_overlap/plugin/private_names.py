"""Lightning's private names that this folder uses: an upgrade that lacks a name fails with a clear error."""

from collections.abc import Mapping

from lightning.pytorch import Trainer
from lightning.pytorch.callbacks import ModelCheckpoint
from lightning.pytorch.trainer import call

from ..versions import check_names

_OF_BOTH = ["_build_kwargs", "_build_step_args_from_hook_kwargs", "_data_fetcher", "_verify_dataloader_idx_requirement"]
PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    "lightning.pytorch.core.module": ("_load_from_checkpoint",),
    "lightning.pytorch.trainer.call": ("_call_strategy_hook",),
    "_CheckpointConnector": ("resume_start",),
    "_DataLoaderIterDataFetcher": ("_batch", "_batch_idx", "_dataloader_idx", "_start_profiler", "_stop_profiler"),
    "_EvaluationLoop": (*_OF_BOTH, "_evaluation_step", "_is_sequential"),
    "_FitLoop": (
        *("_combined_loader", "_data_fetcher", "_load_combined_loader_states", "_results", "_should_reload_train_dl"),
        "setup_data",
    ),
    "_MultiProcessingLauncher": ("_collect_rank_zero_results", "_start_method", "_strategy", "_wrapping_function"),
    "_PredictionLoop": (*_OF_BOTH, "_predict_step", "_return_predictions", "_store_data_for_prediction_writer"),
    "_SignalConnector": ("_sigterm_notifier_fn", "_slurm_sigusr_handler_fn"),
    "_TrainingEpochLoop": (
        *("_batches_that_stepped", "_broadcast_sigterm_tensor", "_build_kwargs", "_results", "_should_accumulate"),
        *("_is_training_done", "_should_check_val_fx", "advance", "on_advance_end"),
    ),
    "CombinedLoader": ("_state_dicts",),
    "DDPStrategy": (
        *("_configure_launcher", "_ddp_comm_hook", "_ddp_kwargs", "_launcher", "_lightning_module", "_model"),
        *("_optimizers", "_start_method"),
    ),
    "LightningModule": ("_on_before_batch_transfer",),
    "ModelCheckpoint": ("_link_checkpoint",),
    "ModelPruning": ("_parameters_to_prune",),
    "Strategy": ("_layer_sync",),
    "Trainer": ("_checkpoint_connector", "_signal_connector", "_teardown"),
}
"""By the module or class that has them. A name that this folder imports is not listed: the import itself fails."""


def check_lightning(trainer: Trainer) -> None:
    """Raise an ImportError if what a trainer is about to run lacks one of the names."""
    check_names("lightning", PRIVATE_NAMES, {"Trainer": trainer})
    owners = {
        "lightning.pytorch.trainer.call": call,
        "_CheckpointConnector": trainer._checkpoint_connector,
        "_EvaluationLoop": trainer.validate_loop,
        "_FitLoop": trainer.fit_loop,
        "_PredictionLoop": trainer.predict_loop,
        "_SignalConnector": trainer._signal_connector,
        "_TrainingEpochLoop": trainer.fit_loop.epoch_loop,
        "LightningModule": trainer.lightning_module,
        "ModelCheckpoint": ModelCheckpoint,
        "Strategy": trainer.strategy,
    }
    check_names("lightning", PRIVATE_NAMES, owners)
