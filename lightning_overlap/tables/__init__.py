"""Find and shard a model's embedding tables, check their optimizers, and inspect the sharded modules."""

from .batch_sizes import no_samples, refuse_other_batch_sizes, refuse_varying_sizes, why_not_varying_sizes
from .combined_optimizer import TABLES, DenseAndFused, combined_optimizer, optimizer_name, rate_setter
from .frozen import frozen_parts, frozen_sent_parts, frozen_tables, parts_trained_here, trains_itself
from .fused_arguments import kernel_arguments
from .id_ranges import IdRanges, OutOfRangeIds, num_ids, take_row_0_for_ids_outside
from .ignored_options import options_of_tables, sharded_by_user
from .kernel_checks import refuse_reset_rows
from .ledger import TRAINED, Ledger, OtherWeights, Request, ledger_of, next_version, version_in
from .names import by_config, table_by_name, takes_weights, without_graph
from .optimizer_checks import (
    FusedOptimizer,
    check_dense_optimizers,
    check_fused_optimizer,
    fused_only_tables,
    keep_dense,
    refuse_dense_owner,
    warn_of_moves_on_zeros,
)
from .parts import local_part
from .plans import KeptPlan, plan_of
from .quantized_comms import (
    QuantizedComms,
    check_quantized_comms,
    codecs_of,
    compression,
    resolve_quantized_comms,
)
from .replicas import ReplicateTables, check_replicate_tables, replica_kernels
from .scheduler_checks import check_schedulers
from .sharded_module import (
    SetRates,
    caching_tbes,
    check_torchrec,
    clips_in_backward,
    forget_prefetched,
    kernel_of,
    kernel_parameters,
    keys_in_backward,
    owners_of_parts,
    rates_of,
    tbes,
    tbes_within,
    without_backward,
)
from .sharding import (
    ShardedStateNames,
    Sharding,
    ShardingOptions,
    check_sharding,
    check_sharding_types,
    make_plan,
    seed_shards,
    shard_tables,
)
from .shards import (
    KernelShards,
    TableShard,
    check_assigned_rows,
    dense_lines,
    kernel_optimizers,
    kernel_shards,
    table_lines,
    table_names,
    weights_in_backward,
)
from .subclasses import check_named_tables, collections_left_whole, refuse_compiled_collections
from .supported_modules import (
    TABLE_TYPES,
    hands_out_rows,
    has_model_parallel_tables,
    holds_sequences,
    ids_fit_32_bits,
    input_dists_of,
    owners_of,
    processor_buffers,
    sharded_modules,
    spec_of,
    table_modules,
    tables_in_backward,
    tables_in_dense_shards,
    tables_of,
    why_never_early,
)
from .table import Rule, apply_table_optimizers, find_tables, has_tables, table_optimizers, training_sharders
from .write_counts import (
    SentInput,
    answer_tensors,
    count_backwards,
    count_writes,
    dense_weights,
    num_fused_writes,
    num_writes,
    renew_counts,
    watch_lengths,
)
