"""Sinks, which store the files of cuts: folders, Redis, and the protocol for other sinks."""

from .folder_sink import FolderSink, write_whole
from .redis_sink import RedisSink
from .resolve import prune, resolve_sink
from .sink import DeltaSink, SinkError, check_sink, writes_pieces
