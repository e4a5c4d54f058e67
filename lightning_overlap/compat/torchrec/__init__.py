"""TorchRec's private names, by what they belong to: sharded modules, inputs, the exchange of ids, awaitables."""

from collections.abc import Mapping

from . import awaitables, collisions, ids, inputs, modules
from .awaitables import Collective, LazyResult, collectives_in, is_sent, joint_of, set_joint, wait_for, work_of
from .collisions import (
    ROWS_OF_IDS,
    SEGMENTS,
    SORTED_IDS,
    KnownIds,
    SeenIds,
    first_row,
    forget_seen_ids,
    give_rows,
    hash_of,
    id_of_row,
    known_ids,
    ranks_of,
    seen_ids,
    set_known_ids,
    set_seen_ids,
    watch_evictions,
)
from .ids import IdsAwaitable, recat, splits_of, stagger_of, stay_here, tell_lookups
from .inputs import parts_of, set_inverse_indices, set_lengths, set_values, set_weights, shallow_copy, without_weights
from .modules import (
    all_to_all_of,
    assembled,
    bags_within,
    collisions_within,
    compute_parts,
    configs_of_bags,
    configs_of_sequences,
    divide_no_means,
    feature_processors_of,
    features_order,
    forget_whole_weights,
    group_of,
    has_index_dedup,
    input_dist_unordered,
    input_dists_of,
    is_weighted,
    kernel_of_optimizer,
    kernels_in,
    lookups_of,
    output_dists_of,
    replace_kernel,
    same_slice,
    shardings_of_bags,
    shardings_of_sequences,
    start_output_dist,
    tables_within,
    tell_where_weights_are,
)

PRIVATE_NAMES: Mapping[str, tuple[str, ...]] = {
    **awaitables.PRIVATE_NAMES,
    **collisions.PRIVATE_NAMES,
    **ids.PRIVATE_NAMES,
    **inputs.PRIVATE_NAMES,
    **modules.PRIVATE_NAMES,
}
"""By the class that has them. A name that a file imports is not listed: the import itself fails."""
