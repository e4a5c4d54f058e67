"""When ranks that know how many batches they have ask each other."""

from lightning_overlap.distributed import MAX_INTERVAL, PollInterval


def _asked(num_batches: int, requested_interval: int) -> list[int]:
    polls, asked = PollInterval(), []
    for index in range(num_batches):
        if polls.due(index):
            polls.ask(index)
            polls.hear(requested_interval, num_batches)
            asked.append(index)
    return asked


def test_no_rank_can_run_out_of_batches_between_two_asks_unless_most_of_those_left_are_none() -> None:
    assert _asked(1000, 0) == [0, 255, 510, 755, 877, 938, 969, 984, 992, 996, 998, 999]


def test_the_shortest_interval_that_a_rank_wants_is_taken() -> None:
    assert _asked(1000, MAX_INTERVAL - 2) == [*range(0, 998, 2), 998, 999]
