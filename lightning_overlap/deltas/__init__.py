"""Updated rows on their way to served models: parts and their form, sinks that keep them, replicas that apply them.

Needs the extra `deltas` (pyarrow), and for the sink of that name `redis`.
"""

from .history import parse_names as parse_names
from .history import rows_in as rows_in
from .history import written_since as written_since
from .parts import SCHEMA as SCHEMA
from .parts import WEIGHT as WEIGHT
from .parts import Dense as Dense
from .parts import Header as Header
from .parts import Part as Part
from .parts import PartError as PartError
from .parts import PartName as PartName
from .parts import Rows as Rows
from .parts import decode as decode
from .parts import encode as encode
from .parts import read_header as read_header
from .sink import DeltaSink as DeltaSink
from .writer import CutWriter as CutWriter


def resolve_sink(sink: str) -> DeltaSink:
    """Placeholder."""
    raise NotImplementedError
