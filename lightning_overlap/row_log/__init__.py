"""Files of rows of tables, and how rows come back into tables; it knows neither TorchRec nor Lightning."""

from .rows import WEIGHT, Dense, Rows, Window, put_rows, write_rows
from .rows_file import TRAILER_SIZE, FileError, are_distinct, arrow, as_file_error, decode_rows, encode_rows, integers
