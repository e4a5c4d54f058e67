"""What several tests share. Importing it breaks the package if the environment says how (`tests/laws/breaks.py`).

Every process of a test run imports it before it trains: pytest's, ranks, and programs of tests/.
"""

import os

BROKEN = "TESTS_BREAK_THE_PACKAGE"  # in the environment: what is to be broken

if what := os.environ.get(BROKEN):
    import pytest

    from ..laws.breaks import BREAKS

    BREAKS[what].apply(pytest.MonkeyPatch())
