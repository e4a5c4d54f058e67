"""Law 6, in any hook of the user on one rank, while a checkpoint is written: all ranks end soon, its error is known."""

import re
import tempfile
from pathlib import Path
from typing import Any

from hypothesis import example, given, settings
from hypothesis import strategies as st

from lightning_overlap.consolidate import main as consolidate
from lightning_overlap.storage import SHARED

from ..support.ranks import Ranks, free_port
from ..support.saved import manifest_of
from .hook_faults import HOOKS, TIMEOUT_S, Ended, fail_in_hook, save_alone

INCREMENTAL = {"checkpoint_format": "incremental", "async_checkpoint": True}
OPTIONS: list[dict[str, Any]] = [INCREMENTAL, {**INCREMENTAL, "most_increments": 0}, {"async_checkpoint": True}, {}]


def test_a_hook_that_raises_on_one_rank(two_ranks: Ranks) -> None:
    """In such a checkpoint a thread waits for the training thread, and that one for the rank that has failed.

    All fits have the same processes: what one leaves behind must not disturb the next.
    """

    @settings(max_examples=4, database=None)
    @given(
        st.sampled_from(HOOKS),
        st.integers(0, 1),
        st.sampled_from(["fused_sparse_dist", "split_backward", "semi_sync_deferred"]),
        st.sampled_from(OPTIONS),
    )
    @example(("module", "configure_optimizers"), 0, "split_backward", INCREMENTAL)  # then the ranks have begun unlike
    @example(("module", "on_train_batch_start"), 1, "fused_sparse_dist", INCREMENTAL)
    @example(("module", "on_before_batch_transfer"), 0, "fused_sparse_dist", INCREMENTAL)
    @example(("module", "training_step"), 0, "fused_sparse_dist", {**INCREMENTAL, "most_increments": 0})
    def all_end(hook: tuple[str, str], rank: int, pipeline: str, options: dict[str, Any]) -> None:
        with tempfile.TemporaryDirectory() as folder:
            ends: list[Ended] = two_ranks.run(fail_in_hook, folder, free_port(), hook, rank, pipeline, options)
            checkpoints = [path for path in Path(folder).iterdir() if path.name != SHARED]  # nothing else is left
            listed = {save for path in checkpoints for save in manifest_of(path).saves() if save.startswith(SHARED)}
            assert {f"{SHARED}/{path.name}" for path in Path(folder, SHARED).glob("*")} == listed
            for path in checkpoints:
                assert consolidate([str(path), f"{path}.whole"]) == 0
        raised, other = ends[rank], ends[1 - rank]
        assert raised.said == f"InjectedError: {hook[1]}"
        assert not any("failed as well" in note for note in raised.notes), "what was being written is complete"
        assert max(raised.seconds, other.seconds) < TIMEOUT_S / 2
        if other.said != "nothing":  # after its training a rank may need no other
            cause = (
                rf"rank {rank} had failed .*, in .*faulty \(tests/laws/hook_faults.py:\d+\): InjectedError: {hook[1]}"
            )
            assert re.fullmatch(cause, other.notes[-1]), other
            assert "in phase" not in other.said

    try:
        all_end()
    finally:
        two_ranks.close()  # their default group is another one


def test_a_save_on_one_rank_alone_is_named_on_all(two_ranks: Ranks, tmp_path: Path) -> None:
    try:
        for rank, pipeline in enumerate(["fused_sparse_dist", "semi_sync"]):
            ends = two_ranks.run(save_alone, str(tmp_path), free_port(), rank, pipeline)
            said = f"RuntimeError: rank {rank} calls trainer.save_checkpoint, rank {1 - rank} goes on without it."
            assert ends[rank].said.startswith(said)
            where = r"in .*on_train_batch_end \(tests/laws/hook_faults.py:\d+\)"
            assert re.match(rf"rank {rank} had failed after batch 1, {where}: {said}", ends[1 - rank].notes[-1]), ends
            assert not [*tmp_path.glob("alone*")]
    finally:
        two_ranks.close()
