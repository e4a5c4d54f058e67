"""Which rows the updates of a training have written, and copies of these rows, made before the next update.

A row is marked when its update is made, a deferred one's too, and never when it is looked up: lookups run ahead of
updates, and some are dropped.
"""

from .copies import CopiedTable as CopiedTable
from .copies import RowCopy as RowCopy
from .touched_rows import TouchedRows as TouchedRows
