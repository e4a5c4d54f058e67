"""Which rows the updates of a training have written, and copies of these rows, made before the next update.

A row is marked when its update is made, a deferred one's too, and never when it is looked up: lookups run ahead of
updates, and some are dropped.
"""

from .copies import CopiedRows as CopiedRows
from .copies import Fields as Fields
from .copies import RowCopy as RowCopy
from .copies import Window as Window
from .copies import to_host as to_host
from .touched_rows import TouchedRows as TouchedRows
