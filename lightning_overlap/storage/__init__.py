"""Stores of files: a folder on a disk, an object store through fsspec, or Redis. It does not know what they keep."""

from .addresses import is_address, store_at, without_protocol
from .disk_store import DiskStore, sync_folder, whole_file
from .object_store import ObjectStore, put_file
from .redis_store import RedisStore
from .store import Piece, Store, StoreError, check_store, close_store, joined
