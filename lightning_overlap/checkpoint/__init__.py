"""Read and write checkpoints of sharded models: a folder written by all ranks, or one full file."""

from .atomic import discard as discard
from .atomic import discard_with_leftovers as discard_with_leftovers
from .atomic import lead as lead
from .atomic import links_to as links_to
from .dense_state import by_name as by_name
from .full_file import gather as gather
from .full_file import gather_checkpoint as gather_checkpoint
from .full_file import load_dense as load_dense
from .full_file import load_file as load_file
from .full_file import load_fused as load_fused
from .full_file import write_file as write_file
from .sharded_folder import FULL as FULL
from .sharded_folder import SHARDED as SHARDED
from .sharded_folder import FolderSaver as FolderSaver
from .sharded_folder import check_folder_path as check_folder_path
from .sharded_folder import check_format as check_format
from .sharded_folder import is_folder as is_folder
from .sharded_folder import load_folder as load_folder
from .sharded_folder import resolve_path as resolve_path
from .table_state import check_tables as check_tables
from .table_state import local_parts as local_parts
