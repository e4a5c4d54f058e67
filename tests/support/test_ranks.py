"""The ranks that tests share: a call that did not end is nobody else's."""

import multiprocessing.connection
from collections.abc import Callable
from unittest import mock

import pytest

from .ranks import Ranks


def test_an_interrupted_call_leaves_no_answer_to_the_next(get_ranks: Callable[..., Ranks]) -> None:
    ranks = get_ranks(1)
    effects = [KeyboardInterrupt, *[mock.DEFAULT] * 9]  # what ends the processes waits, too
    wait = mock.Mock(wraps=multiprocessing.connection.wait, side_effect=effects)
    with mock.patch.object(multiprocessing.connection, "wait", wait), pytest.raises(KeyboardInterrupt):
        ranks.run(abs, -1)
    assert get_ranks(1).run(abs, -2) == [2]
