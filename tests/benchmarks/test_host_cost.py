"""What a step asks of the CUDA runtime and of the interpreter does not grow unseen: counted on stand-ins."""

from collections.abc import Sequence

from benchmarks import host_cost

from ..support.ranks import Ranks

# Of one step on two ranks, by arm: events made, recorded and waited for, of these waits of an event's own stream,
# switches of the current stream, `record_stream` calls, walks of a nested value; Python functions called at most.
EXPECTED = {
    "base": (0, 1, 0, 0, 6, 0, 10, 3150),
    "sparse_dist": (2, 3, 3, 0, 12, 10, 12, 3050),
    "fused_sparse_dist": (2, 4, 4, 0, 12, 10, 14, 3040),
    "fused_sparse_dist/current": (2, 3, 3, 0, 12, 10, 13, 3030),
    "fused_sparse_dist/dedicated": (3, 5, 5, 0, 12, 12, 15, 3050),
    "fused_sparse_dist_after_optimizer": (2, 5, 5, 0, 12, 10, 14, 3050),
    "split_backward": (2, 6, 5, 0, 16, 11, 15, 3500),
    "prefetch": (4, 8, 8, 0, 16, 12, 16, 3150),
    "torchrec/sparse_dist": (3, 3, 3, 0, 8, 10, 9, 2000),
}
COUNTED = ("made", "recorded", "waits", "idle waits", "switches", "record_stream", "walks", "calls")
NUM_STEPS = 4


def count_all(arms: Sequence[str]) -> dict[str, dict[str, float]]:
    return {arm: host_cost.count(arm, NUM_STEPS).numbers for arm in arms}


def test_no_count_of_a_step_grows(two_ranks: Ranks) -> None:
    found, _ = two_ranks.run_once(count_all, list(EXPECTED))
    counted = {arm: tuple(numbers[name] for name in COUNTED) for arm, numbers in found.items()}
    assert {arm: numbers[:-1] for arm, numbers in counted.items()} == {arm: row[:-1] for arm, row in EXPECTED.items()}
    for arm, (*_, calls) in counted.items():
        assert calls <= EXPECTED[arm][-1], arm
    assert all(numbers[3] == 0 for numbers in counted.values()), "a stream waits for itself"
    # TorchRec makes an event for each wait.
    theirs = counted["torchrec/sparse_dist"]
    assert counted["fused_sparse_dist"][0] < theirs[0]
