"""Private names of other libraries, a file or a folder for each library: here they get names that say what they mean.

Each lists its private names in `PRIVATE_NAMES`, and tests in `tests/compat/` show what the package relies on. This
face is empty, since most folders leave some of the libraries alone: `from ..compat.lightning import FitLoop`.
"""
