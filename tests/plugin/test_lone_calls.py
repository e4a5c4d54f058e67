"""What waits for all ranks, called on one rank alone, ends on every rank with a text that says who waits in what."""

from ..support.pairs import in_turn
from ..support.ranks import Ranks, free_port
from . import lone_calls
from .lone_calls import CALLS, PLACES

WAITS = {"log": "reduces a value (self.log", "gather": "gathers values", "barrier": "waits in strategy.barrier"}


def test_every_rank_learns_who_waits_in_what(two_ranks: Ranks) -> None:
    """gloo would end the process without a text, where it receives data of another size."""
    try:
        for rank, (place, call) in enumerate(in_turn(PLACES, CALLS)):
            for text in two_ranks.run(lone_calls.fit, free_port(), call, place, rank % 2):
                waiting = [part for part in text.replace("; ", "\n").splitlines() if WAITS[call] in part]
                assert waiting, text
                assert all(f"rank {rank % 2} " in one for one in waiting), text
    finally:
        two_ranks.close()  # their default group is another one
