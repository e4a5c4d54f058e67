"""The format of parts, and the chain of cuts. Needs pyarrow of the extra `deltas`; isal of this extra is faster."""

from .chain import Chain as Chain
from .chain import Move as Move
from .cuts import CutError as CutError
from .cuts import Head as Head
from .cuts import as_words as as_words
from .cuts import part_of as part_of
from .form import SCHEMA as SCHEMA
from .form import TRAILER_SIZE as TRAILER_SIZE
from .form import WEIGHT as WEIGHT
from .form import Dense as Dense
from .form import Header as Header
from .form import Part as Part
from .form import PartError as PartError
from .form import PartName as PartName
from .form import Piece as Piece
from .form import Rows as Rows
from .form import decode as decode
from .form import encode as encode
from .form import encode_pieces as encode_pieces
from .form import joined as joined
from .form import parse_names as parse_names
from .form import read_header as read_header
