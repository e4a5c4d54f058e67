"""Updated rows on their way to served models: parts and their form, sinks that keep them, replicas that apply them.

Needs the extra `deltas` (pyarrow, and isal for quicker checksums), and for the sink of that name `redis`.
"""

from .arrow_stream import Piece as Piece
from .chain import prune as prune
from .cuts import CutError as CutError
from .folder_sink import FolderSink as FolderSink
from .http_server import ReplicaServer as ReplicaServer
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
from .parts import encode_pieces as encode_pieces
from .parts import parse_names as parse_names
from .parts import read_header as read_header
from .redis_sink import RedisSink as RedisSink
from .replica import Lag as Lag
from .replica import Position as Position
from .replica import Replica as Replica
from .replica import ReplicaError as ReplicaError
from .served_tables import TablesError as TablesError
from .sink import DeltaSink as DeltaSink
from .sink import SinkError as SinkError
from .sink import check_sink as check_sink
from .sink import resolve_sink as resolve_sink
from .writer import CutWriter as CutWriter
