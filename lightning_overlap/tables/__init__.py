"""A model's embedding tables: find them, shard them, check their optimizers, and know what TorchRec made of them.

`supported_modules.py` lists the sharded modules that are looked up early; `sharded_module.py` lists TorchRec's private
names.
"""

from .columns import without_graph as without_graph
from .combined_optimizer import combined_optimizer as combined_optimizer
from .combined_optimizer import rate_setter as rate_setter
from .optimizer_checks import FusedOptimizer as FusedOptimizer
from .optimizer_checks import check_dense_optimizers as check_dense_optimizers
from .optimizer_checks import check_fused_optimizer as check_fused_optimizer
from .optimizer_checks import refuse_dense_owner as refuse_dense_owner
from .overflow import OverflowWatch as OverflowWatch
from .quantized_comms import QuantizedComms as QuantizedComms
from .quantized_comms import check_quantized_comms as check_quantized_comms
from .quantized_comms import codecs_of as codecs_of
from .quantized_comms import compression as compression
from .quantized_comms import resolve_quantized_comms as resolve_quantized_comms
from .replicas import follow_rates as follow_rates
from .replicas import replica_kernels as replica_kernels
from .replicated_tables import ReplicateTables as ReplicateTables
from .replicated_tables import check_replicate_tables as check_replicate_tables
from .sharded_module import SetRates as SetRates
from .sharded_module import caching_tbes as caching_tbes
from .sharded_module import check_torchrec as check_torchrec
from .sharded_module import forget_prefetched as forget_prefetched
from .sharded_module import kernel_of as kernel_of
from .sharded_module import keys_in_backward as keys_in_backward
from .sharded_module import owners_of_parts as owners_of_parts
from .sharded_module import tbes as tbes
from .sharded_module import tbes_within as tbes_within
from .sharded_module import without_backward as without_backward
from .sharding import Sharding as Sharding
from .sharding import check_sharding as check_sharding
from .sharding import check_sharding_types as check_sharding_types
from .sharding import make_plan as make_plan
from .sharding import shard_tables as shard_tables
from .sharding import sharded_state_names as sharded_state_names
from .shards import KernelShards as KernelShards
from .shards import TableShard as TableShard
from .shards import kernel_shards as kernel_shards
from .shards import table_lines as table_lines
from .supported_modules import TABLE_TYPES as TABLE_TYPES
from .supported_modules import hands_out_rows as hands_out_rows
from .supported_modules import has_model_parallel_tables as has_model_parallel_tables
from .supported_modules import holds_sequences as holds_sequences
from .supported_modules import ids_fit_32_bits as ids_fit_32_bits
from .supported_modules import input_dists_of as input_dists_of
from .supported_modules import owners_of as owners_of
from .supported_modules import sharded_modules as sharded_modules
from .supported_modules import spec_of as spec_of
from .supported_modules import table_modules as table_modules
from .supported_modules import tables_in_backward as tables_in_backward
from .supported_modules import tables_of as tables_of
from .supported_modules import why_never_early as why_never_early
from .supported_modules import why_never_held as why_never_held
from .table import apply_table_optimizers as apply_table_optimizers
from .table import find_tables as find_tables
from .table import has_tables as has_tables
from .table import table_optimizers as table_optimizers
from .table import training_sharders as training_sharders
from .write_counts import SentInput as SentInput
from .write_counts import count_writes as count_writes
from .write_counts import fused_writes as fused_writes
from .write_counts import has_dense_weights as has_dense_weights
from .write_counts import num_fused_writes as num_fused_writes
from .write_counts import num_writes as num_writes
