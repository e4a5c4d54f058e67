"""Which rows of tables the fused backward updates: deltas and averages stand on it, and neither knows the other."""

from .marked_rows import MarkedRows, num_other_writes
from .row_marks import DeviceMarks, HostMarks, RowNumbers, ids_by_table
from .update_watch import UpdateWatch
