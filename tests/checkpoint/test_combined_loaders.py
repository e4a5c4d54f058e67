"""A fit that resumes inside an epoch takes from the loaders of a `CombinedLoader` what an unstopped fit takes."""

from pathlib import Path
from tempfile import TemporaryDirectory
from typing import Any

import pytest
from hypothesis import given, settings
from hypothesis import strategies as st

from ..support.ranks import Ranks
from . import combined_loaders


@pytest.mark.timeout(400)
def test_loaders_that_have_ended(ranks: Ranks) -> None:
    @settings(max_examples=3)
    @given(
        lengths=st.tuples(st.integers(1, 5), st.integers(1, 5)),
        mode=st.sampled_from(["max_size", "max_size_cycle", "min_size"]),
        data=st.data(),
    )
    def holds(lengths: tuple[int, int], mode: str, data: Any) -> None:
        num = min(lengths) if mode == "min_size" else max(lengths)
        compare(lengths, mode, data.draw(st.integers(1, 2 * num - 1)))

    def compare(lengths: tuple[int, int], mode: str, stop: int) -> None:
        with TemporaryDirectory() as folder:
            path = str(Path(folder) / "a.ckpt")
            for expected, resumed in ranks.run(combined_loaders.seen_after, lengths, mode, path, stop):
                assert resumed == expected

    compare((2, 5), "max_size", 3)
    compare((5, 2), "max_size", 2)
    compare((2, 5), "max_size_cycle", 4)
    holds()
