"""Private names of other libraries, one file for each library: here they get names that say what they mean.

A file lists its private names in `PRIVATE_NAMES`, and tests in `tests/compat/` show what the package relies on. This
face is empty, since most folders leave some of the libraries alone: `from ..compat.lightning import FitLoop`.
"""
