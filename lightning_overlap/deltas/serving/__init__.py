"""Replicas: tables that follow a training, with an HTTP server and a command. Needs neither Lightning nor strategy."""

from .http_server import ReplicaServer as ReplicaServer
from .replica import Lag as Lag
from .replica import Position as Position
from .replica import Replica as Replica
from .replica import ReplicaError as ReplicaError
from .served_tables import TablesError as TablesError
