"""Replicas: tables that follow a training, with an HTTP server and a command. Needs neither Lightning nor strategy."""

from .covered_rows import TablesError
from .http_server import ReplicaServer
from .raw_ids import KnownIds
from .replica import Lag, Position, Replica, ReplicaError
from .served_tables import Tables
