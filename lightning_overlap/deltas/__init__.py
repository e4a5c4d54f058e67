"""Stream updated rows to served models; no other folder imports this one.

Folders: `parts/` (format of parts, chain of cuts), `sinks/` (storage of parts), `serving/` (replicas), `recording/`
(the callback; not here, as it needs Lightning). Needs the extra `deltas`.
"""

from .parts import SCHEMA as SCHEMA
from .parts import WEIGHT as WEIGHT
from .parts import CutError as CutError
from .parts import Dense as Dense
from .parts import Header as Header
from .parts import Part as Part
from .parts import PartError as PartError
from .parts import PartName as PartName
from .parts import Piece as Piece
from .parts import Rows as Rows
from .parts import decode as decode
from .parts import encode as encode
from .parts import encode_pieces as encode_pieces
from .parts import parse_names as parse_names
from .parts import read_header as read_header
from .serving import Lag as Lag
from .serving import Position as Position
from .serving import Replica as Replica
from .serving import ReplicaError as ReplicaError
from .serving import ReplicaServer as ReplicaServer
from .serving import TablesError as TablesError
from .sinks import DeltaSink as DeltaSink
from .sinks import FolderSink as FolderSink
from .sinks import RedisSink as RedisSink
from .sinks import SinkError as SinkError
from .sinks import check_sink as check_sink
from .sinks import prune as prune
from .sinks import resolve_sink as resolve_sink
