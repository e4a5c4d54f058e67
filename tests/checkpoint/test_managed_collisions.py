"""Checkpoints of managed collision modules: ids keep their rows and states, on as many ranks and on others."""

from tempfile import TemporaryDirectory

from hypothesis import example, given, settings
from hypothesis import strategies as st

from ..support.ranks import Ranks
from . import collisions
from .collisions import EPOCH, POLICIES, Setting

SETTINGS = st.builds(
    Setting,
    policy=st.sampled_from(sorted(POLICIES)),
    interval=st.integers(1, 5),
    num_ids=st.sampled_from([20, 90]),
    hash_size=st.sampled_from([0, 1000]),
    sequences=st.booleans(),
)


def test_a_resumed_fit_equals_one_that_was_not_stopped(two_ranks: Ranks) -> None:
    """With any interval between evictions; dropout draws from the generator that evictions draw from."""

    @settings(max_examples=8)
    @given(setting=SETTINGS, stop=st.integers(0, 2 * EPOCH - 1), num_val=st.sampled_from([0, 2]))
    @example(setting=Setting(interval=5), stop=3, num_val=0)
    @example(setting=Setting("lru", interval=4), stop=0, num_val=2)
    def holds(setting: Setting, stop: int, num_val: int) -> None:
        with TemporaryDirectory() as folder:
            found = two_ranks.run(collisions.resume_differs, setting, folder, stop, num_val=num_val)
        assert found == [[], []]

    holds()
