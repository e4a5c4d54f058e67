"""The parts of a checkpoint that have sharded state: part -> name -> piece."""

MODEL, FUSED, TABLE_OPTIMIZERS = "model", "fused_optimizer", "table_optimizers"
"""Weights, state of fused optimizers, state of dense optimizers for shards of tables."""
AVERAGES = "lightning_overlap_averages"
"""Averages of weights by the names of the weights in `state_dict`."""
COLLISIONS = "lightning_overlap_collisions"
"""State of managed collision modules that is in no `state_dict`, by the names of `managed_collision_state`."""
