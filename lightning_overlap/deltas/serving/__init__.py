"""Replicas: tables that follow a training, with an HTTP server and a command. Needs neither Lightning nor strategy."""

from .http_server import ReplicaServer
from .replica import Lag, Position, Replica, ReplicaError
from .served_tables import Tables, TablesError, write_rows
