"""Which rows of tables the fused backward updates, and copies of them: what stands on it knows only it."""

from .copies import WEIGHT, CopiedRows, Field, RowCopy, to_host
from .marked_rows import MarkedRows, num_other_writes
from .row_marks import DeviceMarks, HostMarks, RowNumbers, ids_by_table
from .touched_rows import TouchedRows
from .update_watch import UpdateWatch
