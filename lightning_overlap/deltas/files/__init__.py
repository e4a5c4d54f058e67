"""The files of cuts, and the chain of cuts. Needs pyarrow of the extra `deltas`; isal of this extra is faster."""

from ...row_log import TRAILER_SIZE, WEIGHT, Dense, FileError, Rows
from .chain import Chain, Move
from .cuts import CutError, Head, as_words, file_of
from .form import (
    EVICTED_ID,
    NO_ID,
    PLAIN,
    RAW_ID,
    SCHEMA,
    Columns,
    CutFile,
    FileName,
    Header,
    RawIds,
    decode,
    encode,
    encode_pieces,
    parse_names,
    read_header,
)
from .sink import as_store, prune
