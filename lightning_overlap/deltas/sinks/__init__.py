"""Sinks, which store parts: folders, Redis, and the protocol for other sinks."""

from .folder_sink import FolderSink as FolderSink
from .folder_sink import write_whole as write_whole
from .redis_sink import RedisSink as RedisSink
from .resolve import prune as prune
from .resolve import resolve_sink as resolve_sink
from .sink import DeltaSink as DeltaSink
from .sink import SinkError as SinkError
from .sink import check_sink as check_sink
from .sink import writes_pieces as writes_pieces
