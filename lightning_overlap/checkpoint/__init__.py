"""Read and write checkpoints of sharded models: a folder written by all ranks, or one full file."""

from .dense_state import by_name
from .full_file import (
    check_file,
    gather,
    gather_checkpoint,
    load_collisions,
    load_dense,
    load_file,
    load_fused,
    upload_file,
    write_file,
)
from .incremental import Increments
from .managed_collision_state import Generators, load_collision_state, pieces_for
from .model_state import move_unsharded
from .moved_ids import Move, counting_modules, immovable_collisions, move_ids, weight_of
from .not_checkpoints import why_no_checkpoint
from .opened import find_folder, open_checkpoint
from .parts import ASSIGNING_RANKS, AVERAGES, COLLISIONS, ENTRIES, FUSED, LOADERS
from .sharded_folder import (
    FULL,
    INCREMENTAL,
    SHARDED,
    FolderSaver,
    check_folder_path,
    check_format,
    discard_folder,
    folder_at,
    load_folder,
    read_folder,
    resolve_path,
)
from .table_state import (
    ITERATION,
    KERNEL_KINDS,
    Loading,
    Piece,
    StateKey,
    Window,
    check_tables,
    fill_from_whole,
    fused_state,
    local_parts,
    map_shards,
)
from .whole_tables import FoundTable, TableReader, find_table
