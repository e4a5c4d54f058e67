"""The vocabulary of a training step: its stages and their streams."""

from enum import Enum


class _Name(Enum):
    __hash__ = object.__hash__  # Enum's own is a Python function, and every step calls it often

    def __str__(self) -> str:
        return str(self.value)


class Stage(_Name):
    """A part of a step that some mode places on its own, in the order in which a batch passes the stages."""

    COPY_BATCH_TO_DEVICE = "copy_batch_to_device"
    """Fetch the batch from the data loader, run Lightning's batch-transfer hooks, copy it to the device."""

    INPUT_SPLITS_DIST = "input_splits_dist"
    """Start the all-to-all of split sizes: one per process group, for all sharded modules."""

    INPUT_DATA_DIST = "input_data_dist"
    """Read the sizes on the host, then start the all-to-all of lengths, ids and per-id weights."""

    PREFETCH = "prefetch"
    """Copy the rows that the lookup will read from UVM into the device's cache."""

    EMBEDDING_LOOKUP = "embedding_lookup"
    """Table-batched embedding (TBE) forward; ends by issuing `output_dist`, the all-to-all of embeddings."""

    DENSE_FORWARD = "dense_forward"
    """The user's `training_step`; waits for the embeddings where they are first used (the merge)."""

    BACKWARD = "backward"
    """Autograd's backward: dense gradients, the all-to-all of gradients, and the TBE backward, which updates the
    tables. `EMBEDDING_UPDATE` defers the TBE backward, `WEIGHT_GRADIENTS` the gradients of layers' weights."""

    WEIGHT_GRADIENTS = "weight_gradients"
    """The gradients of layers' weights, which the optimizer alone waits for, and the start of their all-reduce."""

    OPTIMIZER_STEP = "optimizer_step"
    """The step of the dense optimizer; with accumulation, the end of a batch without a step."""

    EMBEDDING_UPDATE = "embedding_update"
    """Wait for the all-to-all of gradients, which `BACKWARD` only starts, and run the TBE backward."""


class StreamName(_Name):
    """The stream of a stage. On a CPU every name means the calling thread."""

    COMPUTE = "compute"  # the stream that is current when Lightning calls `training_step`
    MEMCPY = "memcpy"  # copies from host to device
    DATA_DIST = "data_dist"  # the input dist
    PREFETCH = "prefetch"  # copies from UVM into the cache: FBGEMM needs a stream for them that is not the lookup's
    LOOKUP = "lookup"  # the embedding lookup; the stream policy determines the physical stream
    SIDE = "side"  # work that no step waits for: the counts of stale rows
    IDLE = "idle"  # no work at all: a backward waits for nothing where it ends in leaves of this stream


class WeightOwner(_Name):
    """The writer of a weight that a lookup reads, and so the stage that must come before the lookup."""

    FUSED_BACKWARD = "fused_backward"  # the fused optimizer inside `BACKWARD`: model-parallel tables, fused kernels
    DENSE_OPTIMIZER = "dense_optimizer"  # `OPTIMIZER_STEP`: data-parallel tables, dense kernels, feature processors
    LOOKUP = "lookup"  # `EMBEDDING_LOOKUP` itself: it runs where the module is called, on ids that were sent early


EARLY_OWNERS = frozenset({WeightOwner.FUSED_BACKWARD, WeightOwner.DENSE_OPTIMIZER})  # of tables looked up early

SPARSE_STAGES = (Stage.INPUT_SPLITS_DIST, Stage.INPUT_DATA_DIST, Stage.EMBEDDING_LOOKUP)
"""A schedule has all of these stages or none; without them each module's own forward does their work."""

TRAINING_STAGES = (Stage.DENSE_FORWARD, Stage.BACKWARD, Stage.OPTIMIZER_STEP)
"""Stages that the trainer runs on the current batch; a schedule places other stages around them."""

STAGE_ORDER: dict[Stage, int] = {stage: position for position, stage in enumerate(Stage)}  # in which a batch has them
