"""Which rows the updates of a training have written, and copies of these rows, made before the next update.

A row is marked when its update is made, a deferred one's too, and never when it is looked up: lookups run ahead of
updates, and some are dropped.
"""

from .copies import CopiedTable as CopiedTable
from .copies import RowCopy as RowCopy
from .dense_copies import DenseCopy as DenseCopy
from .dense_copies import changed_rows as changed_rows
from .touched_rows import TouchedRows as TouchedRows
from .windows import Window as Window
