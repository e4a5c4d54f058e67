"""Stores of files: a folder on a disk, an object store through fsspec, or Redis. It does not know what they keep."""

from .addresses import is_address, store_at, without_protocol
from .checksums import COPY_AGAIN, About, DamagedError, HashedFile, checksum_of, damaged_part
from .disk_store import DiskStore, whole_file
from .manifest import MARKER, SAVE_NAME, SHARED, FolderStore, Manifest, SavedFile, is_plain_name, new_save
from .object_store import ObjectStore, put_file
from .place import Held, Place, can_hold_folders, is_unfinished, or_warn, place_at
from .redis_store import RedisStore
from .sealed_file import SealedFile, read_seal
from .store import Piece, Store, StoreError, check_store, close_store, hidden_os_error, joined
